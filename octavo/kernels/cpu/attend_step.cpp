#include "attend_step.h"

#include <algorithm>

namespace octavo {
namespace {

// Below this many tiles per thread a long context is shared out by splits instead.
constexpr int64_t FEW_ITEMS = 4;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

KvCache KvCache::shape(int64_t num_layers, const HeadShape& heads, bool fp32) {
  KvCache kv;
  kv.fp32 = fp32;
  kv.head_bytes = int64_t(2) * 32 * heads.head_dim * (fp32 ? 4 : 2);
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
    : heads_(heads), threads_(threads), max_splits_(ceil_div(max_context, SPLIT_TOKENS)) {
  const int64_t group = heads.num_heads / heads.num_kv_heads;
  items_.reserve(size_t(ceil_div(max_tokens * group, TILE_ROWS) * heads.num_kv_heads + 64));
  if (threads == 1) return;
  const int64_t most = FEW_ITEMS * threads;
  states_ = Region(size_t(most * max_splits_ * attend_state_floats(TILE_ROWS, heads.head_dim) * 4));
  done_ = std::make_unique<std::atomic<int32_t>[]>(size_t(most));
}

void AttendPlan::plan(const std::vector<StepRow>& rows) {
  rows_ = &rows;
  items_.clear();
  const int32_t group = heads_.num_heads / heads_.num_kv_heads;
  int64_t longest = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t total = rows[i].num_tokens * group;
    longest = std::max(longest, rows[i].start + rows[i].num_tokens);
    // The last tiles see most: they come first, so that no long one is left for the end.
    for (int32_t h = 0; h < heads_.num_kv_heads; ++h)
      for (int64_t row0 = (total - 1) / TILE_ROWS * TILE_ROWS; row0 >= 0; row0 -= TILE_ROWS)
        items_.push_back({int32_t(i), h, int32_t(row0),
                          int32_t(std::min<int64_t>(TILE_ROWS, total - row0))});
  }
  split_ = threads_ > 1 && int64_t(items_.size()) < FEW_ITEMS * threads_ &&
           longest > 2 * SPLIT_TOKENS;
}

AttendArgs AttendPlan::args(const Item& item, const KvCache& kv, const AttendCall& c) const {
  const StepRow& row = (*rows_)[size_t(item.row)];
  const int32_t group = heads_.num_heads / heads_.num_kv_heads;
  const int64_t at = row.first * c.ld + int64_t(item.kv_head) * group * heads_.head_dim;
  return {c.q + at, c.ld, c.out + at, c.ld, kv.at(0, c.layer, item.kv_head), kv.block_bytes,
          row.table, row.start, c.window, group, heads_.head_dim, c.scale, kv.fp32};
}

void AttendPlan::run(const AttentionTable& k, const KvCache& kv, const AttendCall& call,
                     std::atomic<int64_t>& next) {
  if (split_) run_split(k, kv, call, next);
  else run_whole(k, kv, call, next);
}

void AttendPlan::finish(const AttentionTable& k, const AttendCall& call, const Item& item,
                        const AttendArgs& a, const float* state) const {
  k.finish(a, item.row0, item.rows, state);
  if (call.prepare_blocks == nullptr) return;
  const int64_t blocks = a.dim / 32, first = (*rows_)[size_t(item.row)].first;
  for (int64_t row = item.row0; row < item.row0 + item.rows; ++row) {
    const int64_t token = row / a.group, head = row % a.group;
    const int64_t b = (item.kv_head * a.group + head) * blocks;
    call.prepare_blocks(call.acts, first + token, b, b + blocks,
                        a.out + token * a.out_ld + head * a.dim);
  }
}

void AttendPlan::run_whole(const AttentionTable& k, const KvCache& kv, const AttendCall& call,
                           std::atomic<int64_t>& next) {
  alignas(64) float state[attend_state_floats(TILE_ROWS, MAX_HEAD_DIM)];
  const int64_t total = int64_t(items_.size());
  const int64_t grain = threads_ == 1 ? total : std::max<int64_t>(1, total / (threads_ * 16));
  for (int64_t i = next.fetch_add(grain); i < total; i = next.fetch_add(grain)) {
    for (int64_t j = i; j < std::min(i + grain, total); ++j) {
      const Item& item = items_[size_t(j)];
      const AttendArgs a = args(item, kv, call);
      const SplitRange s = attend_splits(a, item.row0, item.rows);
      k.attend(a, item.row0, item.rows, s.begin, s.end, state, true);
      finish(k, call, item, a, state);
    }
  }
}

// Whoever finishes the last split of a tile folds them all, in order: the same sums as run_whole's.
void AttendPlan::run_split(const AttentionTable& k, const KvCache& kv, const AttendCall& call,
                           std::atomic<int64_t>& next) {
  int64_t most = 1;  // splits that any tile sees
  for (const Item& item : items_) {
    const SplitRange s = attend_splits(args(item, kv, call), item.row0, item.rows);
    most = std::max(most, s.end - s.begin);
  }
  const int64_t total = int64_t(items_.size()) * most;
  const int64_t grain = std::clamp<int64_t>(total / (threads_ * 4), 1, 4);
  const int64_t stride = attend_state_floats(TILE_ROWS, heads_.head_dim);
  int64_t end = 0;
  for (int64_t i = 0;; ++i) {
    if (i >= end) {
      i = next.fetch_add(grain);
      end = std::min(i + grain, total);
    }
    if (i >= total) return;
    const int64_t index = i / most;
    const Item& item = items_[size_t(index)];
    const AttendArgs a = args(item, kv, call);
    const SplitRange s = attend_splits(a, item.row0, item.rows);
    const int64_t count = s.end - s.begin, part = i % most;
    if (part >= count) continue;
    float* states = states_.as<float>() + index * max_splits_ * stride;
    k.attend(a, item.row0, item.rows, s.begin + part, s.begin + part + 1, states + part * stride,
             true);
    std::atomic<int32_t>& done = done_[size_t(index)];
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < count) continue;
    done.store(0, std::memory_order_relaxed);
    for (int64_t p = 1; p < count; ++p)
      k.fold(states, states + p * stride, item.rows, heads_.head_dim);
    finish(k, call, item, a, states);
  }
}

}  // namespace octavo
