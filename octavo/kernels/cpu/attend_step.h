// One step's attention: which tiles there are (planned once per step) and who does them.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "memory.h"

namespace octavo {

KvType kv_type_named(const std::string& name);  // bf16, fp32 or int8; throws invalid_argument
const char* kv_type_name(KvType type);

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
  KvType type = KvType::BF16;

  static KvCache shape(int64_t num_layers, const HeadShape& heads, KvType type);  // without memory
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
  void (*prepare)(const Acts&, const BlockRange&, const float* x, int64_t ld) = nullptr;
  Acts acts = {};
};

// The work of a step, cut into units: some tiles of rows with all the splits they see, or, of a
// tile that is much of the whole, one split. Units only say who computes what; every tile's splits
// are folded in the same order.
class AttendPlan {
 public:
  AttendPlan(const HeadShape& heads, int threads, int64_t max_context, int64_t max_tokens);
  void add_window(int64_t window);  // of the layers to come; before the first plan()
  void plan(const std::vector<StepRow>& rows);
  // Every thread of the step calls it once for each call; `next`: a counter, 0 before.
  void run(const AttentionTable& kernels, const KvCache& kv, const AttendCall& call, int thread,
           std::atomic<int64_t>& next);
  size_t scratch_bytes() const { return states_.bytes(); }

 private:
  struct Unit {
    int32_t row, kv_head, row0, rows;
    int32_t split0, split1;
    int32_t cut;    // number of the cut tile that it is part of; -1: whole tiles
    int64_t until;  // cost of all units up to this one
  };
  // The units for the layers of one window, and where each thread's own run of them ends.
  struct Shares {
    int64_t window;
    std::vector<Unit> units;
    std::vector<int64_t> ends;
  };
  void plan_window(Shares& shares);
  AttendArgs args(const Unit& unit, const KvCache& kv, const AttendCall& call) const;
  void compute(const AttentionTable& k, const KvCache& kv, const AttendCall& call,
               const Unit& unit, const Unit* then);
  void finish(const AttentionTable& k, const AttendCall& call, const Unit& unit,
              const AttendArgs& a, const float* state) const;

  const HeadShape heads_;
  const int threads_;
  const int64_t max_splits_, max_tokens_;
  const std::vector<StepRow>* rows_ = nullptr;
  std::vector<Shares> shares_;
  Region states_;  // [cut tile][split][state]
  std::unique_ptr<std::atomic<int32_t>[]> done_;  // of each cut tile: splits done
};

}  // namespace octavo
