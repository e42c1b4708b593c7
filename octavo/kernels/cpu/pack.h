// P16: weights laid out in panels of 16 output channels, in the very order the kernels read them.
//
// A block is 16 channels x 32 k. Its quants are zmm vectors whose byte 4c + t is channel c, element
// 4j + t (a "quad" j). Nibbles: vector j < 4 has quad j low, quad j + 4 high. Everything is stored
// unsigned, as the kernels multiply it; d, m and dmin are the file's own fp16 bits.
//
//   Q4_0  per 2 blocks: 2 x d[16], 2 x 256 nibbles                                    576 bytes
//   Q4_1  per block: d[16], m[16], 256 nibbles                                        320
//   Q5_0  per 2 blocks: 2 x d[16], 2 x (8 x u64 fifth bits by quad, 256 nibbles)      704
//   Q5_1  per block: d[16], m[16], 8 x u64 fifth bits, 256 nibbles                    384
//   Q8_0  per 2 blocks: 2 x d[16], 2 x 512 of q + 128                                1088
//   Q4_K  per 8 blocks: d[16], dmin[16], sc u8[8][16], mn u8[8][16], 8 x 256         2368
//   Q5_K  likewise, 8 x (8 x u64 fifth bits, 256 nibbles)                            2880
//   Q6_K  all d[16] of the panel first, padded to 64 bytes; then per 8 blocks:
//         sc s8[8][2][16], 8 x (256 nibbles, 2 x 64 bytes of quads' high pairs)      3328
//   F32   [k][16]; F16 [k][16]; BF16 [k/2][16][2]
//
// Pairs of blocks where one block is no multiple of 64 bytes, so that no load straddles two lines.
// k is padded with zeros to a multiple of 64, n to a multiple of 16; K-quants have k % 256 == 0.
#pragma once
#include <memory>

#include "contract.h"

namespace octavo {

// One packed tensor. Movable handle on memory that small tensors share; read-only once packed.
struct Packed {
  PackedWeight weight;
  std::shared_ptr<void> memory;
};

// Name of a type, or null if it is none of WType's.
const char* type_name(int32_t type);
// Bytes of one row of k elements in a file. Throws std::invalid_argument, naming the type, if a row
// of this type cannot have k elements.
size_t row_bytes(WType type, int64_t k);
// Bytes of one panel; row_bytes has accepted k.
size_t panel_bytes(WType type, int64_t k);

struct Source {
  WType type;
  const uint8_t* data;    // rows x row_bytes(type, k), as in GGUF or safetensors
  int64_t rows, k;
  int64_t permute_heads;  // > 0: rows of each of so many heads are interleaved pairs, as llama.cpp
                          // stores q and k, and are put back: half 0 first, then half 1
};

// Packs with `threads` threads, lossless. Throws std::invalid_argument, std::bad_alloc.
Packed pack(const Source& source, int threads);
// The rows back in the file's format (heads as packed). out: n * row_bytes(type, k).
void unpack(const PackedWeight& weight, uint8_t* out);

}  // namespace octavo
