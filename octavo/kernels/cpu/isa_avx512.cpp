// The avx512 unit: everything in it has internal linkage except its table.
#include "isa.h"
#include "vec_avx512.h"

#define OCTAVO_KERNELS KERNELS_AVX512
#define OCTAVO_NAME "avx512"
#include "isa_unit.inl"
