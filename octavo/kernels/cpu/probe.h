// What this machine can do, measured: for `octavo doctor` and the benches' ceilings.
#pragma once
#include "isa.h"

namespace octavo {

struct Peaks {
  double read_bytes_per_s;                     // from memory, all threads
  double int8_ops_per_s, bf16_ops_per_s, f32_ops_per_s;
};

// Takes about `seconds`, on `threads` threads, with `buffer_bytes` of memory in all.
Peaks probe(const Kernels& kernels, int threads, double seconds, int64_t buffer_bytes);

}  // namespace octavo
