// Which instruction sets this machine can run, and the kernel table of each.
#pragma once
#include "contract.h"

namespace octavo {

// Declared in linear.h, sample.h, attention.h, rowops.h and naive.h: structs of function pointers.
struct LinearTable;
struct SampleTable;
struct AttentionTable;
struct RowTable;
struct NaiveTable;

// One per instruction set, defined by that set's unit.
struct Kernels {
  const char* name;  // "amx", "avx512", "avx2", "portable"
  const LinearTable* linear;
  const SampleTable* sample;
  const AttentionTable* attention;
  const RowTable* rows;
  const NaiveTable* naive;
};

extern const Kernels KERNELS_PORTABLE;
#ifdef OCTAVO_X86
extern const Kernels KERNELS_AVX2;
extern const Kernels KERNELS_AVX512;
extern const Kernels KERNELS_AMX;  // avx512's, with matrix tiles where there are many rows
#endif

constexpr int MAX_ISAS = 4;

// Fills `out` with the tables this processor and operating system can run, best first; returns how
// many. The portable one is always last.
int usable_isas(const Kernels* out[MAX_ISAS]);

// The table named `name`, or the best one if name is null or "auto"; null if unknown or not usable.
const Kernels* find_isa(const char* name);

}  // namespace octavo
