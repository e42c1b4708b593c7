// Python's view of the executor, and of single kernels for tests.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "executor.h"
#include "pack.h"
#include "probe.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<nb::numpy, float>;

// A contiguous buffer of int32, held for the length of a call.
class Ints {
 public:
  explicit Ints(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS) != 0) throw nb::python_error();
    if (view_.len % 4 != 0) {
      PyBuffer_Release(&view_);
      throw std::invalid_argument("a buffer of int32 is expected");
    }
  }
  ~Ints() { PyBuffer_Release(&view_); }
  Ints(const Ints&) = delete;
  Ints& operator=(const Ints&) = delete;
  const int32_t* data() const { return static_cast<const int32_t*>(view_.buf); }
  int64_t size() const { return view_.len / 4; }

 private:
  Py_buffer view_;
};

template <class T = float>
nb::ndarray<nb::numpy, T> new_output(std::vector<size_t> shape) {
  size_t n = 1;
  for (size_t s : shape) n *= s;
  auto* data = new T[n]();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return {data, shape.size(), shape.data(), owner};
}

const Kernels& kernels_of(const std::string& isa) {
  const Kernels* k = find_isa(isa.c_str());
  if (k == nullptr) throw std::invalid_argument("instruction set not usable here: " + isa);
  return *k;
}

// --- The executor ---

struct OpName {
  const char* name;
  OpKind kind;
};
constexpr OpName OP_NAMES[NUM_OP_KINDS] = {
    {"embed", OpKind::Embed},
    {"norm_qkv", OpKind::NormQkv},
    {"select", OpKind::Select},
    {"attend", OpKind::Attend},
    {"out_residual", OpKind::OutResidual},
    {"norm_gate_up_act", OpKind::NormGateUpAct},
    {"down_residual", OpKind::DownResidual},
    {"final_norm_head", OpKind::FinalNormHead},
};

// The packed weights that an executor points into must outlive it.
struct BoundExecutor {
  Executor executor;
  std::vector<Packed> weights;
  explicit BoundExecutor(const ExecutorConfig& config) : executor(config) {}
};

void add_op(BoundExecutor& self, const std::string& name, const std::vector<int32_t>& inputs,
            int32_t out, const std::vector<Packed*>& weights,
            const std::map<std::string, Floats>& vectors,
            const std::map<std::string, double>& numbers) {
  OpSpec op{};
  const OpName* known = std::find_if(std::begin(OP_NAMES), std::end(OP_NAMES),
                                     [&](const OpName& n) { return name == n.name; });
  if (known == std::end(OP_NAMES)) throw std::invalid_argument("no op is called " + name);
  op.kind = known->kind;
  op.x = inputs.at(0);
  op.residual = inputs.size() > 1 ? inputs[1] : -1;
  op.out = out;
  for (const Packed* w : weights) {
    self.weights.push_back(*w);
    op.weights.push_back(w->weight);
  }
  auto vector = [&](const char* key) -> const float* {
    auto at = vectors.find(key);
    if (at == vectors.end()) return nullptr;
    return self.executor.keep_vector(at->second.data(), int64_t(at->second.size()));
  };
  auto number = [&](const char* key, double otherwise) {
    auto at = numbers.find(key);
    return at == numbers.end() ? otherwise : at->second;
  };
  op.norm = vector("norm");
  op.post_norm = vector("post_norm");
  op.bias = vector("bias");
  op.q_norm = vector("q_norm");
  op.k_norm = vector("k_norm");
  op.layer = int64_t(number("layer", 0));
  op.rope = int64_t(number("rope", 0));
  op.window = int64_t(number("window", 0));
  op.eps = float(number("eps", 0));
  op.scale = float(number("scale", 1));
  op.wide = number("wide", 0) != 0;
  op.wanted = number("wanted", 0) != 0;
  op.act = number("gelu_tanh", 0) != 0 ? Act::GeluTanh : Act::Silu;
  self.executor.add_op(std::move(op));
}

// Returns the samples, and (row, first position) of each row whose keys or values were not finite.
nb::tuple run(BoundExecutor& self, nb::handle rows, nb::handle tokens, nb::handle tables,
              nb::handle wanted, const nb::bytes& samples, nb::handle data,
              std::optional<Matrix> logits, bool eager, std::optional<Matrix> normed) {
  const Ints r(rows), t(tokens), b(tables), w(wanted), d(data);
  if (r.size() % 4 != 0 || samples.size() != size_t(w.size()) * sizeof(SampleRow))
    throw std::invalid_argument("rows must be fours, and samples one record per wanted token");
  std::vector<SampleRow> specs(size_t(w.size()));
  if (!specs.empty()) std::memcpy(specs.data(), samples.data(), samples.size());
  if (const char* wrong = link_sample_rows(specs.data(), w.size(), d.data(), d.size()))
    throw std::invalid_argument(wrong);
  if (logits && (int64_t(logits->shape(0)) != w.size() ||
                 int64_t(logits->shape(1)) != self.executor.config().vocab))
    throw std::invalid_argument("logits must be float32 [wanted, vocab]");
  if (normed && (int64_t(normed->shape(0)) != w.size() ||
                 int64_t(normed->shape(1)) != self.executor.config().hidden))
    throw std::invalid_argument("normed must be float32 [wanted, hidden]");
  const StepInput step{r.data(), r.size() / 4, t.data(), t.size(),    b.data(),
                       b.size(), w.data(),     w.size(), specs.data()};
  std::vector<SampleOut> out(specs.size());
  std::vector<int32_t> broken(size_t(r.size() / 4), WHOLE);
  const StepOutput into{out.data(), broken.data(), logits ? logits->data() : nullptr,
                        normed ? normed->data() : nullptr};
  const char* wrong;
  {
    nb::gil_scoped_release release;
    wrong = eager ? self.executor.run_eagerly(step, into) : self.executor.run(step, into);
  }
  if (wrong != nullptr) throw std::invalid_argument(wrong);
  nb::list rows_broken;
  for (size_t i = 0; i < broken.size(); ++i)
    if (broken[i] != WHOLE) rows_broken.append(nb::make_tuple(i, broken[i]));
  return nb::make_tuple(nb::bytes(out.data(), out.size() * sizeof(SampleOut)), rows_broken);
}

nb::dict timing(const BoundExecutor& self) {
  const Executor& e = self.executor;
  std::map<OpKind, int64_t> kinds;
  int64_t waited = 0;
  const int64_t n = e.num_instructions(), sample = n - 2;
  for (int64_t i = 0; i < n; ++i) {
    const Executor::Spent& s = e.spent(0, i);
    waited += s.wait_ns;
    if (i < n - 1) kinds[i < sample ? e.kind_of(i) : OpKind::FinalNormHead] += s.busy_ns + s.wait_ns;
  }
  nb::dict d;
  d["steps"] = e.timed_steps();
  d["total"] = double(e.timed_ns()) * 1e-9;
  for (const OpName& name : OP_NAMES) d[name.name] = double(kinds[name.kind]) * 1e-9;
  d["sample"] = double(e.spent(0, sample).busy_ns + e.spent(0, sample).wait_ns) * 1e-9;
  d["wait"] = double(waited) * 1e-9;
  return d;
}

// (busy, waiting, barriers), each [threads][instructions], times in seconds; Executor::Spent.
nb::tuple spent(const BoundExecutor& self, int threads) {
  const size_t n = size_t(self.executor.num_instructions());
  auto busy = new_output<double>({size_t(threads), n});
  auto wait = new_output<double>({size_t(threads), n});
  auto barriers = new_output<double>({size_t(threads), n});
  for (size_t t = 0; t < size_t(threads); ++t)
    for (size_t i = 0; i < n; ++i) {
      const Executor::Spent& s = self.executor.spent(int(t), int64_t(i));
      busy.data()[t * n + i] = double(s.busy_ns) * 1e-9;
      wait.data()[t * n + i] = double(s.wait_ns) * 1e-9;
      barriers.data()[t * n + i] = double(s.barriers);
    }
  return nb::make_tuple(busy, wait, barriers);
}

nb::dict memory(const BoundExecutor& self) {
  const Executor::Memory m = self.executor.memory();
  nb::dict d;
  d["kv"] = m.kv;
  d["arena"] = m.arena;
  d["scratch"] = m.scratch;
  d["vectors"] = m.vectors;
  return d;
}

// --- Single kernels, for tests ---

Output rms_norm(const Floats& x, const Floats& w, double eps, const std::string& isa) {
  Output out = new_output({x.size()});
  kernels_of(isa).rows->rms_norm(x.data(), w.data(), int64_t(x.size()), float(eps), out.data());
  return out;
}

Output act_mul(const std::string& act, const Floats& gate, const Floats& up,
               const std::string& isa) {
  Output out = new_output({gate.size()});
  const Act kind = act == "silu" ? Act::Silu : Act::GeluTanh;
  kernels_of(isa).rows->act_mul(kind, gate.data(), up.data(), int64_t(gate.size()), out.data());
  return out;
}

Output rope(const Floats& x, const Floats& cos, const Floats& sin, const std::string& isa) {
  Output out = new_output({x.size()});
  std::copy(x.data(), x.data() + x.size(), out.data());
  kernels_of(isa).rows->rope(out.data(), cos.data(), sin.data(), int64_t(cos.size()));
  return out;
}

// Runs `jobs` jobs of `phases` phases, in each of which every thread checks that all others have
// finished the phase before. Returns (violations, seconds).
nb::tuple exercise_pool(int threads, bool pin, int64_t jobs, int64_t phases) {
  Pool pool(threads, pin);
  struct Shared {
    Pool* pool;
    int64_t phases;
    std::atomic<int64_t> arrived{0}, violations{0};
  } shared{&pool, phases};
  timespec begin, end;
  {
    nb::gil_scoped_release release;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int64_t j = 0; j < jobs; ++j) {
      shared.arrived = 0;
      pool.run(
          [](void* context, int) {
            auto* s = static_cast<Shared*>(context);
            const int64_t n = s->pool->threads();
            for (int64_t p = 0; p < s->phases; ++p) {
              if (s->arrived.load() < p * n) ++s->violations;
              ++s->arrived;
              s->pool->barrier();
            }
          },
          &shared);
      if (shared.arrived != phases * threads) ++shared.violations;
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
  }
  const double s = double(end.tv_sec - begin.tv_sec) + double(end.tv_nsec - begin.tv_nsec) * 1e-9;
  return nb::make_tuple(shared.violations.load(), s);
}

// Shares `units` units out; the first `absent` threads never come. Returns every piece that was
// taken: (thread, begin, end).
nb::list exercise_share(int threads, int64_t units, int64_t grain, int absent) {
  using Piece = std::array<int64_t, 3>;
  struct Shared {
    std::vector<Taken> taken;
    Share share;
    int absent;
    std::vector<std::vector<Piece>> pieces;  // of each thread
  };
  std::vector<Taken> taken(static_cast<size_t>(threads));
  const Share share(taken.data(), threads, units, grain);
  Shared shared{std::move(taken), share, absent, {}};
  shared.pieces.resize(size_t(threads));
  {
    nb::gil_scoped_release release;
    Pool pool(threads, false);
    pool.run(
        [](void* context, int thread) {
          auto* s = static_cast<Shared*>(context);
          if (thread < s->absent) return;
          s->share.run(thread, [&](int64_t begin, int64_t end) {
            s->pieces[size_t(thread)].push_back({thread, begin, end});
          });
        },
        &shared);
  }
  nb::list all;
  for (const auto& pieces : shared.pieces)
    for (const Piece& p : pieces) all.append(nb::make_tuple(p[0], p[1], p[2]));
  return all;
}

// Finite values into the first `blocks` blocks of the cache, for benches without a prefill.
void fill_kv(BoundExecutor& self, int64_t blocks) {
  const KvCache& kv = self.executor.kv();
  if (blocks < 0 || blocks > kv.num_blocks) throw std::invalid_argument("no such blocks");
  std::memset(kv.data, 0x3c, size_t(blocks * kv.block_bytes));  // bf16, float: about a hundredth
}

}  // namespace

void bind_executor(nb::module_& m) {
  nb::class_<HeadShape>(m, "HeadShape")
      .def("__init__", [](HeadShape* self, int q, int kv, int dim) {
        new (self) HeadShape{q, kv, dim};
      });
  nb::class_<ExecutorConfig>(m, "ExecutorConfig")
      .def(nb::init<>())
      .def_rw("isa", &ExecutorConfig::isa)
      .def_rw("threads", &ExecutorConfig::threads)
      .def_rw("pin", &ExecutorConfig::pin)
      .def_rw("products", &ExecutorConfig::products)
      .def_prop_rw(
          "kv_type",
          [](const ExecutorConfig& c) { return std::string(kv_type_name(c.kv_type)); },
          [](ExecutorConfig& c, const std::string& name) { c.kv_type = kv_type_named(name); })
      .def_rw("max_tokens", &ExecutorConfig::max_tokens)
      .def_rw("max_outputs", &ExecutorConfig::max_outputs)
      .def_rw("max_context", &ExecutorConfig::max_context)
      .def_rw("num_layers", &ExecutorConfig::num_layers)
      .def_rw("num_blocks", &ExecutorConfig::num_blocks)
      .def_rw("hidden", &ExecutorConfig::hidden)
      .def_rw("vocab", &ExecutorConfig::vocab)
      .def_rw("heads", &ExecutorConfig::heads);
  nb::class_<BoundExecutor>(m, "Executor")
      .def(nb::init<const ExecutorConfig&>())
      .def("add_rope", [](BoundExecutor& s, std::vector<double> f) {
        return s.executor.add_rope(std::move(f));
      })
      .def("add_value", [](BoundExecutor& s, int64_t t, int64_t n, int64_t c, int64_t ld) {
        s.executor.add_value({t, n, c, ld});
      })
      .def("add_op", &add_op)
      .def("finish", [](BoundExecutor& s, int64_t bytes) { s.executor.finish(bytes); })
      .def("run", &run, "rows"_a, "tokens"_a, "tables"_a, "wanted"_a, "samples"_a, "data"_a,
           "logits"_a = nb::none(), "eager"_a = false, "normed"_a = nb::none())
      .def("timing", &timing)
      .def("spent", [](BoundExecutor& s) { return spent(s, s.executor.pool().threads()); })
      .def("reset_timing", [](BoundExecutor& s) { s.executor.reset_timing(); })
      .def("fill_kv", &fill_kv, "blocks"_a)
      .def("memory", &memory)
      .def_prop_ro("isa", [](const BoundExecutor& s) {
        return std::string(const_cast<BoundExecutor&>(s).executor.kernels().name);
      })
      .def_prop_ro("threads", [](BoundExecutor& s) { return s.executor.pool().threads(); });
  m.def("rms_norm", &rms_norm, "x"_a, "w"_a, "eps"_a, "isa"_a = "auto");
  m.def("act_mul", &act_mul, "act"_a, "gate"_a, "up"_a, "isa"_a = "auto");
  m.def("rope", &rope, "x"_a, "cos"_a, "sin"_a, "isa"_a = "auto");
  m.def("exercise_pool", &exercise_pool, "threads"_a, "pin"_a, "jobs"_a, "phases"_a);
  m.def("probe_read",
        [](int threads, int64_t share, int64_t round, int64_t ahead, double seconds,
           const std::string& isa) {
          nb::gil_scoped_release release;
          return probe_read(kernels_of(isa), threads, share, round, ahead, seconds);
        },
        "threads"_a, "share"_a, "round"_a, "ahead"_a, "seconds"_a, "isa"_a = "auto",
        "Bytes a second that all threads read together: the best of many short rounds in which\n"
        "each reads the next `round` bytes of its own `share` bytes, prefetching `ahead` bytes ahead (0: not).");
  m.def("probe_ops",
        [](int threads, int kind, double seconds, const std::string& isa) {
          if (kind < 0 || kind > 4)
            throw std::invalid_argument("0 int8, 1 bf16, 2 f32, 3 int8 scaled, 4 with minima");
          nb::gil_scoped_release release;
          return probe_ops(kernels_of(isa), threads, kind, seconds);
        },
        "threads"_a, "kind"_a, "seconds"_a, "isa"_a = "auto",
        "Operations a second (a multiply-add is two); kind: 0 int8 products, 1 bf16, 2 f32;\n"
        "what of 0 remains where each 32 need a float multiply-add for a scale: 3, or two: 4.");
  m.def("probe_barrier",
        [](int threads, double seconds) {
          nb::gil_scoped_release release;
          return probe_barrier(threads, seconds);
        },
        "threads"_a, "seconds"_a, "Seconds of a barrier at which nobody is late, at best.");
  m.def("exercise_share", &exercise_share, "threads"_a, "units"_a, "grain"_a, "absent"_a = 0,
        "For tests: the pieces (thread, begin, end) in which threads took so many units, of whom\n"
        "the first `absent` never came.");
  m.def("affinity_count", &Pool::affinity_count, "Processors this process may run on.");
}

}  // namespace octavo
