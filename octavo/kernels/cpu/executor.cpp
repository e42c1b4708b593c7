#include "executor.h"

#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace octavo {
namespace {

// Up to this many rows every thread prepares all activations for itself: cheaper than a barrier.
constexpr int64_t REDUNDANT_ROWS = 4;
constexpr int64_t PREPARE_ROWS = MAX_GROUP;  // rows of one group of Acts share cache lines
constexpr int64_t TILE_FLOATS = 32 << 10;
constexpr int64_t SMALL_ROWS = 64;  // one block of rows
constexpr int64_t CHUNK_PANELS = 8;
constexpr int64_t ROWS_FIRST_BYTES = 4 << 20;
constexpr int64_t LOGITS_BYTES = 16 << 20;
constexpr int64_t MIN_LOGITS_ROWS = 32, MAX_PASS_ROWS = 64;
constexpr int64_t BLOCK_PANELS = SAMPLE_BLOCK / 16;
constexpr int64_t COUNTERS_PER_OP = 4;
// New pages come zeroed, and of a prompt's KV that takes as long as a twentieth of its prefill: so
// many bytes beyond the blocks in use are touched while there is no step.
constexpr int64_t TOUCH_AHEAD = 64 << 20, TOUCH_PIECE = 2 << 20;
constexpr int64_t LANES = 16;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t align(int64_t n, int64_t to) { return ceil_div(n, to) * to; }

// Of one row of logits: 16 maxima, a top and two sums for each block, in whole cache lines.
int64_t digest_floats(int64_t vocab) { return align(ceil_div(vocab, SAMPLE_BLOCK), LANES) * 19; }

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

const Kernels& kernels_named(const std::string& name) {
  const Kernels* k = find_isa(name.c_str());
  if (k == nullptr) throw std::invalid_argument("instruction set not usable here: " + name);
  return *k;
}

}  // namespace

struct alignas(64) Executor::Thread {
  int index;
  int64_t counter;   // how many shared counters this thread has passed in this step
  uint8_t* acts;     // REDUNDANT_ROWS rows
  float *tile, *tile2;
  float* rows;       // a group of rows of the widest activation
  void* sample;
  int64_t since = 0, wait_ns = 0, barriers = 0;  // since the last charge()
  std::vector<Spent> spent;                      // of each instruction
};

Executor::Executor(const ExecutorConfig& config)
    : config_(config),
      kernels_(kernels_named(config.isa)),
      linear_(*kernels_.linear),
      rows_(*kernels_.rows),
      pool_(config.threads, config.pin),
      kv_(KvCache::shape(config.num_layers, config.heads, config.kv_type)),
      attention_(config.heads, config.threads, config.max_context, config.max_tokens),
      wanted_attention_(config.heads, config.threads, config.max_context, config.max_outputs) {
  const HeadShape& h = config.heads;
  if (h.head_dim % 16 != 0 || h.head_dim < 16 || h.head_dim > MAX_HEAD_DIM)
    throw std::invalid_argument("head_dim must be a multiple of 16 in 16..256, got " +
                                std::to_string(h.head_dim));
  if (h.num_kv_heads < 1 || h.num_heads % h.num_kv_heads != 0)
    throw std::invalid_argument("kv heads do not divide heads");
  kv_.num_blocks = config.num_blocks;
  kv_memory_ = Region(size_t(kv_.num_blocks * kv_.block_bytes));
  kv_.data = kv_memory_.data();
}

Executor::~Executor() = default;

int64_t Executor::add_rope(std::vector<double> inv_freq) {
  if (int64_t(inv_freq.size()) * 2 != config_.heads.head_dim)
    throw std::invalid_argument("a rope needs head_dim / 2 frequencies");
  ropes_.push_back(std::move(inv_freq));
  return int64_t(ropes_.size()) - 1;
}

const float* Executor::keep_vector(const float* data, int64_t n) {
  const int64_t padded = align(n, LANES);
  vectors_.push_back(std::make_unique<float[]>(size_t(padded)));
  std::copy(data, data + n, vectors_.back().get());
  vector_bytes_ += size_t(padded) * 4;
  return vectors_.back().get();
}

void Executor::add_op(OpSpec op) {
  if (op.kind == OpKind::Attend)
    (op.wanted ? wanted_attention_ : attention_).add_window(op.window);
  ops_.push_back(std::move(op));
}

uint32_t Executor::needs(const OpSpec& op) const {
  uint32_t all = 0;
  for (const PackedWeight& w : op.weights) all |= linear_.needs(w.type, config_.products);
  return (all & ACT_PAIR) && op.wide ? all | ACT_WIDE : all;
}

// Rounding to int8 is local to 32 elements, so a value that one op alone reads is prepared for it
// by the threads that compute it, if each computes whole blocks: one barrier less.
void Executor::link() {
  for (OpSpec& op : ops_) {
    if (op.kind != OpKind::NormGateUpAct && op.kind != OpKind::Attend) continue;
    if (op.kind == OpKind::Attend && config_.heads.head_dim % 32 != 0) continue;
    int32_t reader = -1, count = 0;
    for (size_t i = 0; i < ops_.size(); ++i)
      if (ops_[i].x == op.out || ops_[i].residual == op.out) reader = int32_t(i), ++count;
    if (count != 1 || ops_[size_t(reader)].x != op.out || ops_[size_t(reader)].norm) continue;
    op.passes_to = reader;
    ops_[size_t(reader)].received = true;
  }
}

Acts Executor::passed_acts(const OpSpec& reader) const {
  return acts_at(passed_acts_, rows_of(reader), reader.weights[0].k, needs(reader));
}

void Executor::finish(int64_t arena_bytes) {
  link();
  size_t shared = 0, passed = 0, own = 0, post = 0, total = 0;
  int64_t widest = config_.hidden, vocab = 0;
  auto carve = [&](size_t bytes) {
    const size_t at = total;
    total += size_t(align(int64_t(bytes), 4096));
    return at;
  };
  for (const OpSpec& op : ops_) {
    if (op.weights.empty() || op.kind == OpKind::Embed) continue;
    const int64_t k = op.weights[0].k;
    const bool head = op.kind == OpKind::FinalNormHead;
    if (head) vocab = op.weights[0].panels * LANES;
    const int64_t most = op.wanted ? config_.max_outputs : config_.max_tokens;
    const int64_t rows = head ? MAX_PASS_ROWS : most;
    size_t& buffer = op.received ? passed : shared;
    buffer = std::max(buffer, acts_bytes(rows, k, needs(op)));
    own = std::max(own, acts_bytes(REDUNDANT_ROWS, k, needs(op)));
    widest = std::max(widest, k);
    if (op.post_norm) post = std::max(post, size_t(rows * align(config_.hidden, LANES) * 4));
  }
  const int64_t rows = vocab ? LOGITS_BYTES / (vocab * 4) : 0;
  logits_rows_ = std::clamp(rows, MIN_LOGITS_ROWS, MAX_PASS_ROWS);
  logits_rows_ = std::min(logits_rows_, std::max<int64_t>(1, config_.max_outputs));
  const size_t tokens = size_t(config_.max_tokens);
  const size_t at_acts = carve(shared), at_passed = carve(passed);
  const size_t at_logits = carve(size_t(logits_rows_ * vocab * 4));
  const size_t at_digests = carve(size_t(MAX_PASS_ROWS * digest_floats(config_.vocab) * 4));
  const size_t at_bests = carve(size_t(pool_.threads()) * MAX_PASS_ROWS * sizeof(LogitBest));
  const size_t at_post = carve(post);
  const size_t at_angles = carve(ropes_.size() * tokens * size_t(config_.heads.head_dim) * 4);
  const int n = pool_.threads();
  const size_t normed = size_t(PREPARE_ROWS * align(widest, LANES)) * 4;
  std::vector<size_t> at(size_t(n) * 4);
  for (int i = 0; i < n; ++i) {
    at[size_t(i) * 4] = carve(own);
    at[size_t(i) * 4 + 1] = carve(TILE_FLOATS * 4 * 2);
    at[size_t(i) * 4 + 2] = carve(normed);
    at[size_t(i) * 4 + 3] = carve(sample_scratch_bytes(config_.vocab));
  }
  scratch_ = Region(total);
  arena_ = Region(size_t(arena_bytes));
  uint8_t* base = scratch_.data();
  shared_acts_ = base + at_acts;
  passed_acts_ = base + at_passed;
  logits_ = reinterpret_cast<float*>(base + at_logits);
  digests_ = reinterpret_cast<float*>(base + at_digests);
  bests_ = reinterpret_cast<LogitBest*>(base + at_bests);
  post_ = reinterpret_cast<float*>(base + at_post);
  angles_ = reinterpret_cast<float*>(base + at_angles);
  for (int i = 0; i < n; ++i) {
    const size_t* a = &at[size_t(i) * 4];
    auto* tile = reinterpret_cast<float*>(base + a[1]);
    threads_.push_back({i, 0, base + a[0], tile, tile + TILE_FLOATS,
                        reinterpret_cast<float*>(base + a[2]), base + a[3]});
  }
  pool_.set_chore([](void* self) { return static_cast<Executor*>(self)->touch_ahead(); }, this);
  reset_timing();
  num_counters_ = int64_t(ops_.size()) * COUNTERS_PER_OP +
                  ceil_div(config_.max_outputs, logits_rows_) * COUNTERS_PER_OP;
  counters_ = std::make_unique<std::atomic<int64_t>[]>(size_t(num_counters_));
  taken_ = std::make_unique<Taken[]>(size_t(num_counters_ * pool_.threads()));
  row_.resize(size_t(config_.max_tokens));
  position_.resize(size_t(config_.max_tokens));
  block_.resize(size_t(config_.max_tokens));
  slot_.resize(size_t(config_.max_tokens));
  broken_ = std::make_unique<std::atomic<int32_t>[]>(size_t(config_.max_tokens));
}

Executor::Memory Executor::memory() const {
  const size_t attention = attention_.scratch_bytes() + wanted_attention_.scratch_bytes();
  return {kv_memory_.bytes(), arena_.bytes(), scratch_.bytes() + attention, vector_bytes_};
}

// The pool's chore. Free blocks are handed out in the order of their numbers (core/blocks.py).
bool Executor::touch_ahead() {
  const int64_t used = kv_used_.load(std::memory_order_relaxed);
  const int64_t end = std::min(int64_t(kv_memory_.bytes()), used + TOUCH_AHEAD);
  kv_touched_ = std::max(kv_touched_, used / TOUCH_PIECE * TOUCH_PIECE);
  if (kv_touched_ >= end) return false;
  const int64_t to = std::min(kv_touched_ + TOUCH_PIECE, int64_t(kv_memory_.bytes()));
  const bool can = kv_memory_.touch(size_t(kv_touched_), size_t(to));
  kv_touched_ = can ? to : INT64_MAX;
  return can;
}

// --- A step ---

const char* Executor::check(const StepInput& s) const {
  if (s.num_tokens < 1 || s.num_tokens > config_.max_tokens)
    return "the step's tokens are out of bounds";
  if (s.num_rows < 1 || s.num_rows > s.num_tokens) return "the step's rows are out of bounds";
  if (s.num_wanted < 0 || s.num_wanted > std::min(config_.max_outputs, s.num_tokens))
    return "the step wants too many outputs";
  int64_t tokens = 0;
  for (int64_t i = 0; i < s.num_rows; ++i) {
    const int32_t* r = s.rows + i * 4;
    const int64_t start = r[0], n = r[1], at = r[2], length = r[3];
    if (start < 0 || n < 1 || start + n > config_.max_context) return "a row is beyond the context";
    if (at < 0 || length < 0 || at + length > s.num_tables)
      return "a row's block table is out of bounds";
    if (length * BLOCK_TOKENS < start + n) return "a row's block table is too short";
    tokens += n;
  }
  if (tokens != s.num_tokens) return "the rows' tokens do not add up";
  for (int64_t i = 0; i < s.num_tables; ++i)
    if (s.tables[i] < 0 || s.tables[i] >= kv_.num_blocks) return "a block id is out of bounds";
  for (int64_t i = 0; i < s.num_tokens; ++i)
    if (s.tokens[i] < 0 || s.tokens[i] >= config_.vocab) return "a token id is out of bounds";
  for (int64_t i = 0; i < s.num_wanted; ++i)
    if (s.wanted[i] < 0 || s.wanted[i] >= s.num_tokens) return "a wanted position is out of bounds";
  return nullptr;
}

void Executor::begin(const StepInput& step, const StepOutput& out) {
  step_ = step;
  out_ = out;
  step_rows_.clear();
  int64_t token = 0;
  for (int64_t i = 0; i < step.num_rows; ++i) {
    const int32_t* r = step.rows + i * 4;
    const int32_t* table = step.tables + r[2];
    step_rows_.push_back({r[0], r[1], token, table});
    broken_[size_t(i)].store(WHOLE, std::memory_order_relaxed);
    for (int32_t p = r[0]; p < r[0] + r[1]; ++p, ++token) {
      row_[size_t(token)] = int32_t(i);
      position_[size_t(token)] = p;
      block_[size_t(token)] = table[p / BLOCK_TOKENS];
      slot_[size_t(token)] = p % BLOCK_TOKENS;
    }
  }
  int64_t blocks = 0;
  for (int64_t i = 0; i < step.num_tables; ++i) blocks = std::max<int64_t>(blocks, step.tables[i] + 1);
  kv_used_.store(std::max(kv_used_.load(std::memory_order_relaxed), blocks * kv_.block_bytes),
                 std::memory_order_relaxed);
  find_wanted_rows();
  plan_head();
  attention_.plan(step_rows_);
  wanted_attention_.plan(wanted_rows_);
}

// Runs of neighbours among the wanted tokens: pieces of sequences, as the last layer sees them.
void Executor::find_wanted_rows() {
  wanted_rows_.clear();
  for (int64_t i = 0; i < step_.num_wanted; ++i) {
    const int32_t token = step_.wanted[i], row = row_[size_t(token)];
    if (i > 0 && token == step_.wanted[i - 1] + 1 && row == row_[size_t(token - 1)])
      ++wanted_rows_.back().num_tokens;
    else
      wanted_rows_.push_back({position_[size_t(token)], 1, i, step_rows_[size_t(row)].table});
  }
}

// Which rows the head's passes take, and where their digests go: at most MAX_PASS_ROWS, of which at
// most logits_rows_ keep their logits.
void Executor::plan_head() {
  head_rows_.clear();
  passes_.assign(1, 0);
  const int64_t blocks = align(ceil_div(config_.vocab, SAMPLE_BLOCK), LANES);
  const int64_t ld = align(config_.vocab, LANES);
  int64_t kept = 0;
  for (int64_t i = 0; i < step_.num_wanted; ++i) {
    uint32_t needs = kernels_.sample->needs(step_.samples + i, config_.vocab);
    if (out_.logits != nullptr) needs |= KEEP_LOGITS;
    const bool keep = needs & KEEP_LOGITS;
    if (i - passes_.back() == MAX_PASS_ROWS || (keep && kept == logits_rows_)) {
      passes_.push_back(i);
      kept = 0;
    }
    float* at = digests_ + (i - passes_.back()) * digest_floats(config_.vocab);
    float* tops = at + blocks * LANES;
    head_rows_.push_back({needs, keep ? logits_ + kept++ * ld : nullptr, at, tops, tops + blocks,
                          tops + 2 * blocks});
  }
  if (step_.num_wanted > 0) passes_.push_back(step_.num_wanted);
}

const char* Executor::run(const StepInput& step, const StepOutput& out) {
  if (const char* wrong = check(step)) return wrong;
  started_ns_ = now_ns();
  begin(step, out);
  reset_counters();
  only_ = nullptr;
  pool_.run([](void* self, int thread) { static_cast<Executor*>(self)->walk(thread); }, this);
  report(out);
  steps_ += 1;
  steps_ns_ += now_ns() - started_ns_;
  return nullptr;
}

const char* Executor::run_eagerly(const StepInput& step, const StepOutput& out) {
  if (const char* wrong = check(step)) return wrong;
  begin(step, out);
  for (const OpSpec& op : ops_) {
    reset_counters();
    only_ = &op;
    pool_.run([](void* self, int thread) { static_cast<Executor*>(self)->walk(thread); }, this);
  }
  report(out);
  return nullptr;
}

// A key or value of this token is not finite. The lowest position stands, whoever comes first.
void Executor::break_row(int64_t token) {
  std::atomic<int32_t>& first = broken_[size_t(row_[size_t(token)])];
  const int32_t position = position_[size_t(token)];
  int32_t known = first.load(std::memory_order_relaxed);
  while (position < known && !first.compare_exchange_weak(known, position)) {
  }
}

void Executor::report(const StepOutput& out) const {
  for (int64_t i = 0; i < step_.num_rows; ++i)
    out.broken[i] = broken_[size_t(i)].load(std::memory_order_relaxed);
}

void Executor::reset_counters() {
  for (int64_t i = 0; i < counters_used_; ++i)
    counters_[size_t(i)].store(0, std::memory_order_relaxed);
  for (int64_t i = 0; i < counters_used_ * pool_.threads(); ++i)
    taken_[size_t(i)].ends.store(0, std::memory_order_relaxed);
  counters_used_ = 0;
}

void Executor::walk(int thread) {
  Thread& t = threads_[size_t(thread)];
  t.counter = t.wait_ns = t.barriers = 0;
  if (only_ != nullptr) {
    t.since = now_ns();
    run_op(*only_, t);
    if (thread == 0) counters_used_ = t.counter;
    return charge(t, only_ - ops_.data());
  }
  // Thread 0 has set the step up; the others have waited for it.
  t.since = started_ns_;
  if (thread != 0) t.wait_ns = now_ns() - started_ns_;
  charge(t, int64_t(ops_.size()) + 1);
  for (size_t i = 0; i < ops_.size(); ++i) {
    run_op(ops_[i], t);
    charge(t, int64_t(i));
  }
  if (thread == 0) counters_used_ = t.counter;
}

// What passed since the last charge belongs to `instruction`.
void Executor::charge(Thread& t, int64_t instruction) {
  const int64_t now = now_ns();
  Spent& s = t.spent[size_t(instruction)];
  s.busy_ns += now - t.since - t.wait_ns;
  s.wait_ns += t.wait_ns;
  s.barriers += t.barriers;
  t.since = now;
  t.wait_ns = t.barriers = 0;
}

const Executor::Spent& Executor::spent(int thread, int64_t instruction) const {
  return threads_[size_t(thread)].spent[size_t(instruction)];
}

void Executor::reset_timing() {
  steps_ = steps_ns_ = 0;
  for (Thread& t : threads_) t.spent.assign(size_t(num_instructions()), {});
}

void Executor::run_op(const OpSpec& op, Thread& t) {
  switch (op.kind) {
    case OpKind::Embed: return embed(op, t);
    case OpKind::NormQkv: return norm_qkv(op, t);
    case OpKind::Select: return select(op, t);
    case OpKind::Attend: return attend(op, t);
    case OpKind::OutResidual:
    case OpKind::DownResidual: return project_residual(op, t);
    case OpKind::NormGateUpAct: return norm_gate_up_act(op, t);
    case OpKind::FinalNormHead: return final_norm_head(op, t);
  }
}

float* Executor::value(int32_t id) const {
  const Value& v = values_[size_t(id)];
  const int64_t at = v.t * step_.num_tokens + v.s * step_.num_wanted + v.c;
  return reinterpret_cast<float*>(arena_.data() + at);
}

uint8_t* Executor::block_of(int64_t token, int64_t layer, int64_t head) const {
  return kv_.at(block_[size_t(token)], layer, head);
}

// --- Sharing work ---

void Executor::barrier(Thread& t) {
  if (pool_.threads() == 1) return;
  const int64_t start = now_ns();
  pool_.barrier();
  t.wait_ns += now_ns() - start;
  ++t.barriers;
}

template <class Fn>
void Executor::share(Thread& t, int64_t units, int64_t grain, const Fn& fn) {
  const int64_t n = pool_.threads();
  Share(&taken_[size_t(t.counter++ * n)], n, units, grain).run(t.index, fn);
}

// Calls fn(panel0, panel1, row0, row1) over all panels of w and all rows, tiles of at most
// TILE_FLOATS that begin at even panels: whole blocks of 32 columns. Few rows: all of them with a run
// of panels. Many: block of rows by block of rows, so that a thread finds what it wrote to these rows
// in its own cache, from op to op; the weights then come again for each block. Where they are too
// large to come from the last cache, the blocks of rows pass by a chunk of panels instead.
template <class Fn>
void Executor::share_tiles(Thread& t, const PackedWeight& w, int64_t rows, const Fn& fn) {
  const int64_t panels = w.panels;
  if (rows == 0) return;
  const int64_t most = w.k <= 2048 ? 2 * SMALL_ROWS : SMALL_ROWS;
  const int64_t even = align(ceil_div(rows, ceil_div(rows, most)), MAX_GROUP);
  const int64_t height = rows <= SMALL_ROWS ? rows : even;
  const int64_t blocks = ceil_div(rows, height);
  const int64_t width = TILE_FLOATS / (height * LANES) / 2 * 2;
  if (rows <= SMALL_ROWS) {
    const int64_t grain = std::clamp<int64_t>(panels / 128, 1, 8);
    share(t, ceil_div(panels, 2), grain, [&](int64_t u0, int64_t u1) {
      const int64_t end = std::min(2 * u1, panels);
      for (int64_t p = 2 * u0; p < end; p += width)
        fn(p, std::min(p + width, end), int64_t(0), rows);
    });
    return;
  }
  const int64_t chunks = ceil_div(panels, CHUNK_PANELS);
  const bool rows_first = panels * w.panel_bytes <= ROWS_FIRST_BYTES;
  share(t, blocks * chunks, 1, [&](int64_t u0, int64_t u1) {
    for (int64_t u = u0; u < u1; ++u) {
      const int64_t p = (rows_first ? u % chunks : u / blocks) * CHUNK_PANELS;
      const int64_t r = (rows_first ? u / chunks : u % blocks) * height;
      fn(p, std::min(p + CHUNK_PANELS, panels), r, std::min(r + height, rows));
    }
  });
}

template <class Source>
Acts Executor::prepare(Thread& t, const OpSpec& op, int64_t rows, const Source& source) {
  const bool own = rows <= REDUNDANT_ROWS;
  const Acts acts = acts_at(own ? t.acts : shared_acts_, rows, op.weights[0].k, needs(op));
  auto groups = [&](int64_t g0, int64_t g1) {
    for (int64_t r0 = g0 * PREPARE_ROWS; r0 < std::min(g1 * PREPARE_ROWS, rows);
         r0 += PREPARE_ROWS) {
      const int64_t r1 = std::min(r0 + PREPARE_ROWS, rows);
      const Rows from = source(r0, r1);
      linear_.prepare(acts, {r0, r1, 0, acts.blocks}, from.x, from.ld);
    }
  };
  const int64_t count = ceil_div(rows, PREPARE_ROWS);
  if (own || pool_.threads() == 1) {
    groups(0, count);
    return acts;
  }
  share(t, count, 1, groups);
  barrier(t);
  return acts;
}

Acts Executor::prepare_normed(Thread& t, const OpSpec& op, const float* x, int64_t ld,
                              int64_t rows) {
  const int64_t k = op.weights[0].k, own_ld = align(k, LANES);
  return prepare(t, op, rows, [&](int64_t r0, int64_t r1) {
    for (int64_t r = r0; r < r1; ++r)
      rows_.rms_norm(x + r * ld, op.norm, k, op.eps, t.rows + (r - r0) * own_ld);
    return Rows{t.rows, own_ld};
  });
}

void Executor::multiply(const OpSpec& op, int weight, const Acts& acts, const Tile& tile,
                        float* out, int64_t ld) {
  linear_.linear(op.weights[size_t(weight)], tile.panel0, tile.panel1, acts, tile.row0, tile.row1,
                 out, ld);
}

// --- Ops ---

// Also the step's rotary angles, in double: float loses them at far positions.
void Executor::embed(const OpSpec& op, Thread& t) {
  float* x = value(op.out);
  const int64_t ld = values_[size_t(op.out)].ld, dim = config_.heads.head_dim;
  auto angles = [&](int64_t token) {
    for (size_t i = 0; i < ropes_.size(); ++i) {
      float* out = angles_ + (int64_t(i) * config_.max_tokens + token) * dim;
      for (int64_t j = 0; j < dim / 2; ++j) {
        const double angle = double(position_[size_t(token)]) * ropes_[i][size_t(j)];
        out[j] = float(std::cos(angle));
        out[dim / 2 + j] = float(std::sin(angle));
      }
    }
  };
  share(t, step_.num_tokens * 2, 1, [&](int64_t u0, int64_t u1) {
    for (int64_t u = u0; u < u1; ++u) {
      const int64_t token = u / 2;
      if (u % 2) angles(token);
      else linear_.embed_row(op.weights[0], step_.tokens[token], op.scale, x + token * ld);
    }
  });
  barrier(t);
}

void Executor::norm_qkv(const OpSpec& op, Thread& t) {
  const int64_t rows = step_.num_tokens, n = pool_.threads();
  const HeadShape& h = config_.heads;
  const Acts acts = prepare_normed(t, op, value(op.x), values_[size_t(op.x)].ld, rows);
  const int64_t head_panels = h.head_dim / LANES, heads = h.num_heads + h.num_kv_heads;
  const int64_t v_panels = h.num_kv_heads * head_panels;
  if (rows > SMALL_ROWS) {
    const int64_t height = std::min<int64_t>(256, TILE_FLOATS / h.head_dim / MAX_GROUP * MAX_GROUP);
    const int64_t per = heads + h.num_kv_heads;
    share(t, ceil_div(rows, height) * per, 1, [&](int64_t u0, int64_t u1) {
      for (int64_t u = u0; u < u1; ++u) {
        const int64_t i = u % per, r0 = u / per * height, r1 = std::min(r0 + height, rows);
        const int64_t v = (i - heads) * head_panels;
        if (i < heads) qkv_heads(op, acts, t, i, i + 1, r0, r1);
        else qkv_values(op, acts, t, v, v + head_panels, r0, r1);
      }
    });
    barrier(t);
    return;
  }
  // A head of q or k is one unit, for its rotation; v comes in panels (or heads, where a head has
  // one scale), and last, to even out.
  const int64_t total = heads * head_panels + v_panels;
  const int64_t run = n == 1 ? heads : std::min(heads / n, total * 7 / 8 / n / head_panels);
  const int64_t left = heads - run * n, part = kv_.type == KvType::INT8 ? head_panels : 2;
  const int64_t grain = n == 1 ? v_panels : part;
  std::atomic<int64_t>& next = counters_[size_t(t.counter++)];
  if (run > 0) qkv_heads(op, acts, t, t.index * run, (t.index + 1) * run, 0, rows);
  for (int64_t u = next.fetch_add(1); u < left + ceil_div(v_panels, grain); u = next.fetch_add(1)) {
    const int64_t i = run * n + u, v = (u - left) * grain;
    if (u < left) qkv_heads(op, acts, t, i, i + 1, 0, rows);
    else qkv_values(op, acts, t, v, std::min(v + grain, v_panels), 0, rows);
  }
  barrier(t);
}

void Executor::rotate(const OpSpec& op, const float* norm, const float* bias, float* head,
                      int64_t token) {
  const int64_t dim = config_.heads.head_dim;
  if (bias != nullptr) rows_.add(head, bias, dim, head);
  if (norm != nullptr) rows_.rms_norm(head, norm, dim, op.eps, head);
  const float* cos = angles_ + (op.rope * config_.max_tokens + token) * dim;
  rows_.rope(head, cos, cos + dim / 2, dim / 2);
}

// Heads h0..h1 of q followed by k: project, bias, norm, rotate; k goes into the cache.
void Executor::qkv_heads(const OpSpec& op, const Acts& acts, Thread& t, int64_t h0, int64_t h1,
                         int64_t r0, int64_t r1) {
  const int64_t dim = config_.heads.head_dim, panels = dim / LANES, num_q = config_.heads.num_heads;
  const int64_t ld = values_[size_t(op.out)].ld;
  float* q = value(op.out);
  const int64_t q1 = std::min(h1, num_q);
  if (h0 < q1) {
    multiply(op, 0, acts, {h0 * panels, q1 * panels, r0, r1}, q + r0 * ld + h0 * dim, ld);
    for (int64_t r = r0; r < r1; ++r)
      for (int64_t h = h0; h < q1; ++h)
        rotate(op, op.q_norm, op.bias ? op.bias + h * dim : nullptr, q + r * ld + h * dim, r);
  }
  const int64_t fit = std::max<int64_t>(1, TILE_FLOATS / ((r1 - r0) * dim));
  for (int64_t k0 = std::max(h0, num_q) - num_q; k0 < h1 - num_q; k0 += fit) {
    const int64_t k1 = std::min(k0 + fit, h1 - num_q), width = (k1 - k0) * dim;
    multiply(op, 1, acts, {k0 * panels, k1 * panels, r0, r1}, t.tile, width);
    const float* bias = op.bias ? op.bias + num_q * dim : nullptr;
    for (int64_t r = r0; r < r1; ++r)
      for (int64_t h = k0; h < k1; ++h) {
        float* k = t.tile + (r - r0) * width + (h - k0) * dim;
        rotate(op, op.k_norm, bias ? bias + h * dim : nullptr, k, r);
        if (!rows_.store_k(k, dim, block_of(r, op.layer, h), slot_[size_t(r)], kv_.type))
          break_row(r);
      }
  }
}

// Panels p0..p1 of v, into the cache.
void Executor::qkv_values(const OpSpec& op, const Acts& acts, Thread& t, int64_t p0, int64_t p1,
                          int64_t r0, int64_t r1) {
  const HeadShape& h = config_.heads;
  const int64_t dim = h.head_dim, whole = dim / LANES;
  const int64_t fit = std::max<int64_t>(1, TILE_FLOATS / ((r1 - r0) * dim)) * whole;
  const float* bias = op.bias ? op.bias + (h.num_heads + h.num_kv_heads) * dim : nullptr;
  for (int64_t p = p0; p < p1; p += fit) {
    const int64_t end = std::min(p + fit, p1), width = (end - p) * LANES;
    multiply(op, 2, acts, {p, end, r0, r1}, t.tile, width);
    for (int64_t r = r0; r < r1; ++r) {
      float* v = t.tile + (r - r0) * width;
      if (bias != nullptr) rows_.add(v, bias + p * LANES, width, v);
      for (int64_t i = p * LANES; i < end * LANES;) {
        const int64_t head = i / dim, d0 = i % dim, d1 = std::min(dim, d0 + end * LANES - i);
        uint8_t* values = block_of(r, op.layer, head) + kv_.head_bytes / 2;
        if (!rows_.store_v(v + (i - p * LANES), dim, d0, d1, values, slot_[size_t(r)], kv_.type))
          break_row(r);
        i += d1 - d0;
      }
    }
  }
}

void Executor::select(const OpSpec& op, Thread& t) {
  const int64_t from_ld = values_[size_t(op.x)].ld, ld = values_[size_t(op.out)].ld;
  const size_t bytes = size_t(std::min(ld, from_ld)) * 4;
  const float* from = value(op.x);
  float* out = value(op.out);
  share(t, step_.num_wanted, PREPARE_ROWS, [&](int64_t r0, int64_t r1) {
    for (int64_t r = r0; r < r1; ++r)
      std::memcpy(out + r * ld, from + step_.wanted[r] * from_ld, bytes);
  });
  barrier(t);
}

void Executor::attend(const OpSpec& op, Thread& t) {
  AttendCall call{value(op.x), value(op.out), values_[size_t(op.x)].ld, op.layer, op.window,
                  op.scale, nullptr, {}};
  if (op.passes_to >= 0) {
    const OpSpec& reader = ops_[size_t(op.passes_to)];
    call.prepare = linear_.prepare;
    call.acts = passed_acts(reader);
  }
  AttendPlan& plan = op.wanted ? wanted_attention_ : attention_;
  plan.run(*kernels_.attention, kv_, call, t.index, counters_[size_t(t.counter++)]);
  barrier(t);
}

void Executor::project_residual(const OpSpec& op, Thread& t) {
  const PackedWeight& w = op.weights[0];
  const float *in = value(op.x), *x = value(op.residual);
  float* out = value(op.out);
  const int64_t rows = rows_of(op), in_ld = values_[size_t(op.x)].ld;
  const int64_t ld = values_[size_t(op.out)].ld, x_ld = values_[size_t(op.residual)].ld;
  const Acts acts = op.received
                        ? passed_acts(op)
                        : prepare(t, op, rows, [&](int64_t r0, int64_t) {
                            return Rows{in + r0 * in_ld, in_ld};
                          });
  if (op.post_norm == nullptr) {
    share_tiles(t, w, rows, [&](int64_t p0, int64_t p1, int64_t r0, int64_t r1) {
      const int64_t width = (p1 - p0) * LANES, c = p0 * LANES;
      multiply(op, 0, acts, {p0, p1, r0, r1}, t.tile, width);
      for (int64_t r = r0; r < r1; ++r)
        rows_.add(x + r * x_ld + c, t.tile + (r - r0) * width, std::min(width, w.n - c),
                  out + r * ld + c);
    });
    barrier(t);
    return;
  }
  const int64_t post_ld = align(w.n, LANES);
  share_tiles(t, w, rows, [&](int64_t p0, int64_t p1, int64_t r0, int64_t r1) {
    multiply(op, 0, acts, {p0, p1, r0, r1}, post_ + r0 * post_ld + p0 * LANES, post_ld);
  });
  barrier(t);
  share(t, rows, 1, [&](int64_t r0, int64_t r1) {
    for (int64_t r = r0; r < r1; ++r) {
      float* y = post_ + r * post_ld;
      rows_.rms_norm(y, op.post_norm, w.n, op.eps, y);
      rows_.add(x + r * x_ld, y, w.n, out + r * ld);
    }
  });
  barrier(t);
}

void Executor::norm_gate_up_act(const OpSpec& op, Thread& t) {
  const PackedWeight& gate = op.weights[0];
  const int64_t rows = rows_of(op), ld = values_[size_t(op.out)].ld;
  float* out = value(op.out);
  const Acts acts = prepare_normed(t, op, value(op.x), values_[size_t(op.x)].ld, rows);
  const OpSpec* reader = op.passes_to < 0 ? nullptr : &ops_[size_t(op.passes_to)];
  const Acts next = reader ? passed_acts(*reader) : Acts{};
  share_tiles(t, gate, rows, [&](int64_t p0, int64_t p1, int64_t r0, int64_t r1) {
    const int64_t width = (p1 - p0) * LANES, c = p0 * LANES;
    multiply(op, 0, acts, {p0, p1, r0, r1}, t.tile, width);
    multiply(op, 1, acts, {p0, p1, r0, r1}, t.tile2, width);
    for (int64_t r = r0; r < r1; ++r) {
      float* h = reader ? t.tile + (r - r0) * width : out + r * ld + c;
      rows_.act_mul(op.act, t.tile + (r - r0) * width, t.tile2 + (r - r0) * width,
                    std::min(width, gate.n - c), h);
    }
    if (reader) linear_.prepare(next, {r0, r1, p0 / 2, (p1 + 1) / 2}, t.tile, width);
  });
  barrier(t);
}

// The rows in passes, so that logits need little memory. A block of ids goes to the sampler's
// digest as soon as it is computed; then each row is sampled.
void Executor::final_norm_head(const OpSpec& op, Thread& t) {
  const float* x = value(op.x);
  const int64_t x_ld = values_[size_t(op.x)].ld, k = op.weights[0].k;
  for (size_t pass = 0; pass + 1 < passes_.size(); ++pass) {
    const int64_t s0 = passes_[pass], rows = passes_[pass + 1] - s0;
    const Acts acts = prepare_normed(t, op, x + s0 * x_ld, x_ld, rows);
    digest_blocks(op, acts, t, s0);
    barrier(t);
    charge(t, &op - ops_.data());
    share(t, rows, 1, [&](int64_t r0, int64_t r1) {
      for (int64_t r = r0; r < r1; ++r) {
        const LogitRow& row = head_rows_[size_t(s0 + r)];
        kernels_.sample->choose(&row, bests_ + r, pool_.threads(), MAX_PASS_ROWS, config_.vocab,
                                step_.samples + s0 + r, t.sample, out_.samples + s0 + r);
        if (out_.logits != nullptr)
          std::memcpy(out_.logits + (s0 + r) * config_.vocab, row.logits,
                      size_t(config_.vocab) * 4);
        if (out_.normed != nullptr) {
          rows_.rms_norm(x + (s0 + r) * x_ld, op.norm, k, op.eps, t.rows);
          std::memcpy(out_.normed + (s0 + r) * k, t.rows, size_t(k) * 4);
        }
      }
    });
    barrier(t);
    charge(t, int64_t(ops_.size()));
  }
}

void Executor::digest_blocks(const OpSpec& op, const Acts& acts, Thread& t, int64_t s0) {
  const PackedWeight& w = op.weights[0];
  LogitBest* best = bests_ + t.index * MAX_PASS_ROWS;
  std::fill(best, best + acts.rows, LogitBest{-INFINITY, 0});
  // Few enough blocks at once for their logits to be still in L1 or L2 when they are digested.
  const int64_t fit = std::clamp<int64_t>(TILE_FLOATS / 2 / (acts.rows * SAMPLE_BLOCK), 1, 8);
  share(t, ceil_div(config_.vocab, SAMPLE_BLOCK), 1, [&](int64_t b0, int64_t b1) {
    for (int64_t b = b0; b < b1; b += fit) {
      const int64_t p0 = b * BLOCK_PANELS;
      const int64_t p1 = std::min(std::min(b + fit, b1) * BLOCK_PANELS, w.panels);
      const int64_t width = (p1 - p0) * LANES, first = p0 * LANES;
      multiply(op, 0, acts, {p0, p1, 0, acts.rows}, t.tile, width);
      for (int64_t r = 0; r < acts.rows; ++r)
        kernels_.sample->digest(t.tile + r * width, first, std::min(width, config_.vocab - first),
                                step_.samples + s0 + r, &head_rows_[size_t(s0 + r)], best + r);
    }
  });
}

}  // namespace octavo
