// One causal attention of one head with the portable kernels, for cachegrind (octavo/lab/misses.py).
// Usage: flash naive|flash idle|run TOKENS DIM. "idle" does all but the attention itself, so that
// the difference of two runs is the attention's. Prints one
// and the sum of the output.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "isa.h"
#include "vec_portable.h"

#include "attention_table.inl"
#include "naive.inl"
#include "rowops.inl"

#include "attention_lab.h"

int main(int argc, char** argv) {
  using namespace octavo;
  if (argc != 5) return 2;
  const bool naive = !std::strcmp(argv[1], "naive"), run = !std::strcmp(argv[2], "run");
  const int64_t n = std::atoll(argv[3]), dim = std::atoll(argv[4]);
  std::vector<float> in(size_t(3 * n * dim)), out(size_t(n * dim));
  uint32_t state = 1;
  for (float& x : in) {
    state = state * 1664525u + 1013904223u;
    x = float(state >> 8) / float(1 << 23) - 1.0f;
  }
  const float* q = in.data();
  // Turns the cache over before the attention, in both kinds of run.
  std::vector<uint8_t> other(size_t(4) << 20);
  const auto flush = [&] {
    for (size_t i = 0; i < other.size(); i += 64) ++other[i];
  };
  const AttentionInput input{q, q + n * dim, q + 2 * n * dim, n, {1, 1, int32_t(dim)},
                             1.0f / __builtin_sqrtf(float(dim))};
  if (naive) {
    NaiveAttention a(NAIVE, input, 1);
    flush();
    if (run) a.run(out.data());
  } else {
    FlashAttention a(ATTENTION, ROWS, input, 1);
    flush();
    if (run) a.run(out.data());
  }
  double sum = other[0];  // 1
  for (float x : out) sum += double(x);
  std::printf("%.6f\n", sum);
}
