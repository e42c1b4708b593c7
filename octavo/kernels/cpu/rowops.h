// Operations on one row of activations, and the writing of keys and values into cache blocks.
#pragma once
#include "contract.h"

namespace octavo {

enum class Act : int32_t { Silu = 0, GeluTanh = 1 };

constexpr int BLOCK_TOKENS = 32;
constexpr int64_t READ_AHEAD = 4096;  // prefetch distance at which memory is read fastest

// How the cache holds keys and values. A block's part for one head is its keys, then its values.
//   BF16  K [d/2][32][2], V [16][d][2]: what meets in one product lies side by side
//   F32   K [d][32], V [32][d]
//   INT8  K [d/4][32][4], V [8][d][4] as value / scale + 128; after each its 32 scales in bf16,
//         one for each token and head
enum class KvType : int32_t { BF16 = 0, F32 = 1, INT8 = 2 };

// Of the keys, or the values, of one block and head. In attend_step.cpp.
int64_t kv_half_bytes(KvType type, int64_t d);

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
  // One token's key or value of one head into slot `slot` of a block's keys or values. What bf16
  // cannot hold (NaN, infinities) is stored as zero, whatever the type: in a product with the weight
  // 0 of tokens that do not see it, it would reach them all the same. Returns whether all was finite.
  bool (*store_k)(const float* k, int64_t d, void* keys, int64_t slot, KvType type);
  // Only dims i0..i1 of the d, which INT8 wants all; v points at dim i0.
  bool (*store_v)(const float* v, int64_t d, int64_t i0, int64_t i1, void* values, int64_t slot,
                  KvType type);
  // For the probes. Sums n bytes (a multiple of 256) so that the reads are not elided; prefetches
  // `ahead` bytes ahead, or not at all for 0.
  float (*read_bytes)(const uint8_t* p, int64_t n, int64_t ahead);
  // Runs `iterations` of independent chains of the widest multiply-add; returns operations done.
  // kind: 0 int8 dot, 1 bf16 dot, 2 f32 fma. What of 0 remains beside the float arithmetic of
  // blocks of 32, which counts as no operation: 3 one multiply-add a block (a scale), 4 two (and a
  // minimum).
  int64_t (*peak)(int kind, int64_t iterations, float* sink);
};

}  // namespace octavo
