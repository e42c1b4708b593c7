// Intel's Advanced Matrix Extensions: eight registers of 16 rows x 64 bytes, and a product of two of
// them. Source: Intel Architecture Instruction Set Extensions Programming Reference, chapter 3.
// Products are in bf16 with float sums: acc[m][n] += sum over pairs k of a[m][k] * b[k][n].
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace octavo {
namespace {

// Registers and what they hold: sums, rows of activations (or queries), weights (or keys).
enum Tile : int { SUM0, SUM1, SUM2, SUM3, LEFT0, LEFT1, RIGHT0, RIGHT1 };

constexpr int64_t TILE_BYTES = 1024;

// While this lives the calling thread's tiles have `rows` rows of activations, and `pairs` pairs of k
// in a product. (A thread that holds tiles pays for them at every switch; hence no longer than that.)
class TileShape {
 public:
  TileShape(int rows, int pairs) {
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } c;
    for (int i = SUM0; i <= RIGHT1; ++i) {
      c.row_bytes[i] = static_cast<uint16_t>(i == LEFT0 || i == LEFT1 ? 4 * pairs : 64);
      c.rows[i] = static_cast<uint8_t>(i < RIGHT0 ? rows : pairs);
    }
    asm volatile("ldtilecfg %0" ::"m"(c));
  }
  ~TileShape() { asm volatile("tilerelease"); }
  TileShape(const TileShape&) = delete;
  TileShape& operator=(const TileShape&) = delete;
};

// Rows `stride` bytes apart.
template <Tile T>
OCTAVO_INLINE void tile_load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <Tile T>
OCTAVO_INLINE void tile_store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <Tile T>
OCTAVO_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
// The same with unsigned and signed bytes, four of k at a time, and int32 sums; for the probe alone.
template <Tile SUM, Tile LEFT, Tile RIGHT>
OCTAVO_INLINE void tile_byte_product() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(LEFT), "i"(RIGHT));
}
// SUM += LEFT * RIGHT.
template <Tile SUM, Tile LEFT, Tile RIGHT>
OCTAVO_INLINE void tile_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(LEFT), "i"(RIGHT));
}

}  // namespace
}  // namespace octavo
