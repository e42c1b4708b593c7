// Python's view of attention alone: for tests, and for benches.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "attend_step.h"
#include "isa.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Floats = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<nb::numpy, float, nb::ndim<3>>;

const Kernels& kernels_of(const std::string& isa) {
  const Kernels* k = find_isa(isa.c_str());
  if (k == nullptr) throw std::invalid_argument("instruction set not usable here: " + isa);
  return *k;
}

template <class Job>
void on_all(Pool& pool, Job& job) {
  pool.run([](void* f, int thread) { (*static_cast<Job*>(f))(thread); }, &job);
}

// One sequence whose keys and values go into a cache with shuffled blocks, where every other byte
// is 0xff (NaN in the floating formats and in scales); then its last n tokens attend.
Output attend(const Floats& q, const Floats& k, const Floats& v, double scale, int64_t window,
              int threads, const std::string& type, const std::string& isa) {
  const Kernels& kernels = kernels_of(isa);
  const HeadShape heads{int32_t(q.shape(1)), int32_t(k.shape(1)), int32_t(q.shape(2))};
  const int64_t n = int64_t(q.shape(0)), context = int64_t(k.shape(0)), dim = heads.head_dim;
  KvCache kv = KvCache::shape(2, heads, kv_type_named(type));
  const int64_t blocks = (context + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
  kv.num_blocks = blocks + 3;
  std::vector<uint8_t> cache(size_t(kv.num_blocks * kv.block_bytes + 64), 0xff);
  kv.data = cache.data() + (64 - reinterpret_cast<uintptr_t>(cache.data()) % 64) % 64;
  std::vector<int32_t> table;
  for (int64_t b = 0; b < blocks; ++b) table.push_back(int32_t((b * 7 + 3) % kv.num_blocks));
  if (kv.num_blocks % 7 == 0) std::iota(table.begin(), table.end(), 1);
  for (int64_t t = 0; t < context; ++t)
    for (int64_t h = 0; h < heads.num_kv_heads; ++h) {
      uint8_t* at = kv.at(table[size_t(t / BLOCK_TOKENS)], 1, h);
      const int64_t row = (t * heads.num_kv_heads + h) * dim, slot = t % BLOCK_TOKENS;
      kernels.rows->store_k(k.data() + row, dim, at, slot, kv.type);
      kernels.rows->store_v(v.data() + row, dim, 0, dim, at + kv.head_bytes / 2, slot, kv.type);
    }
  auto* data = new float[size_t(n * heads.num_heads * dim)]();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  Output out(data, {size_t(n), size_t(heads.num_heads), size_t(dim)}, owner);
  AttendPlan plan(heads, threads, context, n);
  const std::vector<StepRow> rows{{context - n, n, 0, table.data()}};
  plan.add_window(window);
  plan.plan(rows);
  std::atomic<int64_t> next{0};
  const AttendCall call{q.data(), data, heads.num_heads * dim, 1, window, float(scale)};
  Pool pool(threads, false);
  auto job = [&](int thread) { plan.run(*kernels.attention, kv, call, thread, next); };
  nb::gil_scoped_release release;
  on_all(pool, job);
  return out;
}

// Seconds of every call on `threads` threads, barrier included, of sequences of `context` tokens
// whose last n attend; call after call on another layer of the cache, so that it comes from memory.
std::vector<double> time_attend(const std::vector<int32_t>& shape, int64_t context, int64_t n,
                                int64_t batch, int64_t layers, int64_t window, int threads,
                                const std::string& type, const std::string& isa, double seconds) {
  const Kernels& kernels = kernels_of(isa);
  if (shape.size() != 3) throw std::invalid_argument("shape is (heads, kv heads, head dim)");
  if (n < 1 || n > context || batch < 1 || layers < 1)
    throw std::invalid_argument("1 <= n <= context, batch and layers are wanted");
  const HeadShape heads{shape[0], shape[1], shape[2]};
  KvCache kv = KvCache::shape(layers, heads, kv_type_named(type));
  const int64_t blocks = (context + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
  kv.num_blocks = blocks * batch;
  const Region memory(size_t(kv.num_blocks * kv.block_bytes));
  kv.data = memory.data();
  std::vector<int32_t> table(size_t(kv.num_blocks));
  std::iota(table.begin(), table.end(), 0);
  std::vector<StepRow> rows;
  for (int64_t i = 0; i < batch; ++i)
    rows.push_back({context - n, n, i * n, table.data() + i * blocks});
  const int64_t ld = int64_t(heads.num_heads) * heads.head_dim;
  std::vector<float> q(size_t(batch * n * ld)), out(q.size());
  for (size_t i = 0; i < q.size(); ++i) q[i] = float(i * 7 % 31) - 15.0f;
  AttendPlan plan(heads, threads, context, batch * n);
  plan.add_window(window);
  plan.plan(rows);
  Pool pool(threads, false);
  nb::gil_scoped_release release;
  const size_t share = memory.bytes() / size_t(threads);
  auto fill = [&](int t) { std::memset(kv.data + size_t(t) * share, 0x3c, share); };
  on_all(pool, fill);
  std::vector<std::atomic<int64_t>> next(static_cast<size_t>(layers));
  std::vector<double> times;
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  do {
    for (auto& counter : next) counter = 0;
    auto walk = [&](int thread) {
      for (int64_t layer = 0; layer < layers; ++layer) {
        const auto start = Clock::now();
        const AttendCall call{q.data(), out.data(), ld, layer, window, 0.01f};
        plan.run(*kernels.attention, kv, call, thread, next[size_t(layer)]);
        pool.barrier();
        if (thread == 0)
          times.push_back(std::chrono::duration<double>(Clock::now() - start).count());
      }
    };
    on_all(pool, walk);
  } while (Clock::now() < end);
  return times;
}

}  // namespace

void bind_attend(nb::module_& m) {
  m.def("attend", &attend, "q"_a, "k"_a, "v"_a, "scale"_a, "window"_a = 0, "threads"_a = 1,
        "kv"_a = "bf16", "isa"_a = "auto",
        "One sequence: the last n of its tokens, q [n, heads, dim], attend to k and v\n"
        "[context, kv heads, dim], kept as bf16, fp32 or int8.");
  m.def("time_attend", &time_attend, "shape"_a, "context"_a, "n"_a = 1, "batch"_a = 1,
        "layers"_a = 1, "window"_a = 0, "threads"_a = 1, "kv"_a = "bf16", "isa"_a = "auto",
        "seconds"_a = 0.1,
        "For benches: seconds of each call, barrier included, in which the last n tokens of\n"
        "`batch` sequences of `context` tokens attend, going round the layers of a cache.\n"
        "shape: heads, kv heads, head dim.");
}

}  // namespace octavo
