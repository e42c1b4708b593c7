// The avx2 unit: everything in it has internal linkage except its table.
#include "isa.h"
#include "vec_avx2.h"

#define OCTAVO_KERNELS KERNELS_AVX2
#define OCTAVO_NAME "avx2"
#include "isa_unit.inl"
