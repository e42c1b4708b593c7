// Paged attention over blocks of 32 tokens, in fixed splits of 256 tokens anchored at position 0.
#pragma once
#include "rowops.h"

namespace octavo {

constexpr int SPLIT_TOKENS = 256;
constexpr int TILE_ROWS = 12;
constexpr int UNIT_TILES = 4;  // that share keys and values while these are in a near cache
constexpr int MAX_HEAD_DIM = 256;

// One sequence and one kv head. Row r of it is token r / group, q head r % group of the group.
struct AttendArgs {
  const float* q;          // row r at q + (r / group) * q_ld + (r % group) * dim
  int64_t q_ld;
  float* out;              // likewise
  int64_t out_ld;
  const uint8_t* kv;       // this layer's and head's part of block 0: K, then V
  int64_t block_bytes;     // from one block to the next
  int64_t half_bytes;      // from the keys to the values
  const int32_t* table;    // the sequence's block table
  int64_t start;           // absolute position of the sequence's first token in this step
  int64_t window;          // a token sees itself and window - 1 before it; 0: all
  int32_t group, dim;
  float scale;
  KvType type;
};

// What one tile has gathered from some splits: m[rows], l[rows], o[rows][dim] as floats.
constexpr int64_t attend_state_floats(int64_t rows, int64_t dim) { return rows * (dim + 2); }

// Splits of 256 tokens, by number.
struct SplitRange {
  int64_t begin, end;
};
// The splits that rows row0 .. row0+rows of a sequence see.
SplitRange attend_splits(const AttendArgs& a, int64_t row0, int64_t rows);  // in attend_step.cpp

// The blocks whose keys will be read next, so that they are asked for in time. kv null: none.
struct Upcoming {
  const uint8_t* kv;
  const int32_t* table;
  int64_t begin, end;
};

struct AttentionTable {
  // Attends rows row0 .. row0+rows (at most UNIT_TILES tiles) to some splits, folding one after the
  // other into each tile's state, which held nothing. From one to the next: that of a full tile.
  void (*attend)(const AttendArgs& a, int64_t row0, int rows, SplitRange splits,
                 const Upcoming& next, float* state);
  // Folds the state of a later split into that of earlier ones: what attend() does itself.
  void (*fold)(float* state, const float* part, int rows, int dim);
  // Divides by the sums and writes the rows of one tile out.
  void (*finish)(const AttendArgs& a, int64_t row0, int rows, const float* state);
};

}  // namespace octavo
