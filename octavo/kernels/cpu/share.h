// Work split among the threads of a pool.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

namespace octavo {

// What has been taken of one thread's run: zeros before the first.
struct alignas(64) Taken {
  std::atomic<uint64_t> ends{0};  // units from the front, and from the back in the upper half
};

// Units 0..units, a run of neighbours for each thread. A thread takes from the front of its own run,
// half of what is left at a time; when that is done, likewise from the back of the run with the most
// left. So each reads long stretches of neighbours, and one that is slow, or has lost its processor,
// holds the others up by the piece it is at alone.
class Share {
 public:
  // taken: one for each thread. A piece has at least `grain` units, while there are as many.
  Share(Taken* taken, int64_t threads, int64_t units, int64_t grain)
      : taken_(taken), threads_(threads), units_(units), grain_(grain) {}

  // Calls fn(begin, end) until no unit is left for `thread`.
  template <class Fn>
  void run(int64_t thread, const Fn& fn) const {
    while (take(thread, false, fn)) {
    }
    for (int64_t victim = fullest(); victim >= 0; victim = fullest()) take(victim, true, fn);
  }

 private:
  static constexpr uint64_t BACK = uint64_t(1) << 32;

  int64_t begin(int64_t thread) const { return units_ * thread / threads_; }
  int64_t left(int64_t thread, uint64_t ends) const {
    return begin(thread + 1) - begin(thread) - int64_t(ends % BACK) - int64_t(ends / BACK);
  }

  template <class Fn>
  bool take(int64_t thread, bool back, const Fn& fn) const {
    std::atomic<uint64_t>& ends = taken_[thread].ends;
    uint64_t seen = ends.load(std::memory_order_relaxed);
    int64_t n;
    do {
      const int64_t rest = left(thread, seen);
      if (rest <= 0) return false;
      n = std::min(rest, std::max(grain_, rest / 2));
    } while (!ends.compare_exchange_weak(seen, seen + uint64_t(n) * (back ? BACK : 1),
                                         std::memory_order_relaxed));
    const int64_t first = back ? begin(thread + 1) - int64_t(seen / BACK) - n
                               : begin(thread) + int64_t(seen % BACK);
    fn(first, first + n);
    return true;
  }

  // The thread whose run has the most left; -1: none has any.
  int64_t fullest() const {
    int64_t most = 0, found = -1;
    for (int64_t i = 0; i < threads_; ++i) {
      const int64_t rest = left(i, taken_[i].ends.load(std::memory_order_relaxed));
      if (rest > most) most = rest, found = i;
    }
    return found;
  }

  Taken* taken_;
  int64_t threads_, units_, grain_;
};

}  // namespace octavo
