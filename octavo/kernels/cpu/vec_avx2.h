// The vocabulary of vec_avx512.h, which documents it, on two 256-bit halves: AVX2, FMA, F16C.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#define OCTAVO_INLINE static inline __attribute__((always_inline))
#define OCTAVO_UNROLL_QUADS _Pragma("GCC unroll 1")

namespace octavo {
namespace {

constexpr int kTileRows = 4;  // rows of activations whose sums the registers hold at once

struct F { __m256 a, b; };
struct I { __m256i a, b; };
struct B { __m256i a, b; };
struct M { __m256i a, b; };  // all bits of a lane

OCTAVO_INLINE I zero_i() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
OCTAVO_INLINE I set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
OCTAVO_INLINE I iota() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
          _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
OCTAVO_INLINE M gt(I x, I y) {
  return {_mm256_cmpgt_epi32(x.a, y.a), _mm256_cmpgt_epi32(x.b, y.b)};
}
OCTAVO_INLINE M lt(I x, I y) { return gt(y, x); }
OCTAVO_INLINE M eq(I x, I y) {
  return {_mm256_cmpeq_epi32(x.a, y.a), _mm256_cmpeq_epi32(x.b, y.b)};
}
OCTAVO_INLINE M first_n(int64_t n) { return gt(set1(static_cast<int32_t>(n)), iota()); }
OCTAVO_INLINE uint32_t bits(M m) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(m.a))) |
         static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(m.b))) << 8;
}
OCTAVO_INLINE bool any(M m) { return bits(m) != 0; }
OCTAVO_INLINE bool all(M m) { return bits(m) == 0xffff; }
OCTAVO_INLINE M and_(M x, M y) {
  return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)};
}
OCTAVO_INLINE M or_(M x, M y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
OCTAVO_INLINE M not_(M x) {
  const __m256i ones = _mm256_set1_epi32(-1);
  return {_mm256_xor_si256(x.a, ones), _mm256_xor_si256(x.b, ones)};
}

OCTAVO_INLINE __m256i load256(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
OCTAVO_INLINE void store256(void* p, __m256i x) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), x);
}
OCTAVO_INLINE __m128i load128(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
OCTAVO_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
OCTAVO_INLINE I load(const int32_t* p) { return {load256(p), load256(p + 8)}; }
OCTAVO_INLINE void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
OCTAVO_INLINE void store(int32_t* p, I x) {
  store256(p, x.a);
  store256(p + 8, x.b);
}
OCTAVO_INLINE F load_n(const float* p, int64_t n) {
  const M m = first_n(n);
  return {_mm256_maskload_ps(p, m.a), _mm256_maskload_ps(p + 8, m.b)};
}
OCTAVO_INLINE I load_n(const int32_t* p, int64_t n) {
  const M m = first_n(n);
  return {_mm256_maskload_epi32(p, m.a), _mm256_maskload_epi32(p + 8, m.b)};
}
OCTAVO_INLINE void store_n(float* p, F x, int64_t n) {
  const M m = first_n(n);
  _mm256_maskstore_ps(p, m.a, x.a);
  _mm256_maskstore_ps(p + 8, m.b, x.b);
}
OCTAVO_INLINE void store_n(int32_t* p, I x, int64_t n) {
  const M m = first_n(n);
  _mm256_maskstore_epi32(p, m.a, x.a);
  _mm256_maskstore_epi32(p + 8, m.b, x.b);
}
OCTAVO_INLINE F zero_f() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
OCTAVO_INLINE F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }

OCTAVO_INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
OCTAVO_INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
OCTAVO_INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
OCTAVO_INLINE F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
OCTAVO_INLINE F fma(F x, F y, F z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
OCTAVO_INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
OCTAVO_INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
OCTAVO_INLINE F abs(F x) {
  const __m256 m = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(m, x.a), _mm256_andnot_ps(m, x.b)};
}
OCTAVO_INLINE F neg(F x) {
  const __m256 m = _mm256_set1_ps(-0.0f);
  return {_mm256_xor_ps(m, x.a), _mm256_xor_ps(m, x.b)};
}
OCTAVO_INLINE F sqrt(F x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
OCTAVO_INLINE F floor(F x) {
  return {_mm256_round_ps(x.a, 0x09), _mm256_round_ps(x.b, 0x09)};
}
OCTAVO_INLINE F round(F x) {
  return {_mm256_round_ps(x.a, 0x08), _mm256_round_ps(x.b, 0x08)};
}

OCTAVO_INLINE I add(I x, I y) {
  return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
OCTAVO_INLINE I sub(I x, I y) {
  return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)};
}
OCTAVO_INLINE I mul(I x, I y) {
  return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)};
}
OCTAVO_INLINE I min(I x, I y) {
  return {_mm256_min_epi32(x.a, y.a), _mm256_min_epi32(x.b, y.b)};
}
OCTAVO_INLINE I max(I x, I y) {
  return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)};
}
OCTAVO_INLINE I and_(I x, I y) {
  return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)};
}
OCTAVO_INLINE I or_(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
OCTAVO_INLINE I xor_(I x, I y) {
  return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)};
}
template <int n> OCTAVO_INLINE I shl(I x) {
  return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)};
}
template <int n> OCTAVO_INLINE I shr(I x) {
  return {_mm256_srai_epi32(x.a, n), _mm256_srai_epi32(x.b, n)};
}
template <int n> OCTAVO_INLINE I shru(I x) {
  return {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)};
}

template <int op> OCTAVO_INLINE M compare(F x, F y) {
  return {_mm256_castps_si256(_mm256_cmp_ps(x.a, y.a, op)),
          _mm256_castps_si256(_mm256_cmp_ps(x.b, y.b, op))};
}
OCTAVO_INLINE M lt(F x, F y) { return compare<_CMP_LT_OQ>(x, y); }
OCTAVO_INLINE M le(F x, F y) { return compare<_CMP_LE_OQ>(x, y); }
OCTAVO_INLINE M gt(F x, F y) { return compare<_CMP_GT_OQ>(x, y); }
OCTAVO_INLINE M ge(F x, F y) { return compare<_CMP_GE_OQ>(x, y); }
OCTAVO_INLINE M eq(F x, F y) { return compare<_CMP_EQ_OQ>(x, y); }
OCTAVO_INLINE M ne(F x, F y) { return compare<_CMP_NEQ_UQ>(x, y); }
OCTAVO_INLINE F select(M m, F x, F y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(m.a)),
          _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(m.b))};
}
OCTAVO_INLINE I select(M m, I x, I y) {
  return {_mm256_blendv_epi8(y.a, x.a, m.a), _mm256_blendv_epi8(y.b, x.b, m.b)};
}

OCTAVO_INLINE I to_i32(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
OCTAVO_INLINE F to_f32(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
OCTAVO_INLINE F to_f32(I x, M m) { return to_f32(and_(x, I{m.a, m.b})); }
OCTAVO_INLINE I bitcast_i(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
OCTAVO_INLINE F bitcast_f(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }

OCTAVO_INLINE float hsum(F x) {
  __m256 h = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
OCTAVO_INLINE float hmax(F x) {
  __m256 h = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
OCTAVO_INLINE float hmin(F x) {
  __m256 h = _mm256_min_ps(x.a, x.b);
  __m128 q = _mm_min_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_min_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_min_ss(q, _mm_movehdup_ps(q)));
}
OCTAVO_INLINE __m256i low_lanes(__m256i a, __m256i b) {
  return _mm256_permute2x128_si256(a, b, 0x20);
}
OCTAVO_INLINE __m256i high_lanes(__m256i a, __m256i b) {
  return _mm256_permute2x128_si256(a, b, 0x31);
}
template <class Op>
OCTAVO_INLINE __m256i fold_four(__m256i a, __m256i b, __m256i c, __m256i d, Op op) {
  const __m256i x = op(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  const __m256i y = op(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
  return op(_mm256_unpacklo_epi64(x, y), _mm256_unpackhi_epi64(x, y));
}
template <class Op>
OCTAVO_INLINE void fold_quads(const I* v, I* out, Op op) {
  __m256i a[4], b[4];
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    const I* r = v + 4 * k;
    a[k] = fold_four(r[0].a, r[1].a, r[2].a, r[3].a, op);
    b[k] = fold_four(r[0].b, r[1].b, r[2].b, r[3].b, op);
  }
  out[0] = {low_lanes(a[0], a[1]), low_lanes(a[2], a[3])};
  out[1] = {high_lanes(a[0], a[1]), high_lanes(a[2], a[3])};
  out[2] = {low_lanes(b[0], b[1]), low_lanes(b[2], b[3])};
  out[3] = {high_lanes(b[0], b[1]), high_lanes(b[2], b[3])};
}
OCTAVO_INLINE void quad_max(const I* v, I* out) {
  fold_quads(v, out, [](__m256i a, __m256i b) { return _mm256_max_epi32(a, b); });
}
OCTAVO_INLINE void quad_sum(const I* v, I* out) {
  fold_quads(v, out, [](__m256i a, __m256i b) { return _mm256_add_epi32(a, b); });
}
OCTAVO_INLINE int32_t hsum(I x) {
  __m256i h = _mm256_add_epi32(x.a, x.b);
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}

OCTAVO_INLINE F load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 8))};
}
OCTAVO_INLINE F load_bf16(const uint16_t* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p + 8)), 16))};
}
struct Halves { alignas(32) uint16_t h[16]; };
OCTAVO_INLINE Halves first_halves(const uint16_t* p, int64_t n) {
  Halves t = {};
  for (int64_t i = 0; i < n; ++i) t.h[i] = p[i];
  return t;
}
OCTAVO_INLINE F load_f16_n(const uint16_t* p, int64_t n) {
  return load_f16(first_halves(p, n).h);
}
OCTAVO_INLINE F load_bf16_n(const uint16_t* p, int64_t n) {
  return load_bf16(first_halves(p, n).h);
}
// Each lane's bf16 in its low 16 bits: ties to even by adding 0x7fff plus the bit kept last.
OCTAVO_INLINE __m256i round_bf16(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i last = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(r, quiet, nan), 16);
}
OCTAVO_INLINE void store_bf16(uint16_t* p, F x) {
  const __m256i packed = _mm256_packus_epi32(round_bf16(x.a), round_bf16(x.b));
  store256(p, _mm256_permute4x64_epi64(packed, 0xd8));
}
OCTAVO_INLINE void store_bf16_n(uint16_t* p, F x, int64_t n) {
  Halves t;
  store_bf16(t.h, x);
  for (int64_t i = 0; i < n; ++i) p[i] = t.h[i];
}
OCTAVO_INLINE I load_i8(const int8_t* p) {
  const __m128i x = load128(p);
  return {_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))};
}
OCTAVO_INLINE I load_u8(const uint8_t* p) {
  const __m128i x = load128(p);
  return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
OCTAVO_INLINE void store_i8(int8_t* p, I x) {
  const __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}

OCTAVO_INLINE I store_i8(int8_t* p, I x, I y) {
  const __m256i w = _mm256_packs_epi16(_mm256_packs_epi32(x.a, x.b), _mm256_packs_epi32(y.a, y.b));
  store256(p, _mm256_permutevar8x32_epi32(w, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
  return {_mm256_add_epi32(x.a, x.b), _mm256_add_epi32(y.a, y.b)};
}
OCTAVO_INLINE I store_i16_split(int8_t* low, int8_t* high, I x, I y) {
  const I half = set1(int32_t{128}), hx = shr<8>(add(x, half)), hy = shr<8>(add(y, half));
  store_i8(high, hx, hy);
  store_i8(low, sub(x, shl<8>(hx)), sub(y, shl<8>(hy)));
  return {_mm256_add_epi32(x.a, x.b), _mm256_add_epi32(y.a, y.b)};
}

// 2^(n/2) twice: one factor alone would leave the range of exponents before the product does.
OCTAVO_INLINE __m256 scale_exp2(__m256 p, __m256 n) {
  const __m256i i = _mm256_cvtps_epi32(n), bias = _mm256_set1_epi32(127);
  const __m256i half = _mm256_srai_epi32(i, 1), rest = _mm256_sub_epi32(i, half);
  const __m256i s0 = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i s1 = _mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(s0)), _mm256_castsi256_ps(s1));
}
OCTAVO_INLINE F exp_(F x) {
  x = min(set1(89.0f), max(set1(-105.0f), x));  // NaN is the second operand: it passes
  F n = round(mul(x, set1(1.44269504f)));
  F r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = fma(r, set1(8.290229165e-3f), set1(4.189839021e-2f));
  p = fma(p, r, set1(1.666764007e-1f));
  p = fma(p, r, set1(4.999914615e-1f));
  p = fma(p, r, set1(9.999997054e-1f));
  p = fma(p, r, set1(1.0f));
  return {scale_exp2(p.a, n.a), scale_exp2(p.b, n.b)};
}

OCTAVO_INLINE F exp2_(F x) {
  x = min(set1(128.0f), max(set1(-150.0f), x));  // NaN is the second operand: it passes
  const F n = round(x), r = sub(x, n);
  F p = fma(r, set1(1.326472730e-3f), set1(9.671512991e-3f));
  p = fma(p, r, set1(5.550733581e-2f));
  p = fma(p, r, set1(2.402224243e-1f));
  p = fma(p, r, set1(6.931470037e-1f));
  p = fma(p, r, set1(1.0f));
  return {scale_exp2(p.a, n.a), scale_exp2(p.b, n.b)};
}

OCTAVO_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
OCTAVO_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

OCTAVO_INLINE B load_b(const void* p) {
  return {load256(p), load256(static_cast<const uint8_t*>(p) + 32)};
}
OCTAVO_INLINE B held(B x) { return x; }  // there are too few registers
OCTAVO_INLINE void store_b(void* p, B x) {
  store256(p, x.a);
  store256(static_cast<uint8_t*>(p) + 32, x.b);
}
OCTAVO_INLINE B set1_u8(uint8_t x) {
  const __m256i v = _mm256_set1_epi8(static_cast<char>(x));
  return {v, v};
}
OCTAVO_INLINE B and_b(B x, B y) {
  return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)};
}
OCTAVO_INLINE B or_b(B x, B y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
OCTAVO_INLINE B xor_b(B x, B y) {
  return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)};
}
OCTAVO_INLINE B add_b(B x, B y) {
  return {_mm256_add_epi8(x.a, y.a), _mm256_add_epi8(x.b, y.b)};
}
template <int n> OCTAVO_INLINE B shl16_b(B x) {
  return {_mm256_slli_epi16(x.a, n), _mm256_slli_epi16(x.b, n)};
}
template <int n> OCTAVO_INLINE B shr16_b(B x) {
  return {_mm256_srli_epi16(x.a, n), _mm256_srli_epi16(x.b, n)};
}
// Byte i of the result: value where bit i of the mask is set, else 0.
OCTAVO_INLINE __m256i spread_bits(uint32_t mask, __m256i value) {
  const __m256i which = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202,
                                           0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
  __m256i m = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int32_t>(mask)), which);
  m = _mm256_cmpeq_epi8(_mm256_and_si256(m, bit), bit);
  return _mm256_and_si256(m, value);
}
OCTAVO_INLINE B add_bits_b(B x, uint64_t mask, B value) {
  return {_mm256_add_epi8(x.a, spread_bits(static_cast<uint32_t>(mask), value.a)),
          _mm256_add_epi8(x.b, spread_bits(static_cast<uint32_t>(mask >> 32), value.b))};
}
OCTAVO_INLINE F lo_bf16(B x) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(x.a, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(x.b, 16))};
}
OCTAVO_INLINE F hi_bf16(B x) {
  const __m256i m = _mm256_set1_epi32(-65536);
  return {_mm256_castsi256_ps(_mm256_and_si256(x.a, m)),
          _mm256_castsi256_ps(_mm256_and_si256(x.b, m))};
}
OCTAVO_INLINE B pair_bf16(F even, F odd) {
  return {_mm256_or_si256(round_bf16(even.a), _mm256_slli_epi32(round_bf16(odd.a), 16)),
          _mm256_or_si256(round_bf16(even.b), _mm256_slli_epi32(round_bf16(odd.b), 16))};
}
template <int j> OCTAVO_INLINE I u8_lane(B x) {
  const __m256i m = _mm256_set1_epi32(255);
  return {_mm256_and_si256(_mm256_srli_epi32(x.a, 8 * j), m),
          _mm256_and_si256(_mm256_srli_epi32(x.b, 8 * j), m)};
}

// A bf16 in 128..255 has its seven low bits below the exponent 0x43.
template <int h> OCTAVO_INLINE __m256i pair_u7_half(__m256i x) {
  const __m256i which = _mm256_set_epi8(
      -1, 13 + 2 * h, -1, 12 + 2 * h, -1, 9 + 2 * h, -1, 8 + 2 * h,
      -1, 5 + 2 * h, -1, 4 + 2 * h, -1, 1 + 2 * h, -1, 2 * h,
      -1, 13 + 2 * h, -1, 12 + 2 * h, -1, 9 + 2 * h, -1, 8 + 2 * h,
      -1, 5 + 2 * h, -1, 4 + 2 * h, -1, 1 + 2 * h, -1, 2 * h);
  return _mm256_or_si256(_mm256_shuffle_epi8(x, which), _mm256_set1_epi16(0x4300));
}
template <int h> OCTAVO_INLINE B pair_u7(B x) { return {pair_u7_half<h>(x.a), pair_u7_half<h>(x.b)}; }
OCTAVO_INLINE __m256i exact_pair(__m256 even, __m256 odd) {
  return _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(even), 16),
                         _mm256_castps_si256(odd));
}
template <int h> OCTAVO_INLINE B pair_u8(B x) {
  const F even = to_f32(u8_lane<2 * h>(x)), odd = to_f32(u8_lane<2 * h + 1>(x));
  return {exact_pair(even.a, odd.a), exact_pair(even.b, odd.b)};
}

// maddubs saturates pair sums at 16 bits. 127 * 128 * 2 fits; for any byte the top bit goes alone:
// 128 * -128 * 2 = -32768 just fits too.
OCTAVO_INLINE __m256i dot_half(__m256i acc, __m256i w, __m256i q) {
  return _mm256_add_epi32(acc,
                          _mm256_madd_epi16(_mm256_maddubs_epi16(w, q), _mm256_set1_epi16(1)));
}
OCTAVO_INLINE I dot_u7s8(I acc, B w, int32_t quad) {
  const __m256i q = _mm256_set1_epi32(quad);
  return {dot_half(acc.a, w.a, q), dot_half(acc.b, w.b, q)};
}
OCTAVO_INLINE I dot_u8s8(I acc, B w, int32_t quad) {
  const B low = set1_u8(0x7f), top = set1_u8(0x80);
  return dot_u7s8(dot_u7s8(acc, and_b(w, low), quad), and_b(w, top), quad);
}
OCTAVO_INLINE int32_t quad_at(const void* p) {
  int32_t q;
  __builtin_memcpy(&q, p, 4);
  return q;
}
OCTAVO_INLINE I dot_u8s8(I acc, B w, const int8_t* quad) {
  return dot_u8s8(acc, w, quad_at(quad));
}
OCTAVO_INLINE I dot_u7s8(I acc, B w, const int8_t* quad) {
  return dot_u7s8(acc, w, quad_at(quad));
}
OCTAVO_INLINE F dot_bf16(F acc, B w, uint32_t pair) {
  const I p = set1(static_cast<int32_t>(pair));
  const F lo = bitcast_f(shl<16>(p)), hi = bitcast_f(and_(p, set1(-65536)));
  return fma(hi_bf16(w), hi, fma(lo_bf16(w), lo, acc));
}
OCTAVO_INLINE F dot_bf16(F acc, B w, const uint16_t* pair) {
  return dot_bf16(acc, w, static_cast<uint32_t>(quad_at(pair)));
}

}  // namespace
}  // namespace octavo
