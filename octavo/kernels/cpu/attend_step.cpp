#include "attend_step.h"

#include <algorithm>
#include <stdexcept>

namespace octavo {
namespace {

// A tile that is more than the PIECES-th part of a thread's work is cut into its splits: so there
// are fewer than PIECES * threads of them.
constexpr int64_t PIECES = 8;
// Of the work: what goes to the threads in runs, beforehand. The rest is taken by whoever is free.
constexpr int64_t RUN_SHARE = 7, OF_SHARES = 8;
// This many units a thread balance well. Where there are more tiles, a unit is several of them.
constexpr int64_t MANY = 32;
// Reading a key and its value costs about what this many rows cost to multiply by them.
constexpr int64_t READ_ROWS = 4;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr const char* KV_NAMES[] = {"bf16", "fp32", "int8"};  // in the order of KvType

}  // namespace

KvType kv_type_named(const std::string& name) {
  for (int i = 0; i < 3; ++i)
    if (name == KV_NAMES[i]) return static_cast<KvType>(i);
  throw std::invalid_argument("keys and values are kept as bf16, fp32 or int8, not " + name);
}

const char* kv_type_name(KvType type) { return KV_NAMES[int(type)]; }

int64_t kv_half_bytes(KvType type, int64_t d) {
  const int64_t numbers = BLOCK_TOKENS * d;
  if (type == KvType::INT8) return numbers + 2 * BLOCK_TOKENS;
  return numbers * (type == KvType::F32 ? 4 : 2);
}

KvCache KvCache::shape(int64_t num_layers, const HeadShape& heads, KvType type) {
  KvCache kv;
  kv.type = type;
  kv.head_bytes = 2 * kv_half_bytes(type, heads.head_dim);
  kv.layer_bytes = kv.head_bytes * heads.num_kv_heads;
  kv.block_bytes = kv.layer_bytes * num_layers;
  return kv;
}

SplitRange attend_splits(const AttendArgs& a, int64_t row0, int64_t rows) {
  const int64_t first = a.start + row0 / a.group, last = a.start + (row0 + rows - 1) / a.group;
  const int64_t oldest = a.window ? std::max<int64_t>(0, first - a.window + 1) : 0;
  return {oldest / SPLIT_TOKENS, last / SPLIT_TOKENS + 1};
}

AttendPlan::AttendPlan(const HeadShape& heads, int threads, int64_t max_context,
                       int64_t max_tokens)
    : heads_(heads),
      threads_(threads),
      max_splits_(ceil_div(max_context, SPLIT_TOKENS)),
      max_tokens_(max_tokens) {
  if (threads == 1) return;
  const int64_t most = PIECES * threads;
  states_ = Region(size_t(most * max_splits_ * attend_state_floats(TILE_ROWS, heads.head_dim) * 4));
  done_ = std::make_unique<std::atomic<int32_t>[]>(size_t(most));
}

void AttendPlan::add_window(int64_t window) {
  for (const Shares& shares : shares_)
    if (shares.window == window) return;
  shares_.push_back({window, {}, std::vector<int64_t>(size_t(threads_))});
  const int64_t group = heads_.num_heads / heads_.num_kv_heads;
  const int64_t tiles = ceil_div(max_tokens_ * group, TILE_ROWS) * heads_.num_kv_heads;
  shares_.back().units.reserve(size_t(tiles + 64));
}

void AttendPlan::plan(const std::vector<StepRow>& rows) {
  rows_ = &rows;
  for (Shares& shares : shares_) plan_window(shares);
}

void AttendPlan::plan_window(Shares& shares) {
  const int32_t group = heads_.num_heads / heads_.num_kv_heads;
  int64_t count = 0;
  for (const StepRow& row : *rows_)
    count += ceil_div(row.num_tokens * group, TILE_ROWS) * heads_.num_kv_heads;
  const int64_t height = TILE_ROWS * std::clamp<int64_t>(count / (MANY * threads_), 1, UNIT_TILES);
  // Calls fn(unit, cost) for every `height` rows. The last of a sequence see most: they come first,
  // so that what is left for the end is small.
  auto tiles = [&](auto fn) {
    for (size_t i = 0; i < rows_->size(); ++i) {
      const StepRow& row = (*rows_)[i];
      const int64_t total = row.num_tokens * group;
      AttendArgs a{};
      a.start = row.start, a.window = shares.window, a.group = group;
      for (int32_t h = 0; h < heads_.num_kv_heads; ++h)
        for (int64_t row0 = (total - 1) / height * height; row0 >= 0; row0 -= height) {
          const int64_t n = std::min(height, total - row0);
          const SplitRange s = attend_splits(a, row0, n);
          const int64_t first = row.start + row0 / group;
          const int64_t end = row.start + (row0 + n - 1) / group + 1;
          const int64_t tokens = end - (a.window ? std::max<int64_t>(0, first - a.window + 1) : 0);
          fn(Unit{int32_t(i), h, int32_t(row0), int32_t(n), int32_t(s.begin), int32_t(s.end),
                  -1, 0},
             tokens * (READ_ROWS + n));
        }
    }
  };
  int64_t total = 0, sum = 0;
  int32_t cut = 0;
  tiles([&](const Unit&, int64_t cost) { total += cost; });
  shares.units.clear();
  tiles([&](Unit unit, int64_t cost) {
    const int32_t begin = unit.split0, end = unit.split1;
    if (threads_ == 1 || end - begin < 2 || unit.rows > TILE_ROWS ||
        cost * PIECES * threads_ <= total) {
      unit.until = sum += cost;
      shares.units.push_back(unit);
      return;
    }
    unit.cut = cut++;
    for (int32_t s = begin; s < end; ++s) {
      unit.split0 = s, unit.split1 = s + 1;
      unit.until = sum += cost / (end - begin);
      shares.units.push_back(unit);
    }
  });
  // The runs: as much of the work as each may take beforehand, in whole units.
  const std::vector<Unit>& units = shares.units;
  int64_t at = 0;
  for (int t = 0; t < threads_; ++t) {
    const int64_t most = threads_ == 1 ? sum : sum * RUN_SHARE / OF_SHARES * (t + 1) / threads_;
    while (at < int64_t(units.size()) && units[size_t(at)].until <= most) ++at;
    shares.ends[size_t(t)] = at;
  }
}

AttendArgs AttendPlan::args(const Unit& unit, const KvCache& kv, const AttendCall& c) const {
  const StepRow& row = (*rows_)[size_t(unit.row)];
  const int32_t group = heads_.num_heads / heads_.num_kv_heads;
  const int64_t at = row.first * c.ld + int64_t(unit.kv_head) * group * heads_.head_dim;
  return {c.q + at, c.ld, c.out + at, c.ld, kv.at(0, c.layer, unit.kv_head), kv.block_bytes,
          kv.head_bytes / 2, row.table, row.start, c.window, group, heads_.head_dim, c.scale,
          kv.type};
}

void AttendPlan::run(const AttentionTable& k, const KvCache& kv, const AttendCall& call,
                     int thread, std::atomic<int64_t>& next) {
  const Shares& shares = *std::find_if(shares_.begin(), shares_.end(), [&](const Shares& s) {
    return s.window == call.window;
  });
  const std::vector<Unit>& units = shares.units;
  const int64_t end = shares.ends[size_t(thread)], tail = shares.ends.back();
  for (int64_t i = thread ? shares.ends[size_t(thread) - 1] : 0; i < end; ++i)
    compute(k, kv, call, units[size_t(i)], i + 1 < end ? &units[size_t(i) + 1] : nullptr);
  const auto count = int64_t(units.size());
  for (int64_t i = tail + next.fetch_add(1); i < count; i = tail + next.fetch_add(1))
    compute(k, kv, call, units[size_t(i)], nullptr);
}

void AttendPlan::finish(const AttentionTable& k, const AttendCall& call, const Unit& unit,
                        const AttendArgs& a, const float* state) const {
  const int64_t stride = attend_state_floats(TILE_ROWS, a.dim);
  for (int32_t r = 0; r < unit.rows; r += TILE_ROWS)
    k.finish(a, unit.row0 + r, std::min(TILE_ROWS, unit.rows - r), state + r / TILE_ROWS * stride);
  if (call.prepare == nullptr) return;
  const int64_t blocks = a.dim / 32, first = (*rows_)[size_t(unit.row)].first;
  for (int64_t head = 0; head < a.group; ++head) {
    // The tokens whose row of this head is in the unit: row = token * group + head.
    const int64_t t0 = (unit.row0 + a.group - 1 - head) / a.group;
    const int64_t t1 = (unit.row0 + unit.rows + a.group - 1 - head) / a.group;
    const int64_t b = (unit.kv_head * a.group + head) * blocks;
    call.prepare(call.acts, {first + t0, first + t1, b, b + blocks},
                 a.out + t0 * a.out_ld + head * a.dim, a.out_ld);
  }
}

// `then`: the unit that this thread turns to next, if that is known.
void AttendPlan::compute(const AttentionTable& k, const KvCache& kv, const AttendCall& call,
                         const Unit& unit, const Unit* then) {
  const AttendArgs a = args(unit, kv, call);
  Upcoming next{};
  if (then != nullptr) {
    const StepRow& row = (*rows_)[size_t(then->row)];
    const int64_t last = row.start + (then->row0 + then->rows - 1) / a.group;
    next = {kv.at(0, call.layer, then->kv_head), row.table,
            int64_t(then->split0) * SPLIT_TOKENS / BLOCK_TOKENS, last / BLOCK_TOKENS + 1};
  }
  const SplitRange own{unit.split0, unit.split1};
  if (unit.cut < 0) {
    alignas(64) float state[UNIT_TILES * attend_state_floats(TILE_ROWS, MAX_HEAD_DIM)];
    k.attend(a, unit.row0, unit.rows, own, next, state);
    return finish(k, call, unit, a, state);
  }
  // Whoever does the last split of a tile folds them all, in order: the sums of a whole tile.
  const int64_t stride = attend_state_floats(TILE_ROWS, heads_.head_dim);
  const SplitRange all = attend_splits(a, unit.row0, unit.rows);
  const int64_t count = all.end - all.begin;
  float* states = states_.as<float>() + unit.cut * max_splits_ * stride;
  k.attend(a, unit.row0, unit.rows, own, next, states + (own.begin - all.begin) * stride);
  std::atomic<int32_t>& done = done_[size_t(unit.cut)];
  if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < count) return;
  done.store(0, std::memory_order_relaxed);
  for (int64_t p = 1; p < count; ++p)
    k.fold(states, states + p * stride, unit.rows, heads_.head_dim);
  finish(k, call, unit, a, states);
}

}  // namespace octavo
