// Attention as the formula is written: all scores to memory, softmax row by row, then the product
// with the values. The rival of attention.inl in `octavo lab flash`, and an honest one: the same
// bf16 products on the same number of rows in registers, and blocks that no row sees are skipped.
#pragma once
#include "contract.h"

namespace octavo {

constexpr int NAIVE_ROWS = 32;  // of a tile; the number of tokens is a multiple

// One head of n tokens that all attend to each other, causally.
struct NaiveArgs {
  int64_t n, dim;
  const uint16_t* q;  // [n][dim] bf16
  const uint16_t* k;  // [n / 32][dim / 2][32][2]
  const uint16_t* v;  // [n / 2][dim][2]
  float scale;
  float* s;           // [n][n] scores
  uint16_t* p;        // [n][n] weights, of which each row's sum is in:
  float* sums;        // [n]
  float* out;         // row r at out + r * ld
  int64_t ld;
};

struct NaiveTable {
  // One row of a head into bf16: q as it is; k, v into the places of token `row`.
  void (*pack_q)(const float* x, int64_t dim, uint16_t* q);
  void (*pack_k)(const float* x, int64_t dim, int64_t row, uint16_t* k);
  void (*pack_v)(const float* x, int64_t dim, int64_t row, uint16_t* v);
  // The three passes over the NAIVE_ROWS rows from row0 on.
  void (*scores)(const NaiveArgs& a, int64_t row0);
  void (*softmax)(const NaiveArgs& a, int64_t row0);
  void (*values)(const NaiveArgs& a, int64_t row0);
};

}  // namespace octavo
