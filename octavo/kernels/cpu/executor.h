// Replays a traced program: one call per step, on all threads of the pool, sampling included.
//
// Every thread walks the same list of ops. Inside an op the work is shared out in units (ranges of
// weight panels, blocks of rows, attention tiles); which thread does a unit never changes a bit of
// its result. Barriers stand only where one thread reads what another wrote.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "attend_step.h"
#include "isa.h"
#include "linear.h"
#include "memory.h"
#include "pool.h"
#include "rowops.h"
#include "sample.h"
#include "share.h"

namespace octavo {

enum class OpKind : int32_t {
  Embed, NormQkv, Select, Attend, OutResidual, NormGateUpAct, DownResidual, FinalNormHead,
};
constexpr int NUM_OP_KINDS = 8;

// A value's place: byte offset t*T + s*S + c in the arena, rows of `ld` floats.
struct Value {
  int64_t t = 0, s = 0, c = 0, ld = 0;
};

struct OpSpec {
  OpKind kind;
  int32_t x = -1, residual = -1, out = -1;  // value ids
  std::vector<PackedWeight> weights;         // segments: q, k, v; gate, up; or one
  const float* norm = nullptr;               // before the linear
  const float* post_norm = nullptr;          // after it
  const float *bias = nullptr, *q_norm = nullptr, *k_norm = nullptr;
  int64_t layer = 0, rope = 0, window = 0;
  float eps = 0, scale = 1;
  Act act = Act::Silu;
  bool wide = false;  // where activations may be pairs of bytes (ACT_PAIR), all are (ACT_WIDE)
  bool wanted = false;  // its rows are the step's wanted positions, not all tokens
  // Set by finish(): the op that alone reads `out`, if its activations are prepared right here by
  // whoever computes them; and that this op's are given so.
  int32_t passes_to = -1;
  bool received = false;
};

struct ExecutorConfig {
  std::string isa = "auto";
  int threads = 1;
  bool pin = false;
  Products products = Products::INT8;
  KvType kv_type = KvType::BF16;
  int64_t max_tokens = 0, max_rows = 0, max_outputs = 0, max_context = 0;
  int64_t num_layers = 0, num_blocks = 0, hidden = 0, vocab = 0;
  HeadShape heads;
};

// What a step brings. Everything is checked before any of it is used.
struct StepInput {
  const int32_t* rows;  // [num_rows][4]: start, tokens, where its table begins, its length
  int64_t num_rows;
  const int32_t* tokens;  // rows' tokens one after the other
  int64_t num_tokens;
  const int32_t* tables;
  int64_t num_tables;
  const int32_t* wanted;  // indices of tokens whose logits are wanted
  int64_t num_wanted;
  const SampleRow* samples;  // one for each wanted token, linked
};

// What a step gives: samples[num_wanted]; broken[num_rows], the first position of each row whose keys
// or values were not finite, or WHOLE: what came of such a row means nothing. And, where not null,
// logits[num_wanted][vocab] and the normed rows that the head read, normed[num_wanted][hidden].
constexpr int32_t WHOLE = INT32_MAX;
struct StepOutput {
  SampleOut* samples;
  int32_t* broken;
  float* logits = nullptr;
  float* normed = nullptr;
};

class Executor {
 public:
  explicit Executor(const ExecutorConfig& config);

  int64_t add_rope(std::vector<double> inv_freq);
  void add_value(const Value& value) { values_.push_back(value); }
  void add_op(OpSpec op);
  const float* keep_vector(const float* data, int64_t n);
  void finish(int64_t arena_bytes);  // no more ops; allocates

  // Runs the program. Returns null, or what is wrong with the step, in which case nothing was run.
  const char* run(const StepInput& step, const StepOutput& out);
  // The same, one op of the program after the other, each as a job of its own.
  const char* run_eagerly(const StepInput& step, const StepOutput& out);

  // Where the time of all steps since reset_timing() went, for each instruction and thread; the last
  // two instructions are SAMPLE (taken out of the head's) and BEGIN: setting the step up, and until
  // a thread has entered it. A step's time is that of any one thread, busy and waiting.
  struct Spent {
    int64_t busy_ns = 0, wait_ns = 0;  // computing; at barriers
    int64_t barriers = 0;
  };
  int64_t num_instructions() const { return int64_t(ops_.size()) + 2; }
  const Spent& spent(int thread, int64_t instruction) const;
  OpKind kind_of(int64_t op) const { return ops_[size_t(op)].kind; }
  int64_t timed_steps() const { return steps_; }
  int64_t timed_ns() const { return steps_ns_; }
  void reset_timing();

  struct Memory {
    size_t kv, arena, scratch, vectors;
  };
  Memory memory() const;
  const ExecutorConfig& config() const { return config_; }
  const Kernels& kernels() const { return kernels_; }
  Pool& pool() { return pool_; }
  KvCache& kv() { return kv_; }

 private:
  struct Thread;  // one thread's view of a step
  struct Tile {
    int64_t panel0, panel1, row0, row1;
  };

  const char* check(const StepInput& step) const;
  void begin(const StepInput& step, const StepOutput& out);
  void find_wanted_rows();
  void plan_head();
  bool touch_ahead();
  void run_op(const OpSpec& op, Thread& t);
  void walk(int thread);
  void reset_counters();

  // One function per op; all threads call it.
  void embed(const OpSpec& op, Thread& t);
  void norm_qkv(const OpSpec& op, Thread& t);
  void select(const OpSpec& op, Thread& t);
  void attend(const OpSpec& op, Thread& t);
  void project_residual(const OpSpec& op, Thread& t);  // out_residual, down_residual
  void norm_gate_up_act(const OpSpec& op, Thread& t);
  void final_norm_head(const OpSpec& op, Thread& t);
  void digest_blocks(const OpSpec& op, const Acts& acts, Thread& t, int64_t s0);

  // Fills the activations of `rows` rows; source(r0, r1) gives rows of weights[0].k floats, never
  // more than a group.
  struct Rows {
    const float* x;
    int64_t ld;
  };
  template <class Source>
  Acts prepare(Thread& t, const OpSpec& op, int64_t rows, const Source& source);
  Acts passed_acts(const OpSpec& reader) const;
  void link();
  void multiply(const OpSpec& op, int weight, const Acts& acts, const Tile& tile, float* out,
                int64_t ld);
  Acts prepare_normed(Thread& t, const OpSpec& op, const float* x, int64_t ld, int64_t rows);
  void qkv_heads(const OpSpec& op, const Acts& acts, Thread& t, int64_t h0, int64_t h1, int64_t r0,
                 int64_t r1);
  void qkv_values(const OpSpec& op, const Acts& acts, Thread& t, int64_t p0, int64_t p1,
                  int64_t r0, int64_t r1);
  void rotate(const OpSpec& op, const float* norm, const float* bias, float* head, int64_t token);
  uint32_t needs(const OpSpec& op) const;
  float* value(int32_t id) const;
  int64_t rows_of(const OpSpec& op) const {
    return op.wanted ? step_.num_wanted : step_.num_tokens;
  }
  uint8_t* block_of(int64_t token, int64_t layer, int64_t head) const;
  void break_row(int64_t token);
  void report(const StepOutput& out) const;

  template <class Fn>
  void share(Thread& t, int64_t units, int64_t grain, const Fn& fn);
  template <class Fn>
  void share_tiles(Thread& t, const PackedWeight& w, int64_t rows, const Fn& fn);
  void barrier(Thread& t);
  void charge(Thread& t, int64_t instruction);

  ExecutorConfig config_;
  const Kernels& kernels_;
  const LinearTable& linear_;
  const RowTable& rows_;
  Region kv_memory_;
  std::atomic<int64_t> kv_used_{0};  // bytes of kv_memory_ below the end of the highest block used
  int64_t kv_touched_ = 0;           // below it every page has been touched
  Pool pool_;                        // after what its chore reads
  std::vector<OpSpec> ops_;
  std::vector<Value> values_;
  std::vector<std::vector<double>> ropes_;
  std::vector<std::unique_ptr<float[]>> vectors_;
  size_t vector_bytes_ = 0;

  KvCache kv_;
  AttendPlan attention_, wanted_attention_;  // of all tokens; of the wanted positions
  Region arena_, scratch_;
  // Carved out of scratch_.
  uint8_t* shared_acts_ = nullptr;
  uint8_t* passed_acts_ = nullptr;  // from op to op
  float* logits_ = nullptr;   // of those rows of a pass that need them
  float* digests_ = nullptr;  // of all rows of a pass: maxima, tops, plain, warped
  LogitBest* bests_ = nullptr;  // [thread][MAX_PASS_ROWS]
  float* post_ = nullptr;
  float* angles_ = nullptr;  // [rope][max_tokens][cos half, sin half]
  int64_t logits_rows_ = 0;
  std::vector<Thread> threads_;
  // Of each time that work is shared out in a step; those that the last step used are reset.
  std::unique_ptr<std::atomic<int64_t>[]> counters_;
  std::unique_ptr<Taken[]> taken_;  // [counter][thread]
  int64_t num_counters_ = 0, counters_used_ = 0;

  // The step under way.
  StepInput step_{};
  StepOutput out_{};
  std::vector<StepRow> step_rows_, wanted_rows_;
  std::vector<int32_t> row_, position_, block_, slot_;  // of each token
  std::unique_ptr<std::atomic<int32_t>[]> broken_;      // of each row
  const OpSpec* only_ = nullptr;                  // eager: the op to run
  std::vector<LogitRow> head_rows_;  // of each wanted position
  std::vector<int64_t> passes_;      // where each of the head's passes begins, and the end
  int64_t started_ns_ = 0;

  int64_t steps_ = 0, steps_ns_ = 0;

 public:
  ~Executor();
};

}  // namespace octavo
