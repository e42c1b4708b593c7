// One causal self-attention of n tokens, done our way and the naive way: for `octavo lab flash` and
// its driver under cachegrind. Memory is taken and touched before anything is timed.
#pragma once
#include "attend_step.h"
#include "naive.h"
#include "pool.h"
#include "rowops.h"

namespace octavo {

// Row-major floats: q [n][heads][dim], k and v [n][kv heads][dim].
struct AttentionInput {
  const float *q, *k, *v;
  int64_t n;
  HeadShape heads;
  float scale;
};

class FlashAttention {
 public:
  FlashAttention(const AttentionTable& kernels, const RowTable& rows, const AttentionInput& in,
                 int threads);
  void run(float* out);  // [n][heads][dim]
  size_t scratch_bytes() const { return plan_.scratch_bytes(); }  // beside the stack's

 private:
  const AttentionTable& kernels_;
  const AttentionInput in_;
  Pool pool_;
  KvCache kv_;
  Region memory_;
  std::vector<int32_t> table_;
  AttendPlan plan_;
};

class NaiveAttention {
 public:
  NaiveAttention(const NaiveTable& kernels, const AttentionInput& in, int threads);
  void run(float* out);
  size_t scratch_bytes() const { return scratch_.bytes(); }  // one head's scores and weights

 private:
  NaiveArgs head(int64_t head, float* out) const;
  const NaiveTable& kernels_;
  const AttentionInput in_;
  Pool pool_;
  Region packed_, scratch_;
};

}  // namespace octavo
