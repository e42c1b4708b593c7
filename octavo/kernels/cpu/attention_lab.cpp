#include "attention_lab.h"

#include <atomic>
#include <cstring>
#include <stdexcept>

namespace octavo {
namespace {

template <class Fn>
void on_all(Pool& pool, Fn fn) {
  pool.run([](void* f, int thread) { (*static_cast<Fn*>(f))(thread); }, &fn);
}

}  // namespace

FlashAttention::FlashAttention(const AttentionTable& kernels, const RowTable& rows,
                               const AttentionInput& in, int threads)
    : kernels_(kernels),
      in_(in),
      pool_(threads, false),
      kv_(KvCache::shape(1, in.heads, KvType::BF16)),
      plan_(in.heads, threads, in.n, in.n) {
  const int64_t dim = in.heads.head_dim, num_kv = in.heads.num_kv_heads;
  plan_.add_window(0);
  kv_.num_blocks = (in.n + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
  memory_ = Region(size_t(kv_.num_blocks * kv_.block_bytes));
  kv_.data = memory_.data();
  for (int32_t b = 0; b < kv_.num_blocks; ++b) table_.push_back(b);
  for (int64_t t = 0; t < in.n; ++t)
    for (int64_t h = 0; h < num_kv; ++h) {
      uint8_t* at = kv_.at(t / BLOCK_TOKENS, 0, h);
      const int64_t row = (t * num_kv + h) * dim, slot = t % BLOCK_TOKENS;
      rows.store_k(in.k + row, dim, at, slot, kv_.type);
      rows.store_v(in.v + row, dim, 0, dim, at + kv_.head_bytes / 2, slot, kv_.type);
    }
}

void FlashAttention::run(float* out) {
  const std::vector<StepRow> rows{{0, in_.n, 0, table_.data()}};
  plan_.plan(rows);
  std::atomic<int64_t> next{0};
  const int64_t ld = int64_t(in_.heads.num_heads) * in_.heads.head_dim;
  const AttendCall call{in_.q, out, ld, 0, 0, in_.scale};
  on_all(pool_, [&](int thread) { plan_.run(kernels_, kv_, call, thread, next); });
}

NaiveAttention::NaiveAttention(const NaiveTable& kernels, const AttentionInput& in, int threads)
    : kernels_(kernels), in_(in), pool_(threads, false) {
  const int64_t n = in.n, dim = in.heads.head_dim;
  const int64_t num_q = in.heads.num_heads, num_kv = in.heads.num_kv_heads;
  if (n % NAIVE_ROWS != 0 || dim % 32 != 0)
    throw std::invalid_argument("tokens and head_dim must be multiples of 32");
  packed_ = Region(size_t((num_q + 2 * num_kv) * n * dim * 2));
  scratch_ = Region(size_t(n * n * 6 + n * 4));
  auto* base = packed_.as<uint16_t>();
  for (int64_t t = 0; t < n; ++t) {
    for (int64_t h = 0; h < num_q; ++h)
      kernels.pack_q(in.q + (t * num_q + h) * dim, dim, base + (h * n + t) * dim);
    for (int64_t h = 0; h < num_kv; ++h) {
      const int64_t row = (t * num_kv + h) * dim;
      kernels.pack_k(in.k + row, dim, t, base + (num_q + h) * n * dim);
      kernels.pack_v(in.v + row, dim, t, base + (num_q + num_kv + h) * n * dim);
    }
  }
  const int64_t share = int64_t(scratch_.bytes()) / threads;
  on_all(pool_, [&](int i) { std::memset(scratch_.data() + i * share, 0, size_t(share)); });
}

NaiveArgs NaiveAttention::head(int64_t head, float* out) const {
  const int64_t n = in_.n, dim = in_.heads.head_dim;
  const int64_t num_q = in_.heads.num_heads, num_kv = in_.heads.num_kv_heads;
  const int64_t kv = head / (num_q / num_kv), each = n * dim;
  const auto* base = packed_.as<const uint16_t>();
  auto* s = scratch_.as<float>();
  auto* p = reinterpret_cast<uint16_t*>(s + n * n);
  return {n, dim, base + head * each, base + (num_q + kv) * each,
          base + (num_q + num_kv + kv) * each, in_.scale, s, p,
          reinterpret_cast<float*>(p + n * n), out + head * dim, num_q * dim};
}

// One head after the other, all threads in each of the three passes.
void NaiveAttention::run(float* out) {
  std::atomic<int64_t> next{0};
  const int64_t tiles = in_.n / NAIVE_ROWS, num_q = in_.heads.num_heads;
  void (*const passes[])(const NaiveArgs&, int64_t) = {kernels_.scores, kernels_.softmax,
                                                       kernels_.values};
  for (int64_t h = 0; h < num_q; ++h) {
    const NaiveArgs a = head(h, out);
    for (auto pass : passes) {
      next = 0;
      // The last tiles see most: first.
      on_all(pool_, [&](int) {
        for (int64_t i = next++; i < tiles; i = next++) pass(a, (tiles - 1 - i) * NAIVE_ROWS);
      });
    }
  }
}

}  // namespace octavo
