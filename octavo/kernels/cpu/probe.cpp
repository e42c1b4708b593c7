#include "probe.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "memory.h"
#include "pool.h"
#include "rowops.h"

namespace octavo {
namespace {

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

// Repeats fn(thread) on all threads for `seconds` and returns the best time of one round.
template <class Fn>
double best_round(Pool& pool, double seconds, Fn fn) {
  double best = 1e30;
  const double end = now() + seconds;
  do {
    const double start = now();
    pool.run([](void* f, int thread) { (*static_cast<Fn*>(f))(thread); }, &fn);
    best = std::min(best, now() - start);
  } while (now() < end);
  return best;
}

}  // namespace

Peaks probe(const Kernels& kernels, int threads, double seconds, int64_t buffer_bytes) {
  Pool pool(threads, false);
  const RowTable& rows = *kernels.rows;
  struct alignas(64) Sink {
    float value = 0.5f;
  };
  std::vector<Sink> sinks(static_cast<size_t>(threads));
  Peaks peaks{};
  {
    const int64_t share = buffer_bytes / threads / 4096 * 4096;
    const Region buffer(size_t(share * threads + 8192));
    auto fill = [&](int t) { std::memset(buffer.data() + t * share, 1, size_t(share)); };
    best_round(pool, 0, fill);
    const double s = best_round(pool, seconds / 4, [&](int t) {
      sinks[size_t(t)].value += rows.read_bytes(buffer.data() + t * share, share);
    });
    peaks.read_bytes_per_s = double(share * threads) / s;
  }
  double* const out[] = {&peaks.int8_ops_per_s, &peaks.bf16_ops_per_s, &peaks.f32_ops_per_s};
  for (int kind = 0; kind < 3; ++kind) {
    std::atomic<int64_t> ops{0};
    const double s = best_round(pool, seconds / 4, [&](int t) {
      ops = rows.peak(kind, 50'000, &sinks[size_t(t)].value);
    });
    *out[kind] = double(ops.load()) * threads / s;
  }
  return peaks;
}

}  // namespace octavo
