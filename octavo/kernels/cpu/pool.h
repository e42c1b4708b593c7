// A pool of compute threads for short phases. The caller is thread 0; the others spin briefly
// between jobs and then sleep in a futex. One thread means no synchronisation at all.
#pragma once
#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace octavo {

// A word that threads wait on: spin, then yield, then sleep.
class Gate {
 public:
  uint32_t value() const { return word_.load(std::memory_order_acquire); }
  void open();                                // advances the value, wakes who sleeps
  // Returns true once value() != old; sleeps after yield_ns, for at most sleep_ns if that is not 0.
  bool wait(uint32_t old, int64_t yield_ns, int64_t sleep_ns = 0);

 private:
  alignas(64) std::atomic<uint32_t> word_{0};
  alignas(64) std::atomic<int32_t> sleepers_{0};
};

class Pool {
 public:
  using Job = void (*)(void* context, int thread);

  // pin: bind worker i to the i-th processor of the affinity mask; done only if it has >= threads.
  Pool(int threads, bool pin);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }
  bool pinned() const { return pinned_; }

  // Runs job(context, i) for every thread i and returns when all have. Not reentrant.
  void run(Job job, void* context);

  // What one worker does in small pieces while there is no job; false: no more until a job has run.
  // It delays a job that comes meanwhile by what is left of a piece. Set before the first job.
  using Chore = bool (*)(void* context);
  void set_chore(Chore chore, void* context);

  // Inside a job: all threads of the pool wait for each other.
  void barrier();

  static int affinity_count();  // processors this process may run on

 private:
  struct Worker {
    Pool* pool;
    int index;
    pthread_t handle;
  };
  static void* enter(void* worker);
  void work(int index);
  void wait_for_job(int index, uint32_t seen);
  void start();

  const int threads_;
  const bool pin_;
  bool pinned_ = false;
  pid_t owner_ = -1;  // the process whose threads these are: after a fork the child has none
  std::vector<Worker> workers_;
  Job job_ = nullptr;
  void* context_ = nullptr;
  std::atomic<Chore> chore_{nullptr};
  std::atomic<void*> chore_context_{nullptr};
  std::atomic<bool> stop_{false};
  Gate jobs_;
  Gate phase_;
  alignas(64) std::atomic<int32_t> arrived_{0};
};

}  // namespace octavo
