// Choosing and scoring tokens: the data that crosses from Python (octavo/runtime/sampling.py
// documents and writes it) and the table entry. Plain data only, see contract.h.
//
// One row is one wanted position: its logits, a SampleRow, a SampleOut. The result is a function of
// these alone: no state, no threads, no other rows.
//
// A row of logits is seen block by block (SAMPLE_BLOCK ids), by whichever thread has just computed
// the block (`digest`), and once more by the thread that chooses (`choose`), as far as the digests
// do not say it all: the greedy choice never needs the logits themselves, so they are not kept.
#pragma once
#include "contract.h"

namespace octavo {

constexpr int MAX_TOP = 20;  // alternatives reported beside a token

enum class SampleError : int32_t {
  NONE = 0,
  NOT_A_NUMBER = 1,  // a logit is NaN; detail: its id
  INFINITE = 2,      // a logit is +inf, as it came or after penalties; detail: its id
  ALL_MASKED = 3,    // no token may be chosen
  BAD_ID = 4,        // history, bias, allowed or banned name an id beyond the vocabulary; detail: it
  SHORT_MASK = 5,    // the mask has fewer bits than the vocabulary; detail: its bytes
};

// 128 bytes. *_at: where a slice begins, in int32 words from `data`, which lives for the step.
struct SampleRow {
  float temperature;  // 0: greedy; below 0: choose nothing, only score
  float top_p, min_p, typical_p;          // 1, 0, 1: off
  float repetition, presence, frequency;  // 1, 0, 0: off
  int32_t top_k;                          // 0: off
  int32_t num_logprobs;                   // -1: no logprob of the chosen token; else alternatives
  int32_t reserved;
  uint64_t seed;
  int32_t choice, position;
  int32_t target, target_top;  // id to score or -1; its alternatives
  int32_t history_at, num_history, num_prompt;  // ids before this position; the first are prompt
  int32_t bias_at, num_bias;                    // num_bias ids, then as many floats
  int32_t allowed_at, num_allowed;              // 0: every id is allowed
  int32_t banned_at, num_banned;
  int32_t suppress_at, num_suppress;
  int32_t mask_at, mask_bytes;  // bit i, little-endian, allows id i; 0 bytes: no mask
  int32_t reserved2;
  const int32_t* data;  // set by link_sample_rows
};
static_assert(sizeof(SampleRow) == 128);

// 184 bytes. logprob, score, top: under the distribution of the untouched logits.
struct SampleOut {
  SampleError error;  // not NONE: nothing else is meaningful
  int32_t detail;
  int32_t token;   // the chosen id, -1 if none was wanted
  float logprob;   // of token, where num_logprobs >= 0
  float score;     // of target, where one is given
  int32_t num_top; // max(num_logprobs, target_top), or fewer if fewer ids have a finite logit
  int32_t top_id[MAX_TOP];  // most likely first, then lowest id
  float top_logprob[MAX_TOP];
};
static_assert(sizeof(SampleOut) == 184);

constexpr int64_t SAMPLE_BLOCK = 256;

// What a row's digest keeps.
constexpr uint32_t KEEP_LOGITS = 1;  // `logits` and `maxima`
constexpr uint32_t SUM_PLAIN = 2;    // `tops` and `plain`, for log-probabilities
constexpr uint32_t SUM_WARPED = 4;   // `tops` and `warped`, for choosing among all ids

// A row's digest. What its needs do not name is neither written nor read, and may be null.
struct LogitRow {
  uint32_t needs;
  float* logits;  // [vocab]
  float* maxima;  // [blocks][16]: the highest of each lane of 16 ids
  float* tops;    // [blocks]: the highest
  float* plain;   // [blocks]: the sum of exp(logit - top)
  float* warped;  // [blocks]: of exp((logit - top) / temperature)
};

// The highest logit of the blocks that one thread saw, and its lowest id; NaN before all others.
// Begins as {-inf, 0}; `choose` takes the best of all threads.
struct LogitBest {
  float top;
  int32_t id;
};

struct SampleTable {
  // The needs of this row: of its own parameters only.
  uint32_t (*needs)(const SampleRow* row, int64_t vocab);
  // Digests `count` logits, those of the ids from `first` on, a multiple of SAMPLE_BLOCK. A thread
  // passes its blocks in rising order.
  void (*digest)(const float* logits, int64_t first, int64_t count, const SampleRow* row,
                 const LogitRow* into, LogitBest* best);
  // best: of each thread, best[i * stride]. scratch: sample_scratch_bytes(vocab), 64-byte aligned,
  // needs no initialisation.
  void (*choose)(const LogitRow* digest, const LogitBest* best, int64_t threads, int64_t stride,
                 int64_t vocab, const SampleRow* row, void* scratch, SampleOut* out);
  // Both at once. logits: [vocab], any alignment, never written.
  void (*sample)(const float* logits, int64_t vocab, const SampleRow* row, void* scratch,
                 SampleOut* out);
  // For tests: the probability with which each id would be chosen, 0 where it was cut; [vocab].
  SampleError (*probabilities)(const float* logits, int64_t vocab, const SampleRow* row,
                               void* scratch, float* out);
  // Philox4x32-10.
  void (*philox)(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);
};

// In bind_sample.cpp. Most of the scratch is touched only by rows that need it.
size_t sample_scratch_bytes(int64_t vocab);

// Points every row at `data` (`words` int32) and checks that its slices lie within. Returns null,
// or what is wrong.
const char* link_sample_rows(SampleRow* rows, int64_t num_rows, const int32_t* data, int64_t words);

}  // namespace octavo
