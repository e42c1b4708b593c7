// Python's view of what only experiments and benches run.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "attention_lab.h"
#include "isa.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Tensor = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Result = nb::ndarray<nb::numpy, float, nb::ndim<3>>;

template <class Attention>
double best_of(Attention& attention, float* out, double seconds) {
  using Clock = std::chrono::steady_clock;
  double best = 1e30;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  do {
    const auto start = Clock::now();
    attention.run(out);
    best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count());
  } while (Clock::now() < end);
  return best;
}

nb::tuple time_attention(Tensor q, Tensor k, Tensor v, bool naive, int threads, double seconds,
                         const std::string& isa) {
  const Kernels* kernels = find_isa(isa.c_str());
  if (kernels == nullptr) throw std::invalid_argument("no instruction set '" + isa + "' here");
  const size_t n = q.shape(0), heads = q.shape(1), kv = k.shape(1), dim = q.shape(2);
  if (k.shape(0) != n || v.shape(0) != n || k.shape(2) != dim || v.shape(2) != dim ||
      v.shape(1) != kv || kv == 0 || heads % kv != 0 || dim % 16 != 0 || dim > MAX_HEAD_DIM)
    throw std::invalid_argument("q [n, heads, dim], k and v [n, kv heads, dim]");
  const AttentionInput in{q.data(), k.data(), v.data(), int64_t(n),
                          {int32_t(heads), int32_t(kv), int32_t(dim)},
                          1.0f / __builtin_sqrtf(float(dim))};
  auto* out = new float[n * heads * dim];
  nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  std::memset(out, 0, n * heads * dim * 4);
  double best;
  size_t scratch;
  {
    nb::gil_scoped_release release;
    if (naive) {
      NaiveAttention a(*kernels->naive, in, threads);
      best = best_of(a, out, seconds);
      scratch = a.scratch_bytes();
    } else {
      FlashAttention a(*kernels->attention, *kernels->rows, in, threads);
      best = best_of(a, out, seconds);
      scratch = a.scratch_bytes();
    }
  }
  const size_t shape[] = {n, heads, dim};
  return nb::make_tuple(Result(out, 3, shape, owner), best, scratch);
}

}  // namespace

void bind_lab(nb::module_& m) {
  m.def("time_attention", &time_attention, "q"_a, "k"_a, "v"_a, "naive"_a, "threads"_a = 1,
        "seconds"_a = 0.0, "isa"_a = "auto",
        "Causal self-attention of q [n, heads, dim] over k, v [n, kv heads, dim] in bf16, our way\n"
        "or the naive way: (out [n, heads, dim], best seconds of runs for `seconds`, bytes of\n"
        "scratch). Packing the inputs and taking memory are not in the time.");
}

}  // namespace octavo
