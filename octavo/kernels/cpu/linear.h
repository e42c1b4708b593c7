// Products of activations with P16 weights: the activations' form and each ISA's table.
//
// Law: the bits of an output depend on its weight row, its activation row and the ISA only; never
// on the other rows, their number, the range of panels or the thread.
#pragma once
#include "contract.h"

namespace octavo {

// Rows of activations in every form that `needs` names, k padded with zeros to a multiple of 64.
// A8: int8 quants in groups of 32, d = amax / 127 per group, rounded up to four significant bits (a
// kernel multiplies by such a number by adding integers, linear.inl; the noise is a tenth larger);
// and per group the sums that the weights' offsets and minima need. Rows are interleaved `group` at a time in blocks of 32 values,
// so that a tile of rows reads consecutive bytes: element i of block b of row r is at
// ((r / group * blocks + b) * group + r % group) * 32 + i.
// With ACT_PAIR a value may be two bytes, d * (256 * high + q): a block's `group` rows of q are
// followed by as many of high. `wide` says of each row's block which of its eight quads (the four
// values that one dot product takes) have a high byte that is not zero; the products of the others
// are left out, which changes no bit. A quad is wide where its largest magnitude is above
// OUTLIER times the block's body, and d = (the largest of the rest) / 127, so that a few
// large values, of which real activations have many, do not cost the others their bits; with
// ACT_WIDE every quad is wide and d = amax / 127 / 256: 15 bits and a sign throughout. (Outliers kept
// apart at a higher precision: Dettmers et al., LLM.int8(), 2022; here by quads, found in each row.)
// The sums are of the whole values.
// A block that holds a NaN or a value beyond 2^100 becomes d = NaN: its row's outputs are NaN, no
// other's. A block of zeros has d = 1.
// Products in bf16 need sums too: weights come as integers plus a constant, which is taken off again.
struct Acts {
  int64_t rows, k, blocks, group;
  uint32_t needs;
  int8_t* q;        // ACT_A8 from here: [groups][blocks][group][32], with ACT_PAIR [2][group][32]
  uint8_t* wide;    // ACT_PAIR: [groups][blocks][group]: bit j for quad j
  float* d;         // [groups][blocks][group]
  float* s;         // ACT_S: d * sum(q); without ACT_A8 the sum of h
  float* s16;       // ACT_S16: [groups][blocks][2][group]: the sums of h over each half block
  int32_t* n8;      // ACT_N8: -8 * sum(q); likewise -16 and -128
  int32_t* n16;
  int32_t* n128;
  int32_t* n32;     // ACT_N32: [groups][blocks][2][group]: -32 * the sum of each half block
  uint16_t* h;      // ACT_BF16: [groups][blocks][group][32] bf16
  float* f;         // ACT_F32: likewise floats
  uint16_t* t;      // ACT_TILES, instead of q and n*: bf16
                    // [groups][blocks][2: q, 256 * high; else 1][group][32]
};

// Beside ActNeeds: which of ACT_A8's sums are wanted; whether its values may be pairs of bytes, and
// whether all of them are.
constexpr uint32_t ACT_S = 256, ACT_N8 = 512, ACT_N16 = 1024, ACT_N128 = 2048, ACT_N32 = 4096;
constexpr uint32_t ACT_PAIR = 8192, ACT_S16 = 16384, ACT_WIDE = 32768;
// Of LEAST_TILE_ROWS or more ACT_A8's values are wanted as matrix tiles take them (linear_tiles.inl);
// fewer are as fast without (measured on Emerald Rapids: 16 rows 0.75 times, 32 rows 1.1, 64 1.3).
constexpr uint32_t ACT_TILES = 65536;
constexpr int64_t LEAST_TILE_ROWS = 48;

// How quantised weights are multiplied; others are in any case as exact as their own type. MIXED is
// INT8 with ACT_PAIR, PAIRS with ACT_WIDE too. BF16: activations keep 8 bits of their own, where
// int8 has a scale for 32 of them.
enum class Products : int32_t { INT8, MIXED, PAIRS, BF16, F32 };

constexpr int64_t MAX_GROUP = 16;

// Bytes that acts_at lays out, a multiple of 64. `mem` is 64-byte aligned; nothing is written.
// The group is chosen from `rows`: the same rows must be given when preparing and when reading.
size_t acts_bytes(int64_t rows, int64_t k, uint32_t needs);
Acts acts_at(void* mem, int64_t rows, int64_t k, uint32_t needs);

struct BlockRange {
  int64_t row0, row1, block0, block1;
};

struct LinearTable {
  // The forms (ActNeeds and the sums) that `linear` reads for this type of weight.
  uint32_t (*needs)(WType type, Products products);
  // Writes blocks of rows of `acts` in all its forms: value 32 * block0 + i of row row0 + r is at
  // x[r * ld + i]. The padding after the last value belongs to the last block that has one. Rows may
  // be prepared by different threads; rows of one group share cache lines, so hand them out in
  // multiples of MAX_GROUP; a whole group at once is fastest.
  void (*prepare)(const Acts& acts, const BlockRange& blocks, const float* x, int64_t ld);
  // out[(row - row0) * ld + (panel - panel0) * 16 + c] = sum over k of w[panel * 16 + c][k] *
  // x[row][k], for all 16 c of every panel: columns beyond w.n are written too. What the products
  // are is told by the forms that `acts` has: of a quantised weight int8 with ACT_A8, else bf16, and
  // with ACT_F32 alone weights are dequantised and every product is in float.
  void (*linear)(const PackedWeight& w, int64_t panel0, int64_t panel1, const Acts& acts,
                 int64_t row0, int64_t row1, float* out, int64_t ld);
  // out[k] = scale * w[id][k], dequantised in float as the file format defines it.
  void (*embed_row)(const PackedWeight& w, int64_t id, float scale, float* out);
};

}  // namespace octavo
