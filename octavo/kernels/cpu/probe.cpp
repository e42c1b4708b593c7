#include "probe.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
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

// Threads bound to a processor each, the caller too while this lives: a new thread may else share
// its processor for longer than a probe takes. Where there are fewer processors, nothing is bound.
class Bound {
 public:
  explicit Bound(int threads) : pool(threads, true) {
    cpu_set_t one;
    CPU_ZERO(&one);
    bound_ = pool.pinned() && sched_getaffinity(0, sizeof before_, &before_) == 0;
    for (int cpu = 0; bound_ && cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &before_)) {
        CPU_SET(cpu, &one);
        break;
      }
    bound_ = bound_ && sched_setaffinity(0, sizeof one, &one) == 0;
  }
  ~Bound() {
    if (bound_) sched_setaffinity(0, sizeof before_, &before_);
  }
  Bound(const Bound&) = delete;
  Bound& operator=(const Bound&) = delete;
  Pool pool;

 private:
  cpu_set_t before_;
  bool bound_;
};

}  // namespace

double probe_read(const Kernels& kernels, int threads, int64_t share, int64_t round,
                  int64_t ahead, double seconds) {
  constexpr int64_t PIECE = 64 << 10;
  share = std::max<int64_t>(1, share / PIECE) * PIECE;
  const int64_t pieces = std::max<int64_t>(1, round / PIECE), stride = share + 4096;
  Bound bound(threads);
  Pool& pool = bound.pool;
  const Region buffer(size_t(stride * threads));
  best_round(pool, 0, [&](int t) { std::memset(buffer.data() + t * stride, 1, size_t(share)); });
  struct alignas(64) Reader {
    int64_t at = 0;
    float sum = 0;
  };
  std::vector<Reader> readers(static_cast<size_t>(threads));
  const double s = best_round(pool, seconds, [&](int t) {
    Reader& r = readers[size_t(t)];
    for (int64_t i = 0; i < pieces; ++i) {
      r.sum += kernels.rows->read_bytes(buffer.data() + t * stride + r.at, PIECE, ahead);
      r.at = r.at + PIECE < share ? r.at + PIECE : 0;
    }
  });
  return double(pieces * PIECE * threads) / s;
}

double probe_ops(const Kernels& kernels, int threads, int kind, double seconds) {
  Bound bound(threads);
  Pool& pool = bound.pool;
  struct alignas(64) Core {
    float sink = 0.5f;
    double best = 0;
  };
  std::vector<Core> cores(static_cast<size_t>(threads));
  // Cores share no unit: each one's own best counts, though the others were stopped meanwhile.
  best_round(pool, seconds, [&](int t) {
    Core& core = cores[size_t(t)];
    const double start = now();
    const int64_t ops = kernels.rows->peak(kind, 20'000, &core.sink);
    core.best = std::max(core.best, double(ops) / (now() - start));
  });
  double sum = 0;
  for (const Core& core : cores) sum += core.best;
  return sum;
}

double probe_barrier(int threads, double seconds) {
  constexpr int BARRIERS = 64;  // few: all within a time slice, even on a busy machine
  Bound bound(threads);
  Pool& pool = bound.pool;
  const double s = best_round(pool, seconds, [&](int) {
    for (int i = 0; i < BARRIERS; ++i) pool.barrier();
  });
  return threads > 1 ? s / BARRIERS : 0.0;
}

}  // namespace octavo
