// P16 weights (pack.h has their layout) on their way into registers, written once over the vector
// vocabulary: a block of 16 channels x 32 k as bytes and scales.
#pragma once
#include "contract.h"

namespace octavo {
namespace {

// weight[c][4j + t] = d * (byte 4c + t of w[j] - offset) + m. Q6_K: d for j < 4, d2 for j >= 4.
struct Block {
  B w[8];
  F d, d2, m;
};

// What holds for a whole unit (the bytes after which the layout repeats).
struct Unit {
  const uint8_t* at;
  F d, m;
};

OCTAVO_INLINE const uint16_t* halves(const uint8_t* p) {
  return reinterpret_cast<const uint16_t*>(p);
}
OCTAVO_INLINE uint64_t word64(const uint8_t* p) {
  uint64_t w;
  __builtin_memcpy(&w, p, 8);
  return w;
}

OCTAVO_INLINE void nibbles(const uint8_t* p, B* w) {
  const B low = set1_u8(15);
  for (int j = 0; j < 4; ++j) {
    const B x = held(load_b(p + 64 * j));
    w[j] = and_b(x, low);
    w[j + 4] = and_b(shr16_b<4>(x), low);
  }
}
OCTAVO_INLINE void fifth_bits(const uint8_t* p, B* w) {
  const B sixteen = set1_u8(16);
  for (int j = 0; j < 8; ++j) w[j] = add_bits_b(w[j], word64(p + 8 * j), sixteen);
}

enum Offset { NONE, EIGHT, SIXTEEN, BYTE, SPLIT };  // which plane of Acts; SPLIT: -32, per half

// The five older types. d and m of a block are 32 bytes each; without m two blocks share a line.
template <int BITS, bool HAS_M, Offset OFFSET>
struct Legacy {
  static constexpr Offset kOffset = OFFSET;
  static constexpr bool kHasMin = HAS_M, kFifthBit = BITS == 5, kAnyByte = BITS == 8;
  static constexpr int kFewRows = BITS == 8 ? 3 : 2;
  static constexpr int64_t kQuants = BITS * 64, kBlocks = HAS_M ? 1 : 2;
  static constexpr int64_t kUnit = 64 + kBlocks * kQuants;
  static constexpr int kOffsetValue = OFFSET == EIGHT ? 8 : OFFSET == SIXTEEN ? 16
                                      : OFFSET == BYTE ? 128 : 0;

  OCTAVO_INLINE Unit unit(const uint8_t* panel, int64_t u, int64_t) {
    return {panel + u * kUnit, zero_f(), zero_f()};
  }
  OCTAVO_INLINE Block block(const Unit& u, int64_t h) {
    Block x;
    const uint8_t* q = u.at + 64 + h * kQuants;
    if constexpr (BITS == 8) {
      for (int j = 0; j < 8; ++j) x.w[j] = load_b(q + 64 * j);
    } else {
      nibbles(q + (BITS == 5 ? 64 : 0), x.w);
      if constexpr (BITS == 5) fifth_bits(q, x.w);
    }
    x.d = load_f16(halves(u.at + (HAS_M ? 0 : h * 32)));
    if constexpr (HAS_M) x.m = load_f16(halves(u.at + 32));
    x.d2 = x.d;
    return x;
  }
};
using Q4_0 = Legacy<4, false, EIGHT>;
using Q4_1 = Legacy<4, true, NONE>;
using Q5_0 = Legacy<5, false, SIXTEEN>;
using Q5_1 = Legacy<5, true, NONE>;
using Q8_0 = Legacy<8, false, BYTE>;

template <int BITS>
struct SuperBlock45 {
  static constexpr Offset kOffset = NONE;
  static constexpr bool kHasMin = true, kFifthBit = BITS == 5, kAnyByte = false;
  static constexpr int kFewRows = 2;
  static constexpr int64_t kQuants = BITS * 64, kBlocks = 8, kUnit = 320 + 8 * kQuants;
  static constexpr int kOffsetValue = 0;

  OCTAVO_INLINE Unit unit(const uint8_t* panel, int64_t u, int64_t) {
    const uint8_t* at = panel + u * kUnit;
    return {at, load_f16(halves(at)), neg(load_f16(halves(at + 32)))};
  }
  OCTAVO_INLINE Block block(const Unit& u, int64_t h) {
    Block x;
    const uint8_t* q = u.at + 320 + h * kQuants;
    nibbles(q + (BITS == 5 ? 64 : 0), x.w);
    if constexpr (BITS == 5) fifth_bits(q, x.w);
    x.d = mul(u.d, to_f32(load_u8(u.at + 64 + 16 * h)));
    x.m = mul(u.m, to_f32(load_u8(u.at + 192 + 16 * h)));
    x.d2 = x.d;
    return x;
  }
};
using Q4_K = SuperBlock45<4>;
using Q5_K = SuperBlock45<5>;

struct Q6_K {
  static constexpr Offset kOffset = SPLIT;
  static constexpr bool kHasMin = false, kFifthBit = false, kAnyByte = false;
  static constexpr int kFewRows = 1;
  static constexpr int64_t kQuants = 384, kBlocks = 8, kUnit = 256 + 8 * kQuants;
  static constexpr int kOffsetValue = 32;

  OCTAVO_INLINE Unit unit(const uint8_t* panel, int64_t u, int64_t units) {
    const int64_t head = (units * 32 + 63) / 64 * 64;
    return {panel + head + u * kUnit, load_f16(halves(panel + 32 * u)), zero_f()};
  }
  // Six bits: the nibble below, its pair of high bits moved to 4..5 above.
  OCTAVO_INLINE B six(B nibble, B pair) {
    return or_b(and_b(nibble, set1_u8(15)), and_b(pair, set1_u8(48)));
  }
  OCTAVO_INLINE Block block(const Unit& u, int64_t h) {
    Block x;
    const uint8_t* q = u.at + 256 + h * kQuants;
    // In the order of their addresses: of others the hardware does not see a stream.
    B v[4];
    for (int j = 0; j < 4; ++j) v[j] = held(load_b(q + 64 * j));
    const B low_high = held(load_b(q + 256)), high_high = held(load_b(q + 320));
    const B high[8] = {shl16_b<4>(low_high),  shl16_b<2>(low_high),  low_high,
                       shr16_b<2>(low_high),  shl16_b<4>(high_high), shl16_b<2>(high_high),
                       high_high,             shr16_b<2>(high_high)};
    for (int j = 0; j < 4; ++j) {
      x.w[j] = six(v[j], high[j]);
      x.w[j + 4] = six(shr16_b<4>(v[j]), high[j + 4]);
    }
    const int8_t* sc = reinterpret_cast<const int8_t*>(u.at) + 32 * h;
    x.d = mul(u.d, to_f32(load_i8(sc)));
    x.d2 = mul(u.d, to_f32(load_i8(sc + 16)));
    return x;
  }
};

}  // namespace
}  // namespace octavo
