// One step's attention: which tiles there are (planned once per step) and who does them.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "memory.h"

namespace octavo {

// One sequence's share of a step.
struct StepRow {
  int64_t start;         // absolute position of its first token
  int64_t num_tokens;
  int64_t first;         // index of its first token among the step's
  const int32_t* table;  // its block table
};

struct HeadShape {
  int32_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
};

// The paged cache: [block][layer][kv head][K, V].
struct KvCache {
  uint8_t* data = nullptr;
  int64_t num_blocks = 0, head_bytes = 0, layer_bytes = 0, block_bytes = 0;
  bool fp32 = false;

  static KvCache shape(int64_t num_layers, const HeadShape& heads, bool fp32);  // without memory
  uint8_t* at(int64_t block, int64_t layer, int64_t head) const {
    return data + block * block_bytes + layer * layer_bytes + head * head_bytes;
  }
};

struct AttendCall {
  const float* q;
  float* out;
  int64_t ld, layer, window;  // window 0: all
  float scale;
  // If given, what is written is also prepared for the op that reads it (LinearTable).
  void (*prepare_blocks)(const Acts&, int64_t row, int64_t b0, int64_t b1,
                         const float* x) = nullptr;
  Acts acts = {};
};

class AttendPlan {
 public:
  AttendPlan(const HeadShape& heads, int threads, int64_t max_context, int64_t max_tokens);
  void plan(const std::vector<StepRow>& rows);
  // Takes work from `next` until there is none; every thread of the step calls it.
  void run(const AttentionTable& kernels, const KvCache& kv, const AttendCall& call,
           std::atomic<int64_t>& next);
  size_t scratch_bytes() const { return states_.bytes(); }

 private:
  struct Item {
    int32_t row, kv_head, row0, rows;
  };
  AttendArgs args(const Item& item, const KvCache& kv, const AttendCall& call) const;
  void finish(const AttentionTable& k, const AttendCall& call, const Item& item,
              const AttendArgs& a, const float* state) const;
  void run_whole(const AttentionTable& k, const KvCache& kv, const AttendCall& call,
                 std::atomic<int64_t>& next);
  void run_split(const AttentionTable& k, const KvCache& kv, const AttendCall& call,
                 std::atomic<int64_t>& next);

  const HeadShape heads_;
  const int threads_;
  const int64_t max_splits_;
  const std::vector<StepRow>* rows_ = nullptr;
  std::vector<Item> items_;
  bool split_ = false;
  Region states_;  // [item][split][state] in split mode
  std::unique_ptr<std::atomic<int32_t>[]> done_;
};

}  // namespace octavo
