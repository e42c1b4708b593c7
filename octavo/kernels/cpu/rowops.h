// Operations on one row of activations, and the writing of keys and values into cache blocks.
#pragma once
#include "linear.h"

namespace octavo {

enum class Act : int32_t { Silu = 0, GeluTanh = 1 };

constexpr int BLOCK_TOKENS = 32;

// Every function is a fixed sequence of operations on its row: bits depend on the row alone.
struct RowTable {
  // out = x / sqrt(mean(x^2) + eps) * w; out may be x.
  void (*rms_norm)(const float* x, const float* w, int64_t n, float eps, float* out);
  // out = a + b; out may be either.
  void (*add)(const float* a, const float* b, int64_t n, float* out);
  // out = act(gate) * up; out may be either.
  void (*act_mul)(Act act, const float* gate, const float* up, int64_t n, float* out);
  // Rotates the pairs (x[i], x[i + half]) by the angles whose cosines and sines are given.
  void (*rope)(float* x, const float* cos, const float* sin, int64_t half);
  // LinearTable::prepare for blocks b0..b1 of 32 elements of a row only; x: element 32 * b0. The
  // last block of the row takes the padding after it along. paired: the int8 form is two rows of
  // acts, 2 * row of x rounded and 2 * row + 1 of what that leaves of x; together they hold x to 15
  // bits. Float forms, where a fused weight needs them too, are in the first of the two alone.
  void (*prepare_blocks)(const Acts& acts, int64_t row, bool paired, int64_t b0, int64_t b1,
                         const float* x);
  // out[r * ld + c] = pairs[2r * width + c] + pairs[(2r + 1) * width + c].
  void (*sum_pairs)(const float* pairs, int64_t rows, int64_t width, float* out, int64_t ld);
  // One token's key or value of one head into slot `slot` of a block. bf16: K [d/2][32][2],
  // V [16][d][2]; f32: K [d][32], V [32][d].
  void (*store_k)(const float* k, int64_t d, void* block, int64_t slot, bool fp32);
  void (*store_v)(const float* v, int64_t d, int64_t i0, int64_t i1, void* block, int64_t slot,
                  bool fp32);  // only dims i0..i1 of the d; v points at dim i0
  // For `octavo doctor`. Sums n bytes (a multiple of 256) so that the reads are not elided.
  float (*read_bytes)(const uint8_t* p, int64_t n);
  // Runs `iterations` of 16 independent chains of the widest multiply-add; returns operations done.
  // kind: 0 int8 dot, 1 bf16 dot, 2 f32 fma.
  int64_t (*peak)(int kind, int64_t iterations, float* sink);
};

}  // namespace octavo
