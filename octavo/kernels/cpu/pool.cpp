#include "pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <new>

namespace octavo {
namespace {

// First spin, then spin and yield, so that a thread that has lost its processor to us gets it back,
// then sleep: waking a sleeper costs as much as a small phase. Between steps the driver schedules.
constexpr int64_t SPIN_NS = 20'000;
constexpr int64_t PHASE_YIELD_NS = 1'000'000;
constexpr int64_t JOB_YIELD_NS = 200'000;
constexpr int64_t CHORE_AFTER_NS = 3'000'000;  // asleep: longer than between two steps
constexpr int PAUSES_PER_CLOCK_READ = 64;

void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

long futex(std::atomic<uint32_t>* word, int op, uint32_t value, const timespec* most = nullptr) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op, value, most, nullptr, 0);
}

}  // namespace

void Gate::open() {
  // Sequentially consistent against wait(): either we see the sleeper or it sees the new value.
  word_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(&word_, FUTEX_WAKE_PRIVATE, INT_MAX);
}

bool Gate::wait(uint32_t old, int64_t yield_ns, int64_t sleep_ns) {
  for (int i = 0; i < PAUSES_PER_CLOCK_READ; ++i) {
    if (value() != old) return true;
    pause_cpu();
  }
  const int64_t start = now_ns();
  for (int64_t waited = 0; waited < yield_ns; waited = now_ns() - start) {
    if (waited > SPIN_NS) sched_yield();
    for (int i = 0; i < PAUSES_PER_CLOCK_READ; ++i) {
      if (value() != old) return true;
      pause_cpu();
    }
  }
  const timespec most = {0, long(sleep_ns)};
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  long slept = 0;
  while (word_.load(std::memory_order_seq_cst) == old && slept == 0) {
    slept = futex(&word_, FUTEX_WAIT_PRIVATE, old, sleep_ns > 0 ? &most : nullptr);
    if (slept != 0 && errno != ETIMEDOUT) slept = 0;
  }
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  return value() != old;
}

Pool::Pool(int threads, bool pin) : threads_(threads < 1 ? 1 : threads), pin_(pin) { start(); }

int Pool::affinity_count() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return CPU_COUNT(&set);
}

// Also called in a child after fork, where the old threads do not exist: their handles are dropped
// and the gates begin anew (a sleeper counted in the parent would never wake here).
void Pool::start() {
  owner_ = getpid();
  workers_.clear();
  new (&jobs_) Gate;
  new (&phase_) Gate;
  arrived_.store(0);
  stop_.store(false);
  workers_.reserve(size_t(threads_));
  cpu_set_t mask;
  pinned_ = pin_ && sched_getaffinity(0, sizeof mask, &mask) == 0 && CPU_COUNT(&mask) >= threads_;
  int cpu = -1;
  auto next_cpu = [&] {
    do ++cpu;
    while (!CPU_ISSET(cpu, &mask));
    return cpu;
  };
  if (pinned_) next_cpu();  // the first one is left to the caller
  for (int i = 1; i < threads_; ++i) {
    workers_.push_back({this, i, {}});
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    if (pinned_) {
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(next_cpu(), &one);
      pthread_attr_setaffinity_np(&attr, sizeof one, &one);
    }
    Worker& w = workers_.back();
    const int failed = pthread_create(&w.handle, &attr, &Pool::enter, &w);
    pthread_attr_destroy(&attr);
    if (failed) throw std::bad_alloc();
  }
}

Pool::~Pool() {
  if (getpid() != owner_) return;
  stop_.store(true);
  jobs_.open();
  for (Worker& w : workers_) pthread_join(w.handle, nullptr);
}

void* Pool::enter(void* worker) {
  auto* w = static_cast<Worker*>(worker);
  w->pool->work(w->index);
  return nullptr;
}

void Pool::work(int index) {
  uint32_t seen = 0;
  for (;;) {
    wait_for_job(index, seen);
    seen = jobs_.value();
    if (stop_.load()) return;
    job_(context_, index);
    barrier();
  }
}

void Pool::wait_for_job(int index, uint32_t seen) {
  if (const Chore chore = index == 1 ? chore_.load() : nullptr) {
    if (jobs_.wait(seen, JOB_YIELD_NS, CHORE_AFTER_NS)) return;
    while (chore(chore_context_.load()))
      if (jobs_.value() != seen) return;
  }
  jobs_.wait(seen, JOB_YIELD_NS);
}

void Pool::set_chore(Chore chore, void* context) {
  chore_context_.store(context);
  chore_.store(chore);
}

void Pool::run(Job job, void* context) {
  if (threads_ == 1) {
    job(context, 0);
    return;
  }
  if (getpid() != owner_) start();
  job_ = job;
  context_ = context;
  jobs_.open();
  job(context, 0);
  barrier();
}

void Pool::barrier() {
  if (threads_ == 1) return;
  const uint32_t generation = phase_.value();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.open();
  } else {
    phase_.wait(generation, PHASE_YIELD_NS);
  }
}

}  // namespace octavo
