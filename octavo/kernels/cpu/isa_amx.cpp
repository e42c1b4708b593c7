// The amx unit: what avx512 has faster kernels for where the processor has matrix tiles.
#include "isa_amx.h"

#include "isa.h"
#include "rowops.h"
#include "vec_avx512.h"

#include "prepare.inl"
#include "linear_tiles.inl"
#include "attention_tiles.inl"

namespace octavo {

// In tiles what there are tiles for: bytes, and bf16.
int64_t peak_amx(int kind, int64_t iterations, float* sink) {
  if (kind > 1) return KERNELS_AVX512.rows->peak(kind, iterations, sink);
  const TileShape shape(16, 16);
  tile_zero<LEFT0>();
  tile_zero<LEFT1>();
  tile_zero<RIGHT0>();
  tile_zero<RIGHT1>();
  tile_zero<SUM0>();
  tile_zero<SUM1>();
  tile_zero<SUM2>();
  tile_zero<SUM3>();
  for (int64_t i = 0; i < iterations; ++i) {
    if (kind == 0) {
      tile_byte_product<SUM0, LEFT0, RIGHT0>();
      tile_byte_product<SUM1, LEFT0, RIGHT1>();
      tile_byte_product<SUM2, LEFT1, RIGHT0>();
      tile_byte_product<SUM3, LEFT1, RIGHT1>();
    } else {
      tile_product<SUM0, LEFT0, RIGHT0>();
      tile_product<SUM1, LEFT0, RIGHT1>();
      tile_product<SUM2, LEFT1, RIGHT0>();
      tile_product<SUM3, LEFT1, RIGHT1>();
    }
  }
  return iterations * 4 * 16 * 16 * (kind == 0 ? 64 : 32) * 2;
}

}  // namespace octavo
