// The vocabulary of vec_avx512.h, which documents it, for any processor: four vectors of gcc's and
// clang's portable kind. fma is a product, rounded, and a sum; integers are as exact as elsewhere.
#pragma once
#include <math.h>

#include <cstddef>
#include <cstdint>

#define OCTAVO_INLINE static inline __attribute__((always_inline))
#define OCTAVO_UNROLL_QUADS _Pragma("GCC unroll 1")

namespace octavo {
namespace {

constexpr int kTileRows = 2;  // rows of activations whose sums the registers hold at once

typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));
typedef uint32_t U4 __attribute__((vector_size(16)));
typedef int16_t H8 __attribute__((vector_size(16)));
typedef uint16_t UH8 __attribute__((vector_size(16)));
typedef uint8_t B16 __attribute__((vector_size(16)));

template <class V> struct Four { V q0, q1, q2, q3; };
struct F : Four<F4> {};
struct I : Four<I4> {};
struct B : Four<B16> {};
struct M : Four<I4> {};  // all bits of a lane

template <class R, class Fn> OCTAVO_INLINE R make(Fn f) { return {{f(0), f(1), f(2), f(3)}}; }
template <class R, class X, class Fn> OCTAVO_INLINE R map(X x, Fn f) {
  return {{f(x.q0), f(x.q1), f(x.q2), f(x.q3)}};
}
template <class R, class X, class Y, class Fn> OCTAVO_INLINE R map(X x, Y y, Fn f) {
  return {{f(x.q0, y.q0), f(x.q1, y.q1), f(x.q2, y.q2), f(x.q3, y.q3)}};
}
template <class V> OCTAVO_INLINE V read(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class X> OCTAVO_INLINE X read_all(const void* p) {
  X x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

OCTAVO_INLINE F load(const float* p) {
  return make<F>([&](int i) { return read<F4>(p + 4 * i); });
}
OCTAVO_INLINE I load(const int32_t* p) {
  return make<I>([&](int i) { return read<I4>(p + 4 * i); });
}
OCTAVO_INLINE void store(float* p, F x) { __builtin_memcpy(p, &x, 64); }
OCTAVO_INLINE void store(int32_t* p, I x) { __builtin_memcpy(p, &x, 64); }
OCTAVO_INLINE F load_n(const float* p, int64_t n) {
  float t[16] = {};
  for (int64_t i = 0; i < n; ++i) t[i] = p[i];
  return load(t);
}
OCTAVO_INLINE I load_n(const int32_t* p, int64_t n) {
  int32_t t[16] = {};
  for (int64_t i = 0; i < n; ++i) t[i] = p[i];
  return load(t);
}
OCTAVO_INLINE void store_n(float* p, F x, int64_t n) {
  float t[16];
  store(t, x);
  for (int64_t i = 0; i < n; ++i) p[i] = t[i];
}
OCTAVO_INLINE void store_n(int32_t* p, I x, int64_t n) {
  int32_t t[16];
  store(t, x);
  for (int64_t i = 0; i < n; ++i) p[i] = t[i];
}
OCTAVO_INLINE F set1(float x) {
  return make<F>([&](int) { return F4{x, x, x, x}; });
}
OCTAVO_INLINE I set1(int32_t x) {
  return make<I>([&](int) { return I4{x, x, x, x}; });
}
OCTAVO_INLINE F zero_f() { return set1(0.0f); }
OCTAVO_INLINE I zero_i() { return set1(int32_t{0}); }
OCTAVO_INLINE I iota() {
  return make<I>([](int i) { return I4{4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3}; });
}

OCTAVO_INLINE F add(F x, F y) { return map<F>(x, y, [](F4 a, F4 b) { return a + b; }); }
OCTAVO_INLINE F sub(F x, F y) { return map<F>(x, y, [](F4 a, F4 b) { return a - b; }); }
OCTAVO_INLINE F mul(F x, F y) { return map<F>(x, y, [](F4 a, F4 b) { return a * b; }); }
OCTAVO_INLINE F div(F x, F y) { return map<F>(x, y, [](F4 a, F4 b) { return a / b; }); }
OCTAVO_INLINE F fma(F x, F y, F z) { return add(mul(x, y), z); }
OCTAVO_INLINE F min(F x, F y) { return map<F>(x, y, [](F4 a, F4 b) { return a < b ? a : b; }); }
OCTAVO_INLINE F max(F x, F y) { return map<F>(x, y, [](F4 a, F4 b) { return a > b ? a : b; }); }
OCTAVO_INLINE F abs(F x) { return map<F>(x, [](F4 a) { return (F4)((I4)a & 0x7fffffff); }); }
OCTAVO_INLINE F neg(F x) { return map<F>(x, [](F4 a) { return (F4)((U4)a ^ 0x80000000u); }); }
OCTAVO_INLINE F sqrt(F x) {
  return map<F>(x, [](F4 a) {
    return F4{__builtin_sqrtf(a[0]), __builtin_sqrtf(a[1]), __builtin_sqrtf(a[2]),
              __builtin_sqrtf(a[3])};
  });
}

OCTAVO_INLINE I add(I x, I y) {
  return map<I>(x, y, [](I4 a, I4 b) { return (I4)((U4)a + (U4)b); });
}
OCTAVO_INLINE I sub(I x, I y) {
  return map<I>(x, y, [](I4 a, I4 b) { return (I4)((U4)a - (U4)b); });
}
OCTAVO_INLINE I mul(I x, I y) {
  return map<I>(x, y, [](I4 a, I4 b) { return (I4)((U4)a * (U4)b); });
}
OCTAVO_INLINE I min(I x, I y) { return map<I>(x, y, [](I4 a, I4 b) { return a < b ? a : b; }); }
OCTAVO_INLINE I max(I x, I y) { return map<I>(x, y, [](I4 a, I4 b) { return a > b ? a : b; }); }
OCTAVO_INLINE I and_(I x, I y) { return map<I>(x, y, [](I4 a, I4 b) { return a & b; }); }
OCTAVO_INLINE I or_(I x, I y) { return map<I>(x, y, [](I4 a, I4 b) { return a | b; }); }
OCTAVO_INLINE I xor_(I x, I y) { return map<I>(x, y, [](I4 a, I4 b) { return a ^ b; }); }
template <int n> OCTAVO_INLINE I shl(I x) {
  return map<I>(x, [](I4 a) { return (I4)((U4)a << n); });
}
template <int n> OCTAVO_INLINE I shr(I x) {
  return map<I>(x, [](I4 a) { return a >> n; });
}
template <int n> OCTAVO_INLINE I shru(I x) {
  return map<I>(x, [](I4 a) { return (I4)((U4)a >> n); });
}

OCTAVO_INLINE M lt(F x, F y) { return map<M>(x, y, [](F4 a, F4 b) { return a < b; }); }
OCTAVO_INLINE M le(F x, F y) { return map<M>(x, y, [](F4 a, F4 b) { return a <= b; }); }
OCTAVO_INLINE M gt(F x, F y) { return map<M>(x, y, [](F4 a, F4 b) { return a > b; }); }
OCTAVO_INLINE M ge(F x, F y) { return map<M>(x, y, [](F4 a, F4 b) { return a >= b; }); }
OCTAVO_INLINE M eq(F x, F y) { return map<M>(x, y, [](F4 a, F4 b) { return a == b; }); }
OCTAVO_INLINE M ne(F x, F y) { return map<M>(x, y, [](F4 a, F4 b) { return a != b; }); }
OCTAVO_INLINE M lt(I x, I y) { return map<M>(x, y, [](I4 a, I4 b) { return a < b; }); }
OCTAVO_INLINE M gt(I x, I y) { return map<M>(x, y, [](I4 a, I4 b) { return a > b; }); }
OCTAVO_INLINE M eq(I x, I y) { return map<M>(x, y, [](I4 a, I4 b) { return a == b; }); }
OCTAVO_INLINE M and_(M x, M y) { return map<M>(x, y, [](I4 a, I4 b) { return a & b; }); }
OCTAVO_INLINE M or_(M x, M y) { return map<M>(x, y, [](I4 a, I4 b) { return a | b; }); }
OCTAVO_INLINE M not_(M x) { return map<M>(x, [](I4 a) { return ~a; }); }
OCTAVO_INLINE M first_n(int64_t n) { return lt(iota(), set1(static_cast<int32_t>(n))); }
OCTAVO_INLINE uint32_t bits(M x) {
  int32_t t[16];
  __builtin_memcpy(t, &x, 64);
  uint32_t r = 0;
  for (int i = 0; i < 16; ++i) r |= static_cast<uint32_t>(t[i] & 1) << i;
  return r;
}
OCTAVO_INLINE bool any(M m) { return bits(m) != 0; }
OCTAVO_INLINE bool all(M m) { return bits(m) == 0xffff; }
OCTAVO_INLINE F4 pick(I4 m, F4 a, F4 b) { return (F4)((m & (I4)a) | (~m & (I4)b)); }
OCTAVO_INLINE I4 pick(I4 m, I4 a, I4 b) { return (m & a) | (~m & b); }
OCTAVO_INLINE F select(M m, F x, F y) {
  return {{pick(m.q0, x.q0, y.q0), pick(m.q1, x.q1, y.q1), pick(m.q2, x.q2, y.q2),
           pick(m.q3, x.q3, y.q3)}};
}
OCTAVO_INLINE I select(M m, I x, I y) {
  return {{pick(m.q0, x.q0, y.q0), pick(m.q1, x.q1, y.q1), pick(m.q2, x.q2, y.q2),
           pick(m.q3, x.q3, y.q3)}};
}

// To even: adding 2^23 to |a| < 2^23 leaves no room for a fraction. The sign is put back, -0 too.
OCTAVO_INLINE F4 round_even(F4 a) {
  const I4 sign = (I4)a & (I4)((U4){} + 0x80000000u);
  const F4 m = (F4)((I4)a & 0x7fffffff);
  const F4 r = (m + 8388608.0f) - 8388608.0f;
  return pick(m < 8388608.0f, (F4)((I4)r | sign), a);
}
OCTAVO_INLINE F round(F x) { return map<F>(x, [](F4 a) { return round_even(a); }); }
OCTAVO_INLINE F floor(F x) {
  return map<F>(x, [](F4 a) {
    const F4 r = round_even(a);
    return r - pick(r > a, (F4){} + 1.0f, (F4){});
  });
}
OCTAVO_INLINE I4 to_int(F4 a) {
  const F4 r = round_even(a);
  const I4 inside = (r < 2147483648.0f) & (r >= -2147483648.0f);
  return pick(inside, __builtin_convertvector(pick(inside, r, (F4){}), I4),
              (I4)((U4){} + 0x80000000u));
}
OCTAVO_INLINE I to_i32(F x) { return map<I>(x, [](F4 a) { return to_int(a); }); }
OCTAVO_INLINE F to_f32(I x) {
  return map<F>(x, [](I4 a) { return __builtin_convertvector(a, F4); });
}
OCTAVO_INLINE F to_f32(I x, M m) { return to_f32(select(m, x, zero_i())); }
OCTAVO_INLINE I bitcast_i(F x) { return map<I>(x, [](F4 a) { return (I4)a; }); }
OCTAVO_INLINE F bitcast_f(I x) { return map<F>(x, [](I4 a) { return (F4)a; }); }

template <class V, class Fn> OCTAVO_INLINE auto fold(Four<V> x, Fn f) {
  const V q = f(f(x.q0, x.q2), f(x.q1, x.q3));
  const V h = f(q, (V){q[2], q[3], q[0], q[1]});
  return f(h, (V){h[1], h[0], h[3], h[2]})[0];
}
OCTAVO_INLINE float hsum(F x) { return fold(x, [](F4 a, F4 b) { return a + b; }); }
OCTAVO_INLINE float hmax(F x) { return fold(x, [](F4 a, F4 b) { return a > b ? a : b; }); }
OCTAVO_INLINE float hmin(F x) { return fold(x, [](F4 a, F4 b) { return a < b ? a : b; }); }
template <class Op>
OCTAVO_INLINE void fold_quads(const I* v, I* out, Op op) {
  int32_t folded[4][16];
  for (int r = 0; r < 16; ++r) {
    const I4 quads[4] = {v[r].q0, v[r].q1, v[r].q2, v[r].q3};
    for (int q = 0; q < 4; ++q)
      folded[q][r] = op(op(quads[q][0], quads[q][1]), op(quads[q][2], quads[q][3]));
  }
  for (int q = 0; q < 4; ++q) out[q] = load(folded[q]);
}
OCTAVO_INLINE void quad_max(const I* v, I* out) {
  fold_quads(v, out, [](int32_t a, int32_t b) { return a > b ? a : b; });
}
OCTAVO_INLINE void quad_sum(const I* v, I* out) {
  fold_quads(v, out, [](int32_t a, int32_t b) { return a + b; });
}
OCTAVO_INLINE int32_t hsum(I x) {
  return fold(x, [](I4 a, I4 b) { return (I4)((U4)a + (U4)b); });
}

OCTAVO_INLINE I widen_u16(const uint16_t* p) {
  const UH8 x = read<UH8>(p), y = read<UH8>(p + 8), zero = {};
  const UH8 low = {0, 8, 1, 9, 2, 10, 3, 11}, high = {4, 12, 5, 13, 6, 14, 7, 15};
  return {{(I4)__builtin_shuffle(x, zero, low), (I4)__builtin_shuffle(x, zero, high),
           (I4)__builtin_shuffle(y, zero, low), (I4)__builtin_shuffle(y, zero, high)}};
}
// A half's exponent and fraction read as a float's are 2^112 too small, denormals included.
OCTAVO_INLINE F4 widen_f16(I4 h) {
  const I4 magnitude = (h & 0x7fff) << 13;
  const I4 top = ((h & 0x7c00) == 0x7c00) & 0x7f800000;
  const F4 scaled = (F4)magnitude * 5192296858534827628530496329220096.0f;
  return (F4)((I4)scaled | top | (I4)((U4)(h & 0x8000) << 16));
}
OCTAVO_INLINE F load_f16(const uint16_t* p) {
  return map<F>(widen_u16(p), [](I4 h) { return widen_f16(h); });
}
OCTAVO_INLINE F load_bf16(const uint16_t* p) { return bitcast_f(shl<16>(widen_u16(p))); }
struct Halves { uint16_t h[16]; };
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
OCTAVO_INLINE I round_bf16(F x) {
  return map<I>(x, [](F4 a) {
    const U4 u = (U4)a;
    const I4 r = (I4)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    return pick(a == a, r, (I4)((u | 0x400000u) >> 16));
  });
}
OCTAVO_INLINE void store_bf16_n(uint16_t* p, F x, int64_t n) {
  int32_t t[16];
  store(t, round_bf16(x));
  for (int64_t i = 0; i < n; ++i) p[i] = static_cast<uint16_t>(t[i]);
}
OCTAVO_INLINE void store_bf16(uint16_t* p, F x) { store_bf16_n(p, x, 16); }
template <class T> OCTAVO_INLINE I widen_bytes(const T* p) {
  int32_t t[16];
  for (int i = 0; i < 16; ++i) t[i] = p[i];
  return load(t);
}
OCTAVO_INLINE I load_i8(const int8_t* p) { return widen_bytes(p); }
OCTAVO_INLINE I load_u8(const uint8_t* p) { return widen_bytes(p); }
OCTAVO_INLINE void store_i8(int8_t* p, I x) {
  int32_t t[16];
  store(t, min(set1(int32_t{127}), max(set1(int32_t{-128}), x)));
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(t[i]);
}

OCTAVO_INLINE I halves_sums(I x, I y) {
  return {{x.q0 + x.q1, x.q2 + x.q3, y.q0 + y.q1, y.q2 + y.q3}};
}
OCTAVO_INLINE I store_i8(int8_t* p, I x, I y) {
  store_i8(p, x);
  store_i8(p + 16, y);
  return halves_sums(x, y);
}
OCTAVO_INLINE I store_i16_split(int8_t* low, int8_t* high, I x, I y) {
  const I half = set1(int32_t{128}), hx = shr<8>(add(x, half)), hy = shr<8>(add(y, half));
  store_i8(high, hx, hy);
  store_i8(low, sub(x, shl<8>(hx)), sub(y, shl<8>(hy)));
  return halves_sums(x, y);
}

// 2^(n/2) twice: one factor alone would leave the range of exponents before the product does.
OCTAVO_INLINE F scale_exp2(F p, F n) {
  const I i = to_i32(n), half = shr<1>(i), rest = sub(i, half);
  const F s0 = bitcast_f(shl<23>(add(half, set1(int32_t{127}))));
  const F s1 = bitcast_f(shl<23>(add(rest, set1(int32_t{127}))));
  return mul(mul(p, s0), s1);
}
OCTAVO_INLINE F exp_(F x) {
  const M nan = ne(x, x);
  const F given = x;
  x = min(set1(89.0f), max(set1(-105.0f), select(nan, zero_f(), x)));
  F n = round(mul(x, set1(1.44269504f)));
  F r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = fma(r, set1(8.290229165e-3f), set1(4.189839021e-2f));
  p = fma(p, r, set1(1.666764007e-1f));
  p = fma(p, r, set1(4.999914615e-1f));
  p = fma(p, r, set1(9.999997054e-1f));
  p = fma(p, r, set1(1.0f));
  return select(nan, given, scale_exp2(p, n));
}

OCTAVO_INLINE F exp2_(F x) {
  const M nan = ne(x, x);
  const F given = x;
  x = min(set1(128.0f), max(set1(-150.0f), select(nan, zero_f(), x)));
  const F n = round(x), r = sub(x, n);
  F p = fma(r, set1(1.326472730e-3f), set1(9.671512991e-3f));
  p = fma(p, r, set1(5.550733581e-2f));
  p = fma(p, r, set1(2.402224243e-1f));
  p = fma(p, r, set1(6.931470037e-1f));
  p = fma(p, r, set1(1.0f));
  return select(nan, given, scale_exp2(p, n));
}

OCTAVO_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
OCTAVO_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

OCTAVO_INLINE B load_b(const void* p) { return read_all<B>(p); }
OCTAVO_INLINE B held(B x) { return x; }  // there are too few registers
OCTAVO_INLINE void store_b(void* p, B x) { __builtin_memcpy(p, &x, 64); }
OCTAVO_INLINE B set1_u8(uint8_t x) {
  return make<B>([&](int) { return (B16){} + x; });
}
OCTAVO_INLINE B and_b(B x, B y) { return map<B>(x, y, [](B16 a, B16 b) { return a & b; }); }
OCTAVO_INLINE B or_b(B x, B y) { return map<B>(x, y, [](B16 a, B16 b) { return a | b; }); }
OCTAVO_INLINE B xor_b(B x, B y) { return map<B>(x, y, [](B16 a, B16 b) { return a ^ b; }); }
OCTAVO_INLINE B add_b(B x, B y) { return map<B>(x, y, [](B16 a, B16 b) { return a + b; }); }
template <int n> OCTAVO_INLINE B shl16_b(B x) {
  return map<B>(x, [](B16 a) { return (B16)((UH8)a << n); });
}
template <int n> OCTAVO_INLINE B shr16_b(B x) {
  return map<B>(x, [](B16 a) { return (B16)((UH8)a >> n); });
}
typedef uint64_t L2 __attribute__((vector_size(16)));
OCTAVO_INLINE B16 add_bits16(B16 x, uint32_t mask, B16 value) {
  const B16 bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const B16 m = (B16)(L2{(mask & 255) * 0x0101010101010101u, (mask >> 8) * 0x0101010101010101u});
  return x + ((B16)((m & bit) == bit) & value);
}
OCTAVO_INLINE B add_bits_b(B x, uint64_t mask, B value) {
  return {{add_bits16(x.q0, static_cast<uint32_t>(mask) & 0xffff, value.q0),
           add_bits16(x.q1, static_cast<uint32_t>(mask >> 16) & 0xffff, value.q1),
           add_bits16(x.q2, static_cast<uint32_t>(mask >> 32) & 0xffff, value.q2),
           add_bits16(x.q3, static_cast<uint32_t>(mask >> 48) & 0xffff, value.q3)}};
}
OCTAVO_INLINE F lo_bf16(B x) { return map<F>(x, [](B16 a) { return (F4)((U4)a << 16); }); }
OCTAVO_INLINE F hi_bf16(B x) { return map<F>(x, [](B16 a) { return (F4)((U4)a & ~0xffffu); }); }
OCTAVO_INLINE B pair_bf16(F even, F odd) {
  return map<B>(round_bf16(even), round_bf16(odd),
                [](I4 e, I4 o) { return (B16)((U4)e | (U4)o << 16); });
}
template <int j> OCTAVO_INLINE I u8_lane(B x) {
  return map<I>(x, [](B16 a) { return (I4)(((U4)a >> (8 * j)) & 255u); });
}

// A bf16 in 128..255 has its seven low bits below the exponent 0x43.
template <int h> OCTAVO_INLINE B pair_u7(B x) {
  return map<B>(x, [](B16 a) {
    const U4 u = (U4)a >> (16 * h);
    return (B16)((u & 0xffu) | (u & 0xff00u) << 8 | 0x43004300u);
  });
}
template <int h> OCTAVO_INLINE B pair_u8(B x) {
  return map<B>(to_f32(u8_lane<2 * h>(x)), to_f32(u8_lane<2 * h + 1>(x)),
                [](F4 e, F4 o) { return (B16)((U4)e >> 16 | (U4)o); });
}

// Products of a byte and a signed byte fit 16 bits; their sums do not, so pairs are summed in 32.
OCTAVO_INLINE I4 sum_pairs(H8 w, H8 q) {
#ifdef __SSE2__
  return (I4)__builtin_ia32_pmaddwd128(w, q);
#else
  const H8 p = w * q;
  return (((I4)((U4)p << 16)) >> 16) + ((I4)p >> 16);
#endif
}
OCTAVO_INLINE I dot_u8s8(I acc, B w, int32_t quad) {
  const I4 q = (I4){} + quad;
  const H8 even = ((H8)((UH8)q << 8)) >> 8, odd = (H8)q >> 8;
  return map<I>(acc, w, [&](I4 a, B16 b) {
    const H8 we = (H8)((UH8)b & 0xff), wo = (H8)((UH8)b >> 8);
    return (I4)((U4)a + (U4)sum_pairs(we, even) + (U4)sum_pairs(wo, odd));
  });
}
OCTAVO_INLINE int32_t quad_at(const void* p) { return read<int32_t>(p); }
OCTAVO_INLINE I dot_u8s8(I acc, B w, const int8_t* quad) {
  return dot_u8s8(acc, w, quad_at(quad));
}
OCTAVO_INLINE I dot_u7s8(I acc, B w, int32_t quad) { return dot_u8s8(acc, w, quad); }
OCTAVO_INLINE I dot_u7s8(I acc, B w, const int8_t* quad) { return dot_u8s8(acc, w, quad); }
OCTAVO_INLINE F dot_bf16(F acc, B w, uint32_t pair) {
  const I p = set1(static_cast<int32_t>(pair));
  const F lo = bitcast_f(shl<16>(p)), hi = bitcast_f(and_(p, set1(int32_t{-65536})));
  return fma(hi_bf16(w), hi, fma(lo_bf16(w), lo, acc));
}
OCTAVO_INLINE F dot_bf16(F acc, B w, const uint16_t* pair) {
  return dot_bf16(acc, w, static_cast<uint32_t>(quad_at(pair)));
}

}  // namespace
}  // namespace octavo
