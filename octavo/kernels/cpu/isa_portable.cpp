// The portable unit: everything in it has internal linkage except its table.
#include "isa.h"
#include "vec_portable.h"

#define OCTAVO_KERNELS KERNELS_PORTABLE
#define OCTAVO_NAME "portable"
#include "isa_unit.inl"
