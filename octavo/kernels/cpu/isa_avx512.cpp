// The avx512 unit: everything in it has internal linkage except its table.
#include "isa.h"
#include "vec_avx512.h"

#define OCTAVO_KERNELS KERNELS_AVX512
#define OCTAVO_NAME "avx512"
#include "isa_unit.inl"
#include "isa_amx.h"

// One row at a time, and sampling, are as fast without tiles.
namespace octavo {
namespace {
constexpr RowTable ROWS_AMX{rms_norm, add_rows, act_mul, rope, store_k, store_v, read_bytes, peak_amx};
}
constinit const Kernels KERNELS_AMX{"amx", &LINEAR_AMX, &SAMPLE, &ATTENTION_AMX, &ROWS_AMX, &NAIVE};
}  // namespace octavo
