// Activations in the forms that products read (Acts in linear.h): quantised 16 blocks at a time, a
// lane each. Nothing in a block's lane depends on the others.
#pragma once
#include "linear.h"

namespace octavo {
namespace {

// How far above the body of its block a quad's largest magnitude must be to be kept in two bytes.
// The body: of quads i and i + 4 the smaller, and the largest of these four; so one outlier does not
// move it, nor several that are not four quads apart. Of SmolLM2's products 2.5 repeats 8 % for the
// high bytes and 3 repeats 6 %; KL from fp32 on 1,024 tokens 3.2e-4 and 3.7e-4 (single bytes 3.3e-3).
constexpr float OUTLIER = 2.5f;

// Blocks of 32 values that are quantised together, a lane each: any of one group's.
constexpr int CELLS = 16;
struct Cells {
  const float* x[CELLS];
  int64_t at[CELLS];    // in a plane of one number a block and row
  int64_t half[CELLS];  // in a plane of two, the first; the other is `group` further
  int count;
};

struct Scales {
  F inverse, d;
};

// The least d of four significant bits (see Levels) such that `most` is at most 1 / step times d.
// Scales and their products with a weight's stay within a float's normal numbers: a block below
// 2^-84 is zero, and d then 1.
OCTAVO_INLINE Scales scales_of(F most, F step) {
  const M none = lt(most, set1(5.1698788e-26f));
  const I up = add(bitcast_i(mul(most, step)), set1(int32_t{0xfffff}));
  const I d = select(none, bitcast_i(set1(1.0f)), and_(up, set1(int32_t{-0x100000})));
  const I power = sub(and_(d, set1(int32_t{0x7f800000})), set1(int32_t{127 << 23}));
  const I inverted = sub(bitcast_i(div(set1(1.0f), bitcast_f(sub(d, power)))), power);
  return {bitcast_f(select(none, zero_i(), inverted)), bitcast_f(d)};
}

// The scales of blocks with outliers and which of their quads are wide; top[j] are the magnitudes of
// the quads j as integers.
OCTAVO_INLINE Scales mixed_scales(const I* top, F amax, I* wide) {
  I typical = zero_i(), body = zero_i(), bits = zero_i();
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) typical = max(typical, min(top[j], top[j + 4]));
  const F limit = mul(set1(OUTLIER), bitcast_f(typical));
#pragma GCC unroll 8
  for (int32_t j = 0; j < 8; ++j) {
    const M out = gt(bitcast_f(top[j]), limit);
    body = select(out, body, max(body, top[j]));
    bits = select(out, or_(bits, set1(int32_t{1 << j})), bits);
  }
  *wide = bits;
  const F rest = bitcast_f(body);
  const M near = ge(mul(set1(256.0f), rest), amax);
  return scales_of(select(near, rest, amax),
                   select(near, set1(1.0f / 127.0f), set1(1.0f / 32512.0f)));
}

template <class V, class T>
OCTAVO_INLINE void put(T* plane, const Cells& c, V v) {
  if (plane == nullptr) return;
  if (c.at[c.count - 1] - c.at[0] == c.count - 1) return store_n(plane + c.at[0], v, c.count);
  alignas(64) T lanes[CELLS];
  store(lanes, v);
  for (int i = 0; i < c.count; ++i) plane[c.at[i]] = lanes[i];
}

// All that goes with the quants of a block. parts[i] adds up to the sums of block i's halves.
OCTAVO_INLINE void put_sums(const Acts& a, const Cells& c, F d, const I* parts) {
  I sums[4];
  quad_sum(parts, sums);
  const I first = add(sums[0], sums[1]), second = add(sums[2], sums[3]), sum = add(first, second);
  put(a.d, c, d);
  put(a.s, c, mul(d, to_f32(sum)));
  put(a.n8, c, sub(zero_i(), shl<3>(sum)));
  put(a.n16, c, sub(zero_i(), shl<4>(sum)));
  put(a.n128, c, sub(zero_i(), shl<7>(sum)));
  if (a.n32 == nullptr) return;
  alignas(64) int32_t lanes[2][CELLS];
  store(lanes[0], sub(zero_i(), shl<5>(first)));
  store(lanes[1], sub(zero_i(), shl<5>(second)));
  for (int i = 0; i < c.count; ++i) {
    a.n32[c.half[i]] = lanes[0][i];
    a.n32[c.half[i] + a.group] = lanes[1][i];
  }
}

alignas(64) constexpr float ZEROS[32] = {};

// Magnitudes compare as integers, so that NaN counts as the largest.
OCTAVO_INLINE void quad_tops(const Cells& c, I* top) {
  I low[CELLS], high[CELLS];
#pragma GCC unroll 1
  for (int i = 0; i < CELLS; ++i) {
    const I magnitude = set1(int32_t{0x7fffffff});
    low[i] = and_(bitcast_i(load(c.x[i])), magnitude);
    high[i] = and_(bitcast_i(load(c.x[i] + 16)), magnitude);
  }
  quad_max(low, top);
  quad_max(high, top + 4);
}

// 32 values as bf16 integers; what is beyond a byte of them to `high`. Returns parts, as put_sums()
// wants them.
OCTAVO_INLINE I store_for_tiles(uint16_t* low, uint16_t* high, I a, I b) {
  alignas(64) int8_t bytes[2][32] = {};
  const I sums = high ? store_i16_split(bytes[0], bytes[1], a, b) : store_i8(bytes[0], a, b);
  store_bf16(low, to_f32(load_i8(bytes[0])));
  store_bf16(low + 16, to_f32(load_i8(bytes[0] + 16)));
  if (high == nullptr) return sums;
  store_bf16(high, to_f32(shl<8>(load_i8(bytes[1]))));
  store_bf16(high + 16, to_f32(shl<8>(load_i8(bytes[1] + 16))));
  return sums;
}

// Blocks to integers of one scale each by round to nearest. With a NaN or something beyond 2^100 in
// a block its d is NaN and the quants are zero.
void quantise_cells(const Acts& a, Cells& c) {
  for (int i = c.count; i < CELLS; ++i) c.x[i] = ZEROS;
  I top[8], wide = set1(int32_t{255});
  quad_tops(c, top);
  I most = top[0];
#pragma GCC unroll 8
  for (int j = 1; j < 8; ++j) most = max(most, top[j]);
  const bool pair = a.needs & ACT_PAIR;
  Scales scale;
  if (pair && !(a.needs & ACT_WIDE)) scale = mixed_scales(top, bitcast_f(most), &wide);
  else scale = scales_of(bitcast_f(most), set1(pair ? 1.0f / 32512.0f : 1.0f / 127.0f));
  const M bad = gt(most, set1(int32_t{0x71800000}));
  if (__builtin_expect(any(bad), 0)) {
    scale = {select(bad, zero_f(), scale.inverse), select(bad, set1(__builtin_nanf("")), scale.d)};
    for (int i = 0; i < c.count; ++i)
      if (bits(bad) >> i & 1) c.x[i] = ZEROS;
  }
  alignas(64) float inverse[CELLS];
  store(inverse, scale.inverse);
  I parts[CELLS];
#pragma GCC unroll 1
  for (int i = 0; i < c.count; ++i) {
    const F factor = set1(inverse[i]);
    const I q0 = to_i32(mul(load(c.x[i]), factor)), q1 = to_i32(mul(load(c.x[i] + 16), factor));
    const int64_t at = (pair ? c.half[i] : c.at[i]) * 32;
    if (a.t != nullptr) {
      parts[i] = store_for_tiles(a.t + at, pair ? a.t + at + a.group * 32 : nullptr, q0, q1);
      continue;
    }
    int8_t* q = a.q + at;
    parts[i] = pair ? store_i16_split(q, q + a.group * 32, q0, q1) : store_i8(q, q0, q1);
  }
  for (int i = c.count; i < CELLS; ++i) parts[i] = zero_i();
  put_sums(a, c, scale.d, parts);
  if (!pair) return;
  alignas(64) int32_t quads[CELLS];
  store(quads, wide);
  for (int i = 0; i < c.count; ++i) a.wide[c.at[i]] = static_cast<uint8_t>(quads[i]);
}

OCTAVO_INLINE void round_block(const Acts& a, int64_t at, int64_t half, const float* x) {
  uint16_t* h = a.h + at * 32;
  store_bf16(h, load(x));
  store_bf16(h + 16, load(x + 16));
  if (!(a.needs & (ACT_S | ACT_S16)) || (a.needs & ACT_A8)) return;
  const float first = hsum(load_bf16(h)), second = hsum(load_bf16(h + 16));
  if (a.s != nullptr) a.s[at] = first + second;
  if (a.s16 != nullptr) {
    a.s16[half] = first;
    a.s16[half + a.group] = second;
  }
}

OCTAVO_INLINE void prepare_cells(const Acts& a, Cells& c) {
  for (int i = 0; i < c.count; ++i) {
    if (a.needs & ACT_BF16) round_block(a, c.at[i], c.half[i], c.x[i]);
    if (a.needs & ACT_F32) {
      store(a.f + c.at[i] * 32, load(c.x[i]));
      store(a.f + c.at[i] * 32 + 16, load(c.x[i] + 16));
    }
  }
  if (a.needs & ACT_A8) quantise_cells(a, c);
  c.count = 0;
}

// A block of fewer than 32 values is read from `rest`, with zeros behind them.
OCTAVO_INLINE const float* whole_block(const float* x, int64_t left, float* rest) {
  if (left >= 32) return x;
  if (left <= 0) return ZEROS;
  for (int i = 0; i < 32; ++i) rest[i] = i < left ? x[i] : 0.0f;
  return rest;
}

void prepare(const Acts& a, const BlockRange& want, const float* x, int64_t ld) {
  const int64_t b1 = want.block1 * 32 >= a.k ? a.blocks : want.block1;
  alignas(64) float rest[CELLS][32];
  Cells c;
  c.count = 0;
  for (int64_t top = want.row0; top < want.row1;) {
    const int64_t first = top / a.group * a.group;
    const int64_t end = first + a.group < want.row1 ? first + a.group : want.row1;
    for (int64_t b = want.block0; b < b1; ++b)
      for (int64_t r = top; r < end; ++r) {
        const int64_t block = first * a.blocks + b * a.group;
        c.x[c.count] = whole_block(x + (r - want.row0) * ld + (b - want.block0) * 32,
                                   a.k - b * 32, rest[c.count]);
        c.at[c.count] = block + r - first;
        c.half[c.count] = 2 * block + r - first;
        if (++c.count == CELLS) prepare_cells(a, c);
      }
    top = end;
  }
  if (c.count > 0) prepare_cells(a, c);
}

}  // namespace
}  // namespace octavo
