// Products with P16 weights (pack.h has their layout), written once over the vector vocabulary.
//
// Three families. `quant_tile`: quants times int8 activations, integer dot products of each block of
// 32, or times bf16; one float multiply-add per block. `float_tile`: f32 or bf16 products straight
// from the panel. fp32 mode: a block is dequantised to f32 first. In all of them the order of additions to one output
// depends on k only: a tile of R rows does for each row exactly what a tile of one row does.
#include "linear.h"
#include "prepare.inl"
#include "weights.inl"

namespace octavo {
namespace {

constexpr int64_t ACTS_BUDGET = 512 << 10;  // activations that stay in L2 while panels stream by

// Weights on their way from memory: the i-th 64 bytes after p, P panels being read together. What
// is best was measured on Zen4. Most tiles compute longer than their weights take to come: 8 KB
// ahead, into L2, since L1 has few outstanding misses and the activations need them. A tile of at
// most FEW rows reads so fast that the hardware runs ahead and wants a lead only: every other line.
template <int R, int FEW, int P = 1>
OCTAVO_INLINE void fetch(const uint8_t* p, int64_t i) {
  if (R > FEW) prefetch_l2(p + 64 * i + 8192 / P);
  else if (i % 2 == 0) prefetch_l2(p + 64 * i + 2048 / P);
}

// ---- activations --------------------------------------------------------------------------------

// A tile's first row, wherever it lies in its group: rows, then blocks, at constant distances.
struct View {
  const int8_t* q;
  const uint8_t* wide;
  const float* d;
  const float* s;
  const float* s16;
  const int32_t* n;
  const uint16_t* h;
  const float* f;
  int64_t group, blocks;
};

template <class T>
OCTAVO_INLINE T* plane_at(T* plane, const Acts& a, int64_t row, int64_t per_block) {
  if (plane == nullptr) return nullptr;
  return plane + (row / a.group * a.blocks * a.group + row % a.group) * per_block;
}

OCTAVO_INLINE View view(const Acts& a, int64_t row, Offset offset) {
  View v = {};
  v.q = plane_at(a.q, a, row, 32);
  if (a.needs & ACT_PAIR) v.q += row / a.group * a.blocks * a.group * 32;  // the high bytes
  v.wide = plane_at(a.wide, a, row, 1);
  v.d = plane_at(a.d, a, row, 1);
  v.s = plane_at(a.s, a, row, 1);
  v.n = offset == EIGHT ? plane_at(a.n8, a, row, 1)
        : offset == SIXTEEN ? plane_at(a.n16, a, row, 1)
                            : plane_at(a.n128, a, row, 1);
  if (offset == SPLIT && a.n32 != nullptr)
    v.n = a.n32 + row / a.group * a.blocks * a.group * 2 + row % a.group;
  if (a.s16 != nullptr)
    v.s16 = a.s16 + row / a.group * a.blocks * a.group * 2 + row % a.group;
  v.h = plane_at(a.h, a, row, 32);
  v.f = plane_at(a.f, a, row, 32);
  v.group = a.group;
  v.blocks = a.blocks;
  return v;
}

// ---- quantised weights --------------------------------------------------------------------------

// What they are multiplied by: int8, int8 with a high byte here and there (ACT_PAIR) or bf16.
enum Form { ONE, PAIR, HALF };

// Whether a tile is high enough to fill Levels for; the products have the same bits without.
template <class T, int R, Form FORM>
constexpr bool has_levels = R >= 8 && FORM != HALF && T::kOffset != SPLIT;

template <class T>
OCTAVO_INLINE I dot(I acc, B w, const int8_t* quad) {
  if constexpr (T::kAnyByte) return dot_u8s8(acc, w, quad);
  return dot_u7s8(acc, w, quad);
}

// The scales of a block times every mantissa that an activation's scale can have: entry i is
// d * (1 + i / 8), exactly, less the bits of 1 + i / 8 as a float, so that adding the bits of an
// activation's scale as integers gives the product. Additions there are where multipliers are not.
// A lane whose d is 0 is left out by `some`.
struct Levels {
  alignas(64) int32_t of[8][16];
  M some;
};

OCTAVO_INLINE void fill(Levels& x, F d) {
  x.some = ne(d, zero_f());
  F v = select(x.some, d, set1(1.0f));
  const F step = mul(v, set1(0.125f));
#pragma GCC unroll 8
  for (int32_t i = 0; i < 8; ++i) {
    store(x.of[i], sub(bitcast_i(v), set1((127 << 23) + (i << 20))));
    v = add(v, step);
  }
}

OCTAVO_INLINE F times(const Levels& x, const float* scale) {
  // Byte 2 of a float: the last bit of its exponent, then the mantissa from the top.
  const int64_t i = reinterpret_cast<const uint8_t*>(scale)[2] & 0x70;
  return bitcast_f(add(load(x.of[0] + i), set1(__builtin_bit_cast(int32_t, *scale))));
}

// A row alone that does not stay in L1 while a panel passes is fetched again, two lines ahead.
// (Measured on Zen4: a row of 8,960 then reads its weights 1.3 times as fast; one line or three
// gain nothing.)
template <bool PAIRS>
OCTAVO_INLINE void fetch_row(const View& a, int64_t b) {
  constexpr int64_t blocks = PAIRS ? 2 : 4;  // of 32 or 64 bytes
  if (a.blocks > 64 && (PAIRS || b % 2 == 0))
    prefetch(a.q + (b + blocks) * a.group * (PAIRS ? 64 : 32));
}

// One chain of integer products for each of up to 4 rows.
template <class T, int R>
OCTAVO_INLINE void dot_rows(const Block& x, int from, int to, const int8_t* q, I* acc) {
  OCTAVO_UNROLL_QUADS
  for (int j = from; j < to; ++j)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) acc[r] = dot<T>(acc[r], x.w[j], q + r * 32 + 4 * j);
}

// Quads of a block that are wide in any of R rows.
template <int R>
OCTAVO_INLINE uint32_t wide_quads(const uint8_t* wide) {
  uint32_t all = wide[0];
#pragma GCC unroll 4
  for (int r = 1; r < R; ++r) all |= wide[r];
  return all;
}

// sum[r] += 256 times the products of the high bytes of the wide quads.
template <class T, int R>
OCTAVO_INLINE void add_high_part(const Block& x, int from, int to, const int8_t* high,
                                 const uint8_t* wide, I* sum) {
  const uint32_t some = wide_quads<R>(wide) & ((1u << to) - (1u << from));
  if (some == 0) return;
  I part[R];
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) part[r] = zero_i();
  OCTAVO_UNROLL_QUADS
  for (int j = from; j < to; ++j)
    if (some >> j & 1) {
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) part[r] = dot<T>(part[r], x.w[j], high + r * 32 + 4 * j);
    }
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) sum[r] = add(sum[r], shl<8>(part[r]));
}

// Sums over the quads from..to of (weight - offset) * activation for up to 4 rows. A row alone
// would wait for each product: it has two chains, whose sum is the same integer.
template <class T, int R, Form FORM>
OCTAVO_INLINE void integer_part(const Block& x, int from, int to, const int8_t* q,
                                const int8_t* high, const uint8_t* wide, const int32_t* n, I* sum) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) sum[r] = T::kOffset != NONE ? set1(n[r]) : zero_i();
  if constexpr (FORM == PAIR) {
    // By twos: of more rows together more quads would be wide.
#pragma GCC unroll 2
    for (int r = 0; r + 2 <= R; r += 2)
      add_high_part<T, 2>(x, from, to, high + r * 32, wide + r, sum + r);
    if constexpr (R % 2 != 0)
      add_high_part<T, 1>(x, from, to, high + (R - 1) * 32, wide + R - 1, sum + R - 1);
  }
  if constexpr (R == 1) {
    I more = zero_i();
    dot_rows<T, R>(x, from, (from + to) / 2, q, sum);
    dot_rows<T, R>(x, (from + to) / 2, to, q, &more);
    sum[0] = add(sum[0], more);
  } else {
    dot_rows<T, R>(x, from, to, q, sum);
  }
}

// f + sum * d * scale; from Levels of d where there are rows enough to fill them for.
OCTAVO_INLINE F add_product(F f, I sum, F d, const Levels* levels, const float* scale) {
  if (levels != nullptr) return fma(to_f32(sum, levels->some), times(*levels, scale), f);
  return fma(to_f32(sum), mul(d, set1(*scale)), f);
}

// Adds one block's part to the sums of up to 4 rows.
template <class T, int R, Form FORM>
OCTAVO_INLINE void quant_rows(const Block& x, const Levels* levels, const View& a, int64_t b,
                              int64_t r0, F* f) {
  const int8_t* q = a.q + (b * a.group * (FORM == PAIR ? 2 : 1) + r0) * 32;
  const int8_t* high = q + a.group * 32;
  const uint8_t* wide = FORM == PAIR ? a.wide + b * a.group + r0 : nullptr;
  const float* d = a.d + b * a.group + r0;
  const float* s = a.s + b * a.group + r0;
  const int32_t* n = a.n + b * a.group * (T::kOffset == SPLIT ? 2 : 1) + r0;
  I sum[4];
  if constexpr (T::kOffset == SPLIT) {
    F part[4];
    integer_part<T, R, FORM>(x, 0, 4, q, high, wide, n, sum);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) part[r] = mul(to_f32(sum[r]), x.d);
    integer_part<T, R, FORM>(x, 4, 8, q, high, wide, n + a.group, sum);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) f[r] = fma(fma(to_f32(sum[r]), x.d2, part[r]), set1(d[r]), f[r]);
    return;
  }
  integer_part<T, R, FORM>(x, 0, 8, q, high, wide, n, sum);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    f[r] = add_product(f[r], sum[r], x.d, levels, d + r);
    if constexpr (T::kHasMin) f[r] = fma(x.m, set1(s[r]), f[r]);
  }
}

// In bf16 a quant is an integer again, offset included: 128 more than its seven bits, or its byte.
// What that makes too much goes with the sum of the activations. Adds the quads from..to.
template <class T, int R>
OCTAVO_INLINE void half_part(const Block& x, int from, int to, const uint16_t* h, F d, F m,
                             const float* s, F* f) {
  F sum[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sum[r] = zero_f();
  OCTAVO_UNROLL_QUADS
  for (int j = from; j < to; ++j) {
    B first, second;
    if constexpr (T::kAnyByte) {
      first = pair_u8<0>(x.w[j]);
      second = pair_u8<1>(x.w[j]);
    } else {
      first = pair_u7<0>(x.w[j]);
      second = pair_u7<1>(x.w[j]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[r] = dot_bf16(sum[r], first, h + r * 32 + 4 * j);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[r] = dot_bf16(sum[r], second, h + r * 32 + 4 * j + 2);
  }
  constexpr float too_much = T::kOffsetValue + (T::kAnyByte ? 0 : 128);
  m = fma(d, set1(-too_much), m);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) f[r] = fma(m, set1(s[r]), fma(sum[r], d, f[r]));
}

template <class T, int R>
OCTAVO_INLINE void half_rows(const Block& x, const View& a, int64_t b, F* f) {
  const uint16_t* h = a.h + b * a.group * 32;
  if constexpr (T::kOffset == SPLIT) {
    const float* s = a.s16 + b * a.group * 2;
    half_part<T, R>(x, 0, 4, h, x.d, zero_f(), s, f);
    half_part<T, R>(x, 4, 8, h, x.d2, zero_f(), s + a.group, f);
  } else {
    half_part<T, R>(x, 0, 8, h, x.d, T::kHasMin ? x.m : zero_f(), a.s + b * a.group, f);
  }
}

template <class T, int R, Form FORM>
OCTAVO_INLINE void quant_block(const Block& x, const View& a, int64_t b, F* f) {
  if constexpr (FORM == HALF) return half_rows<T, R>(x, a, b, f);
  Levels levels;
  const Levels* filled = nullptr;
  if constexpr (has_levels<T, R, FORM>) {
    fill(levels, x.d);
    filled = &levels;
  }
#pragma GCC unroll 4
  for (int r = 0; r + 4 <= R; r += 4) quant_rows<T, 4, FORM>(x, filled, a, b, r, f + r);
  if constexpr (R % 4 != 0) quant_rows<T, R % 4, FORM>(x, filled, a, b, R / 4 * 4, f + R / 4 * 4);
}

// Levels know no scale that is not a number: `scales`, a sum of all scales of R rows in a tile,
// says which rows have one.
template <int R>
OCTAVO_INLINE F add_scales(F scales, const View& a, int64_t b) {
  const float* d = a.d + b * a.group;
  return add(scales, R == 16 ? load(d) : load_n(d, R));
}

template <int R>
OCTAVO_INLINE void store_tile(const F* f, F scales, float* out, int64_t ld) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) store(out + r * ld, f[r]);
  const uint32_t none = bits(ne(scales, scales));
  if (none != 0)
    for (int r = 0; r < R; ++r)
      if (none >> r & 1) store(out + r * ld, set1(__builtin_nanf("")));
}

template <class T, int R, Form FORM>
void quant_tile(const uint8_t* panel, const View& a, float* out, int64_t ld) {
  F f[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) f[r] = zero_f();
  F scales = zero_f();
  const int64_t units = a.blocks / T::kBlocks;
  for (int64_t u = 0; u < units; ++u) {
    const Unit unit = T::unit(panel, u, units);
#pragma GCC unroll 1
    for (int64_t h = 0; h < T::kBlocks; ++h) {
      constexpr int64_t lines = (T::kUnit / 64 + T::kBlocks - 1) / T::kBlocks;
      const uint8_t* at = unit.at + h * lines * 64;
#pragma GCC unroll 16
      for (int64_t i = 0; i < lines; ++i)
        fetch<R, FORM == HALF ? T::kFewRows - 1 : T::kFewRows>(at, i);
      const int64_t b = u * T::kBlocks + h;
      if constexpr (R == 1 && FORM != HALF) fetch_row<FORM == PAIR>(a, b);
      quant_block<T, R, FORM>(T::block(unit, h), a, b, f);
      if constexpr (has_levels<T, R, FORM>) scales = add_scales<R>(scales, a, b);
    }
  }
  store_tile<R>(f, scales, out, ld);
}

// ---- many rows: a panel unpacked once for all of them -------------------------------------------

struct Ready {
  alignas(64) uint8_t w[8][64];
  float d[16], other[16];  // other: d2 or m
};

// A tile of rows passes by so many blocks of so many unpacked panels: its activations stay in L1, and
// the branch predictor knows them from panel to panel. Its sums rest in `out` in between.
constexpr int64_t READY_BLOCKS = 32, READY_PANELS = 8;

// Blocks b..b + count of a panel, unpacked; and what is fetched from memory into L2 meanwhile: a
// line for each block.
struct ReadyRun {
  const Ready* w;
  int64_t b, count;
  const uint8_t* ahead;
};

// What is left of a type once it is unpacked: types alike share their code.
template <bool HAS_MIN, Offset OFFSET, bool ANY_BYTE>
struct Unpacked {
  static constexpr Offset kOffset = OFFSET;
  static constexpr bool kHasMin = HAS_MIN, kAnyByte = ANY_BYTE;
};
template <class T>
using Alike = Unpacked<T::kHasMin, T::kOffset == NONE || T::kOffset == SPLIT ? T::kOffset : BYTE,
                       T::kAnyByte>;

// Unpacks blocks b0..b1 of a panel.
template <class T>
void make_ready(const uint8_t* panel, int64_t blocks, int64_t b0, int64_t b1, Ready* out) {
  const int64_t units = blocks / T::kBlocks;
  for (int64_t b = b0; b < b1; ++b, ++out) {
    const Unit unit = T::unit(panel, b / T::kBlocks, units);
    constexpr int64_t lines = (T::kUnit / 64 + T::kBlocks - 1) / T::kBlocks;
#pragma GCC unroll 16
    for (int64_t i = 0; i < lines; ++i)
      prefetch_l2(unit.at + (b % T::kBlocks * lines + i) * 64 + 8192);
    const Block x = T::block(unit, b % T::kBlocks);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) store_b(out->w[j], x.w[j]);
    store(out->d, x.d);
    if constexpr (T::kHasMin) store(out->other, x.m);
    else store(out->other, x.d2);
  }
}

// Adds a run to a full tile of sums, or begins them.
template <class T, Form FORM>
void ready_tile(ReadyRun run, View a, float* out, int64_t ld) {
  constexpr int R = kTileRows;
  a.group = MAX_GROUP;  // of so many rows it is; as a constant it leaves registers free
  F f[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) f[r] = run.b == 0 ? zero_f() : load(out + r * ld);
  F scales = zero_f();
#pragma GCC unroll 1
  for (int64_t i = 0; i < run.count; ++i) {
    const Ready& w = run.w[i];
    Block x;
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) x.w[j] = held(load_b(w.w[j]));
    x.d = load(w.d);
    x.m = x.d2 = load(w.other);
    prefetch_l2(run.ahead + 64 * i);
    quant_block<T, R, FORM>(x, a, run.b + i, f);
    if constexpr (has_levels<T, R, FORM>) scales = add_scales<R>(scales, a, run.b + i);
  }
  store_tile<R>(f, scales, out, ld);
}

// ---- f32 and bf16 -------------------------------------------------------------------------------

// As many panels as it takes for no addition to wait for the one before it, and as registers hold.
template <int R>
constexpr int panels_at_once = R == 1                ? 4
                               : kTileRows >= 8      ? (R == 2 ? 4 : R <= 4 ? 2 : 1)
                               : R * 2 <= kTileRows ? 2
                                                    : 1;

struct Float32 {
  static constexpr int64_t kStep = 1, kBlock = 2048;  // k per vector; bytes of 32 k
  OCTAVO_INLINE F load_w(const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
  OCTAVO_INLINE F product(F acc, F w, const View& a, int64_t at) {
    return fma(w, set1(a.f[at]), acc);
  }
};
struct Float16 {
  static constexpr int64_t kStep = 1, kBlock = 1024;
  OCTAVO_INLINE F load_w(const uint8_t* p) { return load_f16(halves(p)); }
  OCTAVO_INLINE F product(F acc, F w, const View& a, int64_t at) {
    return fma(w, set1(a.f[at]), acc);
  }
};
struct BFloat16 {
  static constexpr int64_t kStep = 2, kBlock = 1024;
  OCTAVO_INLINE B load_w(const uint8_t* p) { return load_b(p); }
  OCTAVO_INLINE F product(F acc, B w, const View& a, int64_t at) {
    return dot_bf16(acc, w, a.h + at);
  }
};

// P panels x R rows over one block of 32 k, f[p * R + r].
template <class T, int R, int P>
OCTAVO_INLINE void float_block(const uint8_t* w, int64_t panel_bytes, const View& a, int64_t b,
                               F* f) {
  constexpr int64_t bytes = T::kBlock / 32 * T::kStep;  // of one vector of weights
#pragma GCC unroll 4
  for (int64_t i = 0; i < 32; i += T::kStep)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      const auto v = T::load_w(w + p * panel_bytes + i / T::kStep * bytes);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        f[p * R + r] = T::product(f[p * R + r], v, a, (b * a.group + r) * 32 + i);
    }
}

template <class T, int R, int P>
OCTAVO_INLINE void float_tile(const PackedWeight& w, const uint8_t* panel, const View& a,
                              float* out, int64_t ld) {
  F f[P * R];
#pragma GCC unroll 16
  for (int i = 0; i < P * R; ++i) f[i] = zero_f();
  for (int64_t b = 0; b < a.blocks; ++b) {
    const uint8_t* at = panel + b * T::kBlock;
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
      for (int64_t i = 0; i < T::kBlock / 64; ++i) fetch<R, 4, P>(at + p * w.panel_bytes, i);
    float_block<T, R, P>(at, w.panel_bytes, a, b, f);
  }
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) store(out + r * ld + 16 * p, f[p * R + r]);
}

// ---- dequantisation: fp32 mode and embeddings ---------------------------------------------------

// One block of a panel as floats [32][16]; the operations and their order are the file format's.
template <class T>
void dequantise(const uint8_t* panel, int64_t blocks, int64_t b, float* out) {
  const Unit unit = T::unit(panel, b / T::kBlocks, blocks / T::kBlocks);
  const Block x = T::block(unit, b % T::kBlocks);
  const I offset = set1(int32_t{T::kOffsetValue});
  auto put = [&](int j, int t, I q) {
    F v = mul(j < 4 ? x.d : x.d2, to_f32(sub(q, offset)));
    if constexpr (T::kHasMin) v = add(v, x.m);
    store(out + (4 * j + t) * 16, v);
  };
  for (int j = 0; j < 8; ++j) {
    put(j, 0, u8_lane<0>(x.w[j]));
    put(j, 1, u8_lane<1>(x.w[j]));
    put(j, 2, u8_lane<2>(x.w[j]));
    put(j, 3, u8_lane<3>(x.w[j]));
  }
}
template <>
void dequantise<Float32>(const uint8_t* panel, int64_t, int64_t b, float* out) {
  for (int64_t i = 0; i < 2048; i += 64)
    store(out + i / 4, Float32::load_w(panel + b * Float32::kBlock + i));
}
template <>
void dequantise<Float16>(const uint8_t* panel, int64_t, int64_t b, float* out) {
  for (int64_t i = 0; i < 1024; i += 32)
    store(out + i / 2, Float16::load_w(panel + b * Float16::kBlock + i));
}
template <>
void dequantise<BFloat16>(const uint8_t* panel, int64_t, int64_t b, float* out) {
  for (int64_t i = 0; i < 1024; i += 64) {
    const B v = load_b(panel + b * BFloat16::kBlock + i);
    store(out + i / 2, lo_bf16(v));
    store(out + i / 2 + 16, hi_bf16(v));
  }
}

using Dequantise = void (*)(const uint8_t* panel, int64_t blocks, int64_t b, float* out);

Dequantise dequantiser(WType type) {
  switch (type) {
    case WType::F32: return dequantise<Float32>;
    case WType::F16: return dequantise<Float16>;
    case WType::BF16: return dequantise<BFloat16>;
    case WType::Q4_0: return dequantise<Q4_0>;
    case WType::Q4_1: return dequantise<Q4_1>;
    case WType::Q5_0: return dequantise<Q5_0>;
    case WType::Q5_1: return dequantise<Q5_1>;
    case WType::Q8_0: return dequantise<Q8_0>;
    case WType::Q4_K: return dequantise<Q4_K>;
    case WType::Q5_K: return dequantise<Q5_K>;
    case WType::Q6_K: return dequantise<Q6_K>;
  }
  return nullptr;
}

// ---- from one tile to a range of panels and rows ------------------------------------------------

// What a tile is computed from: everything but its size.
struct Job {
  const PackedWeight* w;
  View a;
  float* out;
  int64_t ld;
};

// Panels one after the other.
struct Panels {
  const uint8_t* first;
  int64_t bytes, count;
  const uint8_t* at(int64_t p) const { return first + p * bytes; }
};

template <class T, Form FORM>
struct QuantKernel {
  static constexpr Offset kOffset = T::kOffset;
  // Panels that all full tiles pass before the next, and that the rows left over do.
  static constexpr int64_t kChunk = READY_PANELS, kTogether = 1;
  static constexpr int kRows = FORM == HALF && kTileRows > 8 ? 8 : kTileRows;
  template <int R>
  static constexpr int kPanels = 1;
  template <int R, int P>
  OCTAVO_INLINE void run(const Job& j, const uint8_t* panel) {
    quant_tile<T, R, FORM>(panel, j.a, j.out, j.ld);
  }
  // The full tiles of rows row0..row1 of at most kChunk panels, if it pays; returns the first row
  // left over.
  static int64_t run_full_tiles(const Panels& panels, const Acts& acts, int64_t row0, int64_t row1,
                                float* out, int64_t ld) {
    if constexpr (FORM == HALF) {
      return row0;
    } else {
      if (row1 - row0 < 2 * kTileRows) return row0;
      if (acts.group != MAX_GROUP || row0 % kTileRows != 0) return row0;
      const int64_t tiles = (row1 - row0) / kTileRows;
      Ready ready[kChunk][READY_BLOCKS];
      for (int64_t b = 0; b < acts.blocks; b += READY_BLOCKS) {
        const int64_t count = READY_BLOCKS < acts.blocks - b ? READY_BLOCKS : acts.blocks - b;
        for (int64_t p = 0; p < panels.count; ++p)
          make_ready<T>(panels.at(p), acts.blocks, b, b + count, ready[p]);
        // What is unpacked next: these panels' next blocks, or the panels behind them.
        const bool more = b + count < acts.blocks;
        const int64_t next =
            more ? (b + count) / T::kBlocks * T::kUnit : panels.count * panels.bytes;
        for (int64_t t = 0; t < tiles; ++t)
          for (int64_t p = 0; p < panels.count; ++p)
            ready_tile<Alike<T>, FORM>({ready[p], b, count, panels.at(p) + next + t * count * 64},
                                       view(acts, row0 + t * kTileRows, T::kOffset),
                                       out + t * kTileRows * ld + 16 * p, ld);
      }
      return row0 + tiles * kTileRows;
    }
  }
};

template <class T>
struct FloatKernel {
  static constexpr Offset kOffset = NONE;
  static constexpr int64_t kChunk = 4, kTogether = 4;
  static constexpr int kRows = kTileRows < 8 ? kTileRows : 8;
  template <int R>
  static constexpr int kPanels = panels_at_once<R>;
  OCTAVO_INLINE int64_t run_full_tiles(const Panels&, const Acts&, int64_t row0, int64_t, float*,
                                       int64_t) {
    return row0;
  }
  template <int R, int P>
  OCTAVO_INLINE void run(const Job& j, const uint8_t* panel) {
    float_tile<T, R, P>(*j.w, panel, j.a, j.out, j.ld);
  }
};

struct Fp32Kernel {
  static constexpr Offset kOffset = NONE;
  static constexpr int64_t kChunk = 4, kTogether = 4;
  static constexpr int kRows = kTileRows < 8 ? kTileRows : 8;
  template <int R>
  static constexpr int kPanels = panels_at_once<R>;
  OCTAVO_INLINE int64_t run_full_tiles(const Panels&, const Acts&, int64_t row0, int64_t, float*,
                                       int64_t) {
    return row0;
  }
  template <int R, int P>
  OCTAVO_INLINE void run(const Job& j, const uint8_t* panel) {
    alignas(64) float block[P][512];
    const Dequantise dequantise_block = dequantiser(j.w->type);
    F f[P * R];
#pragma GCC unroll 16
    for (int i = 0; i < P * R; ++i) f[i] = zero_f();
    for (int64_t b = 0; b < j.a.blocks; ++b) {
      for (int p = 0; p < P; ++p)
        dequantise_block(panel + p * j.w->panel_bytes, j.a.blocks, b, block[p]);
      float_block<Float32, R, P>(reinterpret_cast<const uint8_t*>(block), sizeof block[0], j.a, b,
                                 f);
    }
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) store(j.out + r * j.ld + 16 * p, f[p * R + r]);
  }
};

// R rows of `count` panels.
template <class K, int R>
void run_panels(Job job, const uint8_t* panel, int64_t count) {
  constexpr int P = K::template kPanels<R>;
  for (; count >= P; count -= P) {
    K::template run<R, P>(job, panel);
    panel += P * job.w->panel_bytes;
    job.out += 16 * P;
  }
  if constexpr (P > 1) {
    for (; count > 0; --count) {
      K::template run<R, 1>(job, panel);
      panel += job.w->panel_bytes;
      job.out += 16;
    }
  }
}

// Sizes of tiles: each up to 8, then 12 and 16. More would be code for nothing: two rows of a
// panel that is in L2 cost little more alone than in company.
constexpr int tile_after(int r) { return r < 8 ? r + 1 : r + 4; }

// Calls run_panels with the largest tile of at most `rows` rows; returns its size.
template <class K, int R = 1>
int64_t run_tile(const Job& job, const uint8_t* panel, int64_t count, int64_t rows) {
  constexpr int next = tile_after(R);
  if constexpr (next <= K::kRows)
    if (rows >= next) return run_tile<K, next>(job, panel, count, rows);
  run_panels<K, R>(job, panel, count);
  return R;
}

// Which panels and rows are wanted.
struct Range {
  int64_t panel0, panel1, row0, row1;
};

template <class K>
void run(const PackedWeight& w, const Acts& acts, const Range& want, float* out, int64_t ld) {
  // Rows of one pass: their activations stay in L2 while the panels stream by once.
  int64_t rows = ACTS_BUDGET / (acts.blocks * 48) / acts.group * acts.group;
  if (rows < 4 * acts.group) rows = 4 * acts.group;
  for (int64_t top = want.row0; top < want.row1; top += rows) {
    const int64_t end = top + rows < want.row1 ? top + rows : want.row1;
    for (int64_t p = want.panel0; p < want.panel1; p += K::kChunk) {
      const int64_t count = K::kChunk < want.panel1 - p ? K::kChunk : want.panel1 - p;
      const uint8_t* panel = w.data + p * w.panel_bytes;
      float* at = out + (p - want.panel0) * 16 - want.row0 * ld;
      const int64_t left =
          K::run_full_tiles({panel, w.panel_bytes, count}, acts, top, end, at + top * ld, ld);
      for (int64_t c = 0; c < count; c += K::kTogether) {
        const int64_t some = K::kTogether < count - c ? K::kTogether : count - c;
        for (int64_t row = left, n; row < end; row += n) {
          n = acts.group - row % acts.group;
          if (n > end - row) n = end - row;
          const Job job = {&w, view(acts, row, K::kOffset), at + row * ld + 16 * c, ld};
          n = run_tile<K>(job, panel + c * w.panel_bytes, some, n);
        }
      }
    }
  }
}

template <class T>
void run_quant(const PackedWeight& w, const Acts& acts, const Range& want, float* out,
               int64_t ld) {
  if (acts.needs & ACT_PAIR) return run<QuantKernel<T, PAIR>>(w, acts, want, out, ld);
  if (acts.needs & ACT_A8) return run<QuantKernel<T, ONE>>(w, acts, want, out, ld);
  run<QuantKernel<T, HALF>>(w, acts, want, out, ld);
}

uint32_t int8_needs(WType type) {
  switch (type) {
    case WType::Q4_0: return ACT_A8 | ACT_N8;
    case WType::Q5_0: return ACT_A8 | ACT_N16;
    case WType::Q8_0: return ACT_A8 | ACT_N128;
    case WType::Q6_K: return ACT_A8 | ACT_N32;
    default: return ACT_A8 | ACT_S;
  }
}

uint32_t linear_needs(WType type, Products products) {
  if (products == Products::F32 || type == WType::F32 || type == WType::F16) return ACT_F32;
  if (type == WType::BF16) return ACT_BF16;
  if (products == Products::BF16) return ACT_BF16 | (type == WType::Q6_K ? ACT_S16 : ACT_S);
  const uint32_t bytes = products == Products::PAIRS   ? ACT_PAIR | ACT_WIDE
                         : products == Products::MIXED ? ACT_PAIR
                                                       : 0;
  return int8_needs(type) | bytes;
}

void linear(const PackedWeight& w, int64_t panel0, int64_t panel1, const Acts& acts, int64_t row0,
            int64_t row1, float* out, int64_t ld) {
  const Range want = {panel0, panel1, row0, row1};
  if (acts.needs == ACT_F32 && w.type != WType::F32 && w.type != WType::F16)
    return run<Fp32Kernel>(w, acts, want, out, ld);
  switch (w.type) {
    case WType::F32: return run<FloatKernel<Float32>>(w, acts, want, out, ld);
    case WType::F16: return run<FloatKernel<Float16>>(w, acts, want, out, ld);
    case WType::BF16: return run<FloatKernel<BFloat16>>(w, acts, want, out, ld);
    case WType::Q4_0: return run_quant<Q4_0>(w, acts, want, out, ld);
    case WType::Q4_1: return run_quant<Q4_1>(w, acts, want, out, ld);
    case WType::Q5_0: return run_quant<Q5_0>(w, acts, want, out, ld);
    case WType::Q5_1: return run_quant<Q5_1>(w, acts, want, out, ld);
    case WType::Q8_0: return run_quant<Q8_0>(w, acts, want, out, ld);
    case WType::Q4_K: return run_quant<Q4_K>(w, acts, want, out, ld);
    case WType::Q5_K: return run_quant<Q5_K>(w, acts, want, out, ld);
    case WType::Q6_K: return run_quant<Q6_K>(w, acts, want, out, ld);
  }
}

// ---- rows of an embedding -----------------------------------------------------------------------

void embed_row(const PackedWeight& w, int64_t id, float scale, float* out) {
  alignas(64) float block[512];
  const Dequantise dequantise_block = dequantiser(w.type);
  const uint8_t* panel = w.data + id / 16 * w.panel_bytes;
  const int64_t c = id % 16;
  for (int64_t b = 0; b * 32 < w.k; ++b) {
    dequantise_block(panel, (w.k + 63) / 64 * 2, b, block);
    const int64_t n = w.k - b * 32 < 32 ? w.k - b * 32 : 32;
    for (int64_t i = 0; i < n; ++i) out[b * 32 + i] = scale * block[i * 16 + c];
  }
}

constexpr LinearTable LINEAR = {linear_needs, prepare, linear, embed_row};

}  // namespace
}  // namespace octavo
