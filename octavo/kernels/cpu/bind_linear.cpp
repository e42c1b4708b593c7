// Python's view of packing and of `linear`: handles for the executor, and calls for the tests.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "isa.h"
#include "linear.h"
#include "pack.h"
#include "pool.h"
#include "rowops.h"

namespace nb = nanobind;

namespace octavo {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<nb::numpy, float, nb::ndim<2>, nb::c_contig>;

const Kernels& kernels(const std::string& isa) {
  const Kernels* k = find_isa(isa.c_str());
  if (k == nullptr) throw nb::value_error(("no instruction set '" + isa + "' here").c_str());
  return *k;
}

const LinearTable& table(const std::string& isa) { return *kernels(isa).linear; }

template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<2>, nb::c_contig> array2(T* data, int64_t rows, int64_t cols) {
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return {data, {static_cast<size_t>(rows), static_cast<size_t>(cols)}, owner};
}

WType checked_type(int type) {
  if (type_name(type) == nullptr)
    throw nb::value_error(("tensor type " + std::to_string(type) + " cannot be packed").c_str());
  return static_cast<WType>(type);
}

Packed pack_rows(int type, Bytes data, int64_t rows, int64_t cols, int64_t permute_heads,
                 int threads) {
  const Source source = {checked_type(type), data.data(), rows, cols, permute_heads};
  const size_t row = row_bytes(source.type, cols);  // refuses a k that the type cannot have
  if (rows < 1 || data.size() / row != static_cast<size_t>(rows) || data.size() % row != 0)
    throw nb::value_error((std::to_string(rows) + " rows of " + type_name(type) + " need " +
                           std::to_string(row) + " bytes each, not " +
                           std::to_string(data.size()) + " in all").c_str());
  nb::gil_scoped_release release;
  return pack(source, threads);
}

nb::bytes unpack_rows(const Packed& p) {
  const size_t size = static_cast<size_t>(p.weight.n) * row_bytes(p.weight.type, p.weight.k);
  nb::bytes out = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, Py_ssize_t(size)));
  if (!out.is_valid()) throw nb::python_error();
  unpack(p.weight, reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(out.ptr())));
  return out;
}

// Memory for prepared activations, 64-byte aligned.
struct ActsMemory {
  Acts acts;
  void* memory;
  ActsMemory(int64_t rows, int64_t k, uint32_t needs) {
    memory = std::aligned_alloc(64, acts_bytes(rows, k, needs) + 64);
    if (memory == nullptr) throw std::bad_alloc();
    acts = acts_at(memory, rows, k, needs);
  }
  ~ActsMemory() { std::free(memory); }
  ActsMemory(const ActsMemory&) = delete;
  ActsMemory& operator=(const ActsMemory&) = delete;
};


// The forms of activations that a name of --act means for a type of weight.
uint32_t forms(const LinearTable& t, WType type, const std::string& act) {
  if (act == "int8") return t.needs(type, Products::INT8);
  if (act == "bf16") return t.needs(type, Products::BF16);
  if (act == "fp32") return t.needs(type, Products::F32);
  if (act == "mixed") return t.needs(type, Products::MIXED);
  if (act == "pairs") return t.needs(type, Products::PAIRS);
  throw nb::value_error(("no activations '" + act + "'").c_str());
}

Floats multiply(const Packed& p, Matrix x, const std::string& isa, const std::string& act,
                std::optional<std::tuple<int64_t, int64_t, int64_t, int64_t>> part) {
  const PackedWeight& w = p.weight;
  const LinearTable& t = table(isa);
  const int64_t rows = static_cast<int64_t>(x.shape(0));
  if (static_cast<int64_t>(x.shape(1)) != w.k) throw nb::value_error("x does not have k columns");
  const auto [p0, p1, r0, r1] = part.value_or(std::tuple{int64_t{0}, w.panels, int64_t{0}, rows});
  if (p0 < 0 || p1 < p0 || p1 > w.panels || r0 < 0 || r1 < r0 || r1 > rows)
    throw nb::value_error("panels or rows out of range");
  const int64_t ld = (p1 - p0) * 16;
  const int64_t n = std::max<int64_t>(0, std::min(p1 * 16, w.n) - p0 * 16);
  const uint32_t needs = forms(t, w.type, act);
  float* full = new float[static_cast<size_t>((r1 - r0) * ld)];
  float* out = new float[static_cast<size_t>((r1 - r0) * n)];
  {
    nb::gil_scoped_release release;
    ActsMemory m(rows, w.k, needs);
    t.prepare(m.acts, {0, rows, 0, m.acts.blocks}, x.data(), w.k);
    t.linear(w, p0, p1, m.acts, r0, r1, full, ld);
    for (int64_t r = 0; r < r1 - r0; ++r)
      std::copy_n(full + r * ld, n, out + r * n);
  }
  delete[] full;
  return array2(out, r1 - r0, n);
}

// x as one of the int8 forms holds it: quants [rows, k], scales [rows, ceil(k / 32)] and the wide
// quads' bits, likewise.
nb::tuple quantise(Matrix x, const std::string& isa, const std::string& act) {
  const LinearTable& t = table(isa);
  const int64_t rows = static_cast<int64_t>(x.shape(0)), k = static_cast<int64_t>(x.shape(1));
  const int64_t blocks = (k + 31) / 32;
  ActsMemory m(rows, k, forms(t, WType::Q8_0, act) & (ACT_A8 | ACT_PAIR | ACT_WIDE));
  const bool pair = m.acts.needs & ACT_PAIR;
  if (!(m.acts.needs & ACT_A8)) throw nb::value_error("these activations are not int8");
  int32_t* q = new int32_t[static_cast<size_t>(rows * k)];
  float* d = new float[static_cast<size_t>(rows * blocks)];
  int32_t* wide = new int32_t[static_cast<size_t>(rows * blocks)];
  const Acts& a = m.acts;
  t.prepare(a, {0, rows, 0, a.blocks}, x.data(), k);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t at = (r / a.group * a.blocks + b) * a.group + r % a.group;
      d[r * blocks + b] = a.d[at];
      wide[r * blocks + b] = pair ? a.wide[at] : 0;
      const int8_t* low = a.q + (pair ? at / a.group * 2 * a.group + r % a.group : at) * 32;
      for (int64_t i = b * 32; i < std::min(k, b * 32 + 32); ++i)
        q[r * k + i] = low[i % 32] + (pair ? 256 * low[a.group * 32 + i % 32] : 0);
    }
  }
  return nb::make_tuple(array2(q, rows, k), array2(d, rows, blocks), array2(wide, rows, blocks));
}

Floats embed(const Packed& p, int64_t id, float scale, const std::string& isa) {
  if (id < 0 || id >= p.weight.n) throw nb::index_error("no such row");
  float* out = new float[static_cast<size_t>(p.weight.k)];
  table(isa).embed_row(p.weight, id, scale, out);
  return array2(out, 1, p.weight.k);
}

// Rows as real activations are: near normal, and one value in 64 ten times as large.
void prepare_drawn(const LinearTable& t, const Acts& acts) {
  uint32_t state = 20260229;
  auto draw = [&] { return (state = state * 1664525 + 1013904223) >> 8; };
  std::vector<float> x(static_cast<size_t>(acts.k));
  for (int64_t r = 0; r < acts.rows; ++r) {
    for (float& v : x) {
      v = -2.0f;
      for (int i = 0; i < 4; ++i) v += static_cast<float>(draw()) * 0x1p-24f;
      if (draw() % 64 == 0) v *= 10.0f;
    }
    t.prepare(acts, {r, r + 1, 0, acts.blocks}, x.data(), acts.k);
  }
}

// Has each of `threads` threads call fn(panel0, panel1) again and again, `panels` at a time,
// through its share of the weight. Per thread, the 5th percentile of the seconds of a call, so that
// a busy neighbour does not count.
template <class Fn>
std::vector<double> time_shares(const PackedWeight& w, int64_t panels, int threads, double seconds,
                                const Fn& fn) {
  if (panels < 1 || threads < 1 || panels > w.panels / threads)
    throw std::invalid_argument("panels and threads must fit the weight");
  using Clock = std::chrono::steady_clock;
  std::vector<double> result(static_cast<size_t>(threads));
  std::vector<std::jthread> workers;
  auto work = [&](int64_t i) {
    const int64_t share = w.panels / threads;
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    std::vector<double> times;
    for (int64_t at = 0; times.empty() || Clock::now() < end; at += panels) {
      if (at + panels > share) at = 0;
      const auto start = Clock::now();
      fn(i * share + at, i * share + at + panels);
      times.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    }
    std::sort(times.begin(), times.end());
    result[static_cast<size_t>(i)] = times[times.size() / 20];
  };
  for (int64_t i = 0; i < threads; ++i) workers.emplace_back(work, i);
  workers.clear();
  return result;
}

std::vector<double> time_linear(const Packed& p, int64_t rows, int64_t panels, int threads,
                                double seconds, const std::string& isa,
                                const std::string& act) {
  const PackedWeight& w = p.weight;
  const LinearTable& t = table(isa);
  if (rows < 1) throw nb::value_error("no rows");
  const uint32_t needs = forms(t, w.type, act);
  nb::gil_scoped_release release;
  ActsMemory m(rows, w.k, needs);
  prepare_drawn(t, m.acts);
  return time_shares(w, panels, threads, seconds, [&](int64_t p0, int64_t p1) {
    static thread_local std::vector<float> out;
    out.resize(static_cast<size_t>(rows * panels * 16));
    t.linear(w, p0, p1, m.acts, 0, rows, out.data(), panels * 16);
  });
}

std::vector<double> time_reads(const Packed& p, int64_t panels, int threads, double seconds,
                               const std::string& isa) {
  const PackedWeight& w = p.weight;
  const RowTable& rows = *kernels(isa).rows;
  nb::gil_scoped_release release;
  return time_shares(w, panels, threads, seconds, [&](int64_t p0, int64_t p1) {
    static thread_local volatile float sink = 0;
    sink = sink + rows.read_bytes(w.data + p0 * w.panel_bytes, (p1 - p0) * w.panel_bytes / 256 * 256,
                           READ_AHEAD);
  });
}

// Has `threads` threads pass all weights one after the other, each its share of the panels, as a
// step does that computes nothing else: seconds of each of `passes` passes. rows = 0 only reads.
// Products go into a small tile, as they do where an op uses them at once.
std::vector<double> time_stream(const std::vector<const Packed*>& weights, int64_t rows,
                                int passes, int threads, const std::string& isa,
                                const std::string& act) {
  const LinearTable& t = table(isa);
  const RowTable& read = *kernels(isa).rows;
  if (rows < 0 || threads < 1 || passes < 1) throw nb::value_error("rows, threads or passes");
  using Clock = std::chrono::steady_clock;
  std::map<std::pair<int64_t, uint32_t>, ActsMemory> acts;
  for (const Packed* p : weights) {
    const uint32_t needs = forms(t, p->weight.type, act);
    const int64_t k = p->weight.k;
    const auto [at, fresh] = acts.try_emplace({k, needs}, std::max<int64_t>(1, rows), k, needs);
    if (fresh && rows > 0) prepare_drawn(t, at->second.acts);
  }
  constexpr int64_t tile_floats = 32 << 10;
  const int64_t width = std::max<int64_t>(1, tile_floats / (std::max<int64_t>(1, rows) * 16));
  const int64_t tile = std::max<int64_t>(1, rows) * width * 16;
  std::vector<float> out(static_cast<size_t>(tile * threads));
  auto pass = [&](int thread) {
    for (const Packed* p : weights) {
      const PackedWeight& w = p->weight;
      const int64_t p0 = w.panels * thread / threads, p1 = w.panels * (thread + 1) / threads;
      if (rows == 0) {
        static thread_local volatile float sink = 0;
        sink = sink + read.read_bytes(w.data + p0 * w.panel_bytes,
                                      (p1 - p0) * w.panel_bytes / 256 * 256, READ_AHEAD);
        continue;
      }
      const Acts& a = acts.at({w.k, forms(t, w.type, act)}).acts;
      for (int64_t p = p0; p < p1; p += width)
        t.linear(w, p, std::min(p + width, p1), a, 0, rows, out.data() + tile * thread, width * 16);
    }
  };
  nb::gil_scoped_release release;
  Pool pool(threads, false);
  std::vector<double> seconds;
  for (int i = 0; i < passes; ++i) {
    const auto start = Clock::now();
    pool.run([](void* f, int thread) { (*static_cast<decltype(pass)*>(f))(thread); }, &pass);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  return seconds;
}

}  // namespace

void bind_linear(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Packed>(m, "PackedWeight", "A weight matrix in the kernels' layout (pack.h).")
      .def_prop_ro("type", [](const Packed& p) { return static_cast<int>(p.weight.type); })
      .def_prop_ro("n", [](const Packed& p) { return p.weight.n; })
      .def_prop_ro("k", [](const Packed& p) { return p.weight.k; })
      .def_prop_ro("panels", [](const Packed& p) { return p.weight.panels; })
      .def_prop_ro("nbytes",
                   [](const Packed& p) { return p.weight.panels * p.weight.panel_bytes; });
  m.def("pack", &pack_rows, "type"_a, "data"_a, "rows"_a, "cols"_a, "permute_heads"_a = 0,
        "threads"_a = 1,
        "Packs rows x cols weights of a ggml type from the bytes of their file, lossless.\n"
        "Raises ValueError for a type or a width that cannot be packed, naming it.");
  m.def("unpack", &unpack_rows, "weight"_a, "The rows in the format of their file.");
  nb::enum_<Products>(m, "Products", "How quantised weights are multiplied.")
      .value("INT8", Products::INT8)
      .value("MIXED", Products::MIXED)
      .value("PAIRS", Products::PAIRS)
      .value("BF16", Products::BF16)
      .value("F32", Products::F32);
  m.def("linear", &multiply, "weight"_a, "x"_a, "isa"_a = "auto", "act"_a = "int8",
        "part"_a = nb::none(),
        "x [T, k] times the weight's rows: float32 [T, n]. act: int8, mixed, pairs, bf16 or fp32.\n"
        "part = (panel0, panel1, row0, row1) computes only these. One thread.");
  m.def("time_linear", &time_linear, "weight"_a, "rows"_a, "panels"_a, "threads"_a = 1,
        "seconds"_a = 0.1, "isa"_a = "auto", "act"_a = "int8",
        "For benches: seconds that each of `threads` threads takes to multiply `rows` rows by\n"
        "`panels` panels, going round its own share of the weight.");
  m.def("time_reads", &time_reads, "weight"_a, "panels"_a, "threads"_a = 1, "seconds"_a = 0.1,
        "isa"_a = "auto", "Its ceiling: the same to only read the panels.");
  m.def("time_stream", &time_stream, "weights"_a, "rows"_a, "passes"_a, "threads"_a = 1,
        "isa"_a = "auto", "act"_a = "int8",
        "For benches: seconds of each pass of all threads through all the weights in turn, as a\n"
        "step reads them; rows = 0 only reads.");
  m.def("quantise", &quantise, "x"_a, "isa"_a = "auto", "act"_a = "int8",
        "x as the products of int8, mixed or pairs see it: quants [T, k], scales [T, ceil(k / 32)]\n"
        "and which quads of a block are wide, bit by bit, likewise.");
  m.def("embed_row", &embed, "weight"_a, "id"_a, "scale"_a = 1.0f, "isa"_a = "auto",
        "Row `id` dequantised and scaled, float32 [1, k].");
}

}  // namespace octavo
