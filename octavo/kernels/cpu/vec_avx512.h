// The vocabulary in which every kernel is written once: vectors of 16 lanes. vec_avx512.h,
// vec_avx2.h and vec_portable.h define the same names with the same meaning; a unit includes one.
//
//   F  16 floats      I  16 int32      B  64 bytes      M  16 lanes, true or false
//
//   load(p) store(p, v)                 F or I by the pointer's type; any alignment
//   load_n(p, n) store_n(p, v, n)       first n lanes, 0 <= n <= 16; others read as 0, untouched
//   zero_f() zero_i() set1(x) iota()    iota: 0..15 as I
//   add sub mul div fma(a,b,c)=a*b+c min max abs neg sqrt floor round       F (round: to even)
//   add sub mul min max and_ or_ xor_ shl<n> shr<n> (signed) shru<n>        I (mul: low 32 bits)
//     min(a, b) = a < b ? a : b, max(a, b) = a > b ? a : b: if either is NaN the result is b
//   hsum hmax hmin (F), hsum (I)        one fixed tree: 16 -> 8 (i, i+8) -> 4 -> 2 -> 1
//   quad_max(v, out) quad_sum(v, out)   of I v[16]: lane r of out[q], q < 4, is the largest, or the
//                                       sum, of lanes 4q..4q+3 of v[r]
//   lt le gt ge eq ne (F), lt gt eq (I) M; NaN compares false, ne true
//   and_ or_ not_ first_n(n) bits(m) any(m) all(m)       bits: lane i is bit i
//   select(m, a, b) = m ? a : b         F, I
//   to_i32(F) round to nearest even; NaN and out of range give INT32_MIN.  to_f32(I);
//     to_f32(I, m): 0 where not m
//   bitcast_i(F) bitcast_f(I)
//   load_f16(p) load_bf16(p)            16 halves -> F;  load_f16_n, load_bf16_n: first n
//   store_bf16(p, F)  store_bf16_n(p, F, n)   round to nearest even, NaN stays NaN
//   load_i8(p) load_u8(p) -> I          store_i8(p, I) saturates
//   store_i8(p, I a, I b) -> I          both, in [-128, 127], to p[0..31]; the lanes of the result's
//                                       first half add up to the sum of a, of its second half to b's
//   store_i16_split(low, high, I a, I b) -> I  numbers in [-32640, 32639] as 256 * high + low, 32
//                                       bytes each; the result likewise
//   exp_(F)                             relative error <= 2e-7; exp(-inf) = 0, exp(NaN) = NaN
//   exp2_(F)                            2^x for x < 128, likewise
//   dot_u8s8(I acc, B w, quad)          lane i: acc + sum over j<4 of u8 w[4i+j] * s8 quad[j],
//                                       exact in int32; quad is const int8_t* or its int32
//   dot_u7s8(I acc, B w, quad)          the same for w <= 127, where AVX2 is twice as fast
//   dot_bf16(F acc, B w, pair)          lane i: acc + w[2i]*pair[0] + w[2i+1]*pair[1] in bf16;
//                                       pair is const uint16_t* or its uint32
//   prefetch(p) prefetch_l2(p)          into L1, or no nearer than L2; never faults
//   load_b(p) store_b(p, B) set1_u8 and_b or_b add_b xor_b shl16_b<n> shr16_b<n>
//   held(B) -> B                        the same, in a register: gcc would rather load it again
//   add_bits_b(B, mask, value)          adds value to the bytes whose bit of the u64 is set
//   lo_bf16(B) hi_bf16(B) -> F          even / odd bf16 of each pair;  u8_lane<j>(B) -> I byte 4i+j
//   pair_bf16(F even, F odd) -> B       rounds both to bf16 and interleaves them
//   pair_u7<h>(B) -> B                  bf16 pair i: 128 + byte 4i+2h, 128 + the next; bytes <= 127
//   pair_u8<h>(B) -> B                  likewise the bytes themselves, any
//   kTileRows, OCTAVO_UNROLL_QUADS      what the registers hold: rows of a tile; whether a block's
//                                       eight vectors live in registers (unrolled) or in memory
//
// Include at global scope; kernel sources (*.inl) open `namespace octavo { namespace {` themselves.
// No standard library code: its inline functions are weak symbols, and the linker would keep one
// ISA's copy for all.
#pragma once
#if defined(__GNUC__) && !defined(__clang__)
// gcc's own avx512fintrin.h passes undefined values to masked builtins (gcc bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#define OCTAVO_INLINE static inline __attribute__((always_inline))
#define OCTAVO_UNROLL_QUADS _Pragma("GCC unroll 8")

namespace octavo {
namespace {

constexpr int kTileRows = 16;  // rows of activations whose sums the registers hold at once

struct F { __m512 v; };
struct I { __m512i v; };
struct B { __m512i v; };
struct M { __mmask16 v; };

OCTAVO_INLINE M first_n(int64_t n) { return {static_cast<__mmask16>((1u << n) - 1)}; }
OCTAVO_INLINE uint32_t bits(M m) { return m.v; }
OCTAVO_INLINE bool any(M m) { return m.v != 0; }
OCTAVO_INLINE bool all(M m) { return m.v == 0xffff; }
OCTAVO_INLINE M and_(M a, M b) { return {static_cast<__mmask16>(a.v & b.v)}; }
OCTAVO_INLINE M or_(M a, M b) { return {static_cast<__mmask16>(a.v | b.v)}; }
OCTAVO_INLINE M not_(M a) { return {static_cast<__mmask16>(~a.v)}; }

OCTAVO_INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
OCTAVO_INLINE I load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
OCTAVO_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
OCTAVO_INLINE void store(int32_t* p, I a) { _mm512_storeu_si512(p, a.v); }
OCTAVO_INLINE F load_n(const float* p, int64_t n) {
  return {_mm512_maskz_loadu_ps(first_n(n).v, p)};
}
OCTAVO_INLINE I load_n(const int32_t* p, int64_t n) {
  return {_mm512_maskz_loadu_epi32(first_n(n).v, p)};
}
OCTAVO_INLINE void store_n(float* p, F a, int64_t n) {
  _mm512_mask_storeu_ps(p, first_n(n).v, a.v);
}
OCTAVO_INLINE void store_n(int32_t* p, I a, int64_t n) {
  _mm512_mask_storeu_epi32(p, first_n(n).v, a.v);
}
OCTAVO_INLINE F zero_f() { return {_mm512_setzero_ps()}; }
OCTAVO_INLINE I zero_i() { return {_mm512_setzero_si512()}; }
OCTAVO_INLINE F set1(float x) { return {_mm512_set1_ps(x)}; }
OCTAVO_INLINE I set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
OCTAVO_INLINE I iota() {
  return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
}

OCTAVO_INLINE F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
OCTAVO_INLINE F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
OCTAVO_INLINE F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
OCTAVO_INLINE F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
OCTAVO_INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
OCTAVO_INLINE F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
OCTAVO_INLINE F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
OCTAVO_INLINE F abs(F a) { return {_mm512_abs_ps(a.v)}; }
OCTAVO_INLINE F neg(F a) { return {_mm512_xor_ps(a.v, _mm512_set1_ps(-0.0f))}; }
OCTAVO_INLINE F sqrt(F a) { return {_mm512_sqrt_ps(a.v)}; }
OCTAVO_INLINE F floor(F a) { return {_mm512_roundscale_ps(a.v, 0x09)}; }
OCTAVO_INLINE F round(F a) { return {_mm512_roundscale_ps(a.v, 0x08)}; }

OCTAVO_INLINE I add(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
OCTAVO_INLINE I sub(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
OCTAVO_INLINE I mul(I a, I b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
OCTAVO_INLINE I min(I a, I b) { return {_mm512_min_epi32(a.v, b.v)}; }
OCTAVO_INLINE I max(I a, I b) { return {_mm512_max_epi32(a.v, b.v)}; }
OCTAVO_INLINE I and_(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
OCTAVO_INLINE I or_(I a, I b) { return {_mm512_or_si512(a.v, b.v)}; }
OCTAVO_INLINE I xor_(I a, I b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int n> OCTAVO_INLINE I shl(I a) { return {_mm512_slli_epi32(a.v, n)}; }
template <int n> OCTAVO_INLINE I shr(I a) { return {_mm512_srai_epi32(a.v, n)}; }
template <int n> OCTAVO_INLINE I shru(I a) { return {_mm512_srli_epi32(a.v, n)}; }

OCTAVO_INLINE M lt(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
OCTAVO_INLINE M le(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
OCTAVO_INLINE M gt(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
OCTAVO_INLINE M ge(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
OCTAVO_INLINE M eq(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
OCTAVO_INLINE M ne(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_NEQ_UQ)}; }
OCTAVO_INLINE M lt(I a, I b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
OCTAVO_INLINE M gt(I a, I b) { return {_mm512_cmpgt_epi32_mask(a.v, b.v)}; }
OCTAVO_INLINE M eq(I a, I b) { return {_mm512_cmpeq_epi32_mask(a.v, b.v)}; }
OCTAVO_INLINE F select(M m, F a, F b) { return {_mm512_mask_blend_ps(m.v, b.v, a.v)}; }
OCTAVO_INLINE I select(M m, I a, I b) { return {_mm512_mask_blend_epi32(m.v, b.v, a.v)}; }

OCTAVO_INLINE I to_i32(F a) { return {_mm512_cvtps_epi32(a.v)}; }
OCTAVO_INLINE F to_f32(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
OCTAVO_INLINE F to_f32(I a, M m) { return {_mm512_maskz_cvtepi32_ps(m.v, a.v)}; }
OCTAVO_INLINE I bitcast_i(F a) { return {_mm512_castps_si512(a.v)}; }
OCTAVO_INLINE F bitcast_f(I a) { return {_mm512_castsi512_ps(a.v)}; }

OCTAVO_INLINE __m256 low_half(F a) { return _mm512_castps512_ps256(a.v); }
OCTAVO_INLINE __m256 high_half(F a) { return _mm512_extractf32x8_ps(a.v, 1); }
OCTAVO_INLINE float hsum(F a) {
  __m256 h = _mm256_add_ps(low_half(a), high_half(a));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
OCTAVO_INLINE float hmax(F a) {
  __m256 h = _mm256_max_ps(low_half(a), high_half(a));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
OCTAVO_INLINE float hmin(F a) {
  __m256 h = _mm256_min_ps(low_half(a), high_half(a));
  __m128 q = _mm_min_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_min_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_min_ss(q, _mm_movehdup_ps(q)));
}
// Four rows become one vector of quads' results, lane by lane of 128 bits; then those lanes are
// transposed.
template <class Op>
OCTAVO_INLINE void fold_quads(const I* v, I* out, Op op) {
  __m512i g[4];
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    const __m512i a = v[4 * k].v, b = v[4 * k + 1].v, c = v[4 * k + 2].v, d = v[4 * k + 3].v;
    const __m512i x = op(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i y = op(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    g[k] = op(_mm512_unpacklo_epi64(x, y), _mm512_unpackhi_epi64(x, y));
  }
  const __m512i p = _mm512_shuffle_i32x4(g[0], g[1], 0x44);
  const __m512i q = _mm512_shuffle_i32x4(g[2], g[3], 0x44);
  const __m512i r = _mm512_shuffle_i32x4(g[0], g[1], 0xee);
  const __m512i s = _mm512_shuffle_i32x4(g[2], g[3], 0xee);
  out[0] = {_mm512_shuffle_i32x4(p, q, 0x88)};
  out[1] = {_mm512_shuffle_i32x4(p, q, 0xdd)};
  out[2] = {_mm512_shuffle_i32x4(r, s, 0x88)};
  out[3] = {_mm512_shuffle_i32x4(r, s, 0xdd)};
}
OCTAVO_INLINE void quad_max(const I* v, I* out) {
  fold_quads(v, out, [](__m512i a, __m512i b) { return _mm512_max_epi32(a, b); });
}
OCTAVO_INLINE void quad_sum(const I* v, I* out) {
  fold_quads(v, out, [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); });
}
OCTAVO_INLINE int32_t hsum(I a) {
  __m256i h = _mm256_add_epi32(_mm512_castsi512_si256(a.v), _mm512_extracti64x4_epi64(a.v, 1));
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}

OCTAVO_INLINE F load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
OCTAVO_INLINE F load_f16_n(const uint16_t* p, int64_t n) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_n(n).v, p))};
}
OCTAVO_INLINE __m512 widen_bf16(__m256i h) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
OCTAVO_INLINE F load_bf16(const uint16_t* p) {
  return {widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
OCTAVO_INLINE F load_bf16_n(const uint16_t* p, int64_t n) {
  return {widen_bf16(_mm256_maskz_loadu_epi16(first_n(n).v, p))};
}
OCTAVO_INLINE void store_bf16(uint16_t* p, F a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a.v));
}
OCTAVO_INLINE void store_bf16_n(uint16_t* p, F a, int64_t n) {
  _mm256_mask_storeu_epi16(p, first_n(n).v, (__m256i)_mm512_cvtneps_pbh(a.v));
}
OCTAVO_INLINE I load_i8(const int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
OCTAVO_INLINE I load_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
OCTAVO_INLINE void store_i8(int8_t* p, I a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a.v));
}

OCTAVO_INLINE __m512i both_i16(I a, I b) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(a.v)),
                            _mm512_cvtepi32_epi16(b.v), 1);
}
OCTAVO_INLINE void store_low_bytes(int8_t* p, __m512i words) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi16_epi8(words));
}
OCTAVO_INLINE I store_i8(int8_t* p, I a, I b) {
  const __m512i v = both_i16(a, b);
  store_low_bytes(p, v);
  return {_mm512_madd_epi16(v, _mm512_set1_epi16(1))};
}
OCTAVO_INLINE I store_i16_split(int8_t* low, int8_t* high, I a, I b) {
  const __m512i v = both_i16(a, b);
  store_low_bytes(low, v);
  store_low_bytes(high, _mm512_srai_epi16(_mm512_add_epi16(v, _mm512_set1_epi16(128)), 8));
  return {_mm512_madd_epi16(v, _mm512_set1_epi16(1))};
}

// exp(x) = 2^n * p(r), r = x - n ln 2 in two steps, p of degree 5 with p(0) = 1.
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
  return {_mm512_scalef_ps(p.v, n.v)};
}

OCTAVO_INLINE F exp2_(F x) {
  x = max(set1(-150.0f), x);  // NaN is the second operand: it passes
  const F n = round(x), r = sub(x, n);
  F p = fma(r, set1(1.326472730e-3f), set1(9.671512991e-3f));
  p = fma(p, r, set1(5.550733581e-2f));
  p = fma(p, r, set1(2.402224243e-1f));
  p = fma(p, r, set1(6.931470037e-1f));
  p = fma(p, r, set1(1.0f));
  return {_mm512_scalef_ps(p.v, n.v)};
}

OCTAVO_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
OCTAVO_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

OCTAVO_INLINE B load_b(const void* p) { return {_mm512_loadu_si512(p)}; }
OCTAVO_INLINE B held(B a) {
  asm("" : "+v"(a.v));
  return a;
}
OCTAVO_INLINE void store_b(void* p, B a) { _mm512_storeu_si512(p, a.v); }
OCTAVO_INLINE B set1_u8(uint8_t x) { return {_mm512_set1_epi8(static_cast<char>(x))}; }
OCTAVO_INLINE B and_b(B a, B b) { return {_mm512_and_si512(a.v, b.v)}; }
OCTAVO_INLINE B or_b(B a, B b) { return {_mm512_or_si512(a.v, b.v)}; }
OCTAVO_INLINE B xor_b(B a, B b) { return {_mm512_xor_si512(a.v, b.v)}; }
OCTAVO_INLINE B add_b(B a, B b) { return {_mm512_add_epi8(a.v, b.v)}; }
template <int n> OCTAVO_INLINE B shl16_b(B a) { return {_mm512_slli_epi16(a.v, n)}; }
template <int n> OCTAVO_INLINE B shr16_b(B a) { return {_mm512_srli_epi16(a.v, n)}; }
OCTAVO_INLINE B add_bits_b(B a, uint64_t mask, B value) {
  return {_mm512_mask_add_epi8(a.v, mask, a.v, value.v)};
}
OCTAVO_INLINE F lo_bf16(B a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
OCTAVO_INLINE F hi_bf16(B a) {
  return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(-65536)))};
}
OCTAVO_INLINE B pair_bf16(F even, F odd) {
  __m512i e = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even.v));
  __m512i o = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd.v));
  return {_mm512_or_si512(e, _mm512_slli_epi32(o, 16))};
}
template <int j> OCTAVO_INLINE I u8_lane(B a) {
  return {_mm512_and_si512(_mm512_srli_epi32(a.v, 8 * j), _mm512_set1_epi32(255))};
}

struct Pairs { uint8_t at[64]; };
// Bytes 4i+2h and 4i+2h+1 of the first table, each followed by one of the second.
constexpr Pairs pairs_of(int h) {
  Pairs p = {};
  for (int i = 0; i < 64; ++i)
    p.at[i] = static_cast<uint8_t>(i % 2 == 1 ? 64 : i / 4 * 4 + 2 * h + i % 4 / 2);
  return p;
}
// A bf16 in 128..255 has its seven low bits below the exponent 0x43.
template <int h> OCTAVO_INLINE B pair_u7(B a) {
  alignas(64) static constexpr Pairs which = pairs_of(h);
  return {_mm512_permutex2var_epi8(a.v, _mm512_load_si512(&which), _mm512_set1_epi8(0x43))};
}
template <int h> OCTAVO_INLINE B pair_u8(B a) {
  const __m512i even = _mm512_castps_si512(to_f32(u8_lane<2 * h>(a)).v);
  const __m512i odd = _mm512_castps_si512(to_f32(u8_lane<2 * h + 1>(a)).v);
  return {_mm512_or_si512(_mm512_srli_epi32(even, 16), odd)};
}

OCTAVO_INLINE I dot_u8s8(I acc, B w, int32_t quad) {
  return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(quad))};
}
// gcc 12 does not fold the broadcast into the instruction, which would cost a register and a slot.
OCTAVO_INLINE I dot_u8s8(I acc, B w, const int8_t* quad) {
  struct Quad { int8_t b[4]; };
  asm("vpdpbusd %2%{1to16%}, %1, %0"
      : "+v"(acc.v) : "v"(w.v), "m"(*reinterpret_cast<const Quad*>(quad)));
  return acc;
}
OCTAVO_INLINE I dot_u7s8(I acc, B w, int32_t quad) { return dot_u8s8(acc, w, quad); }
OCTAVO_INLINE I dot_u7s8(I acc, B w, const int8_t* quad) { return dot_u8s8(acc, w, quad); }
OCTAVO_INLINE F dot_bf16(F acc, B w, uint32_t pair) {
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)w.v,
                           (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(pair)))};
}
OCTAVO_INLINE F dot_bf16(F acc, B w, const uint16_t* pair) {
  struct Pair { uint16_t h[2]; };
  asm("vdpbf16ps %2%{1to16%}, %1, %0"
      : "+v"(acc.v) : "v"(w.v), "m"(*reinterpret_cast<const Pair*>(pair)));
  return acc;
}

}  // namespace
}  // namespace octavo
