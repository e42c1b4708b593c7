#include "naive.h"

namespace octavo {
namespace {

void naive_pack_q(const float* x, int64_t dim, uint16_t* q) {
  for (int64_t d = 0; d < dim; d += 16) store_bf16(q + d, load(x + d));
}

void naive_pack_k(const float* x, int64_t dim, int64_t row, uint16_t* k) {
  uint16_t* block = k + row / 32 * 32 * dim + row % 32 * 2;
  for (int64_t d = 0; d < dim; d += 16) {
    alignas(64) uint16_t half[16];
    store_bf16(half, load(x + d));
    for (int64_t j = 0; j < 16; ++j) block[(d + j) / 2 * 64 + j % 2] = half[j];
  }
}

void naive_pack_v(const float* x, int64_t dim, int64_t row, uint16_t* v) {
  uint16_t* pair = v + row / 2 * 2 * dim + row % 2;
  for (int64_t d = 0; d < dim; d += 16) {
    alignas(64) uint16_t half[16];
    store_bf16(half, load(x + d));
    for (int64_t j = 0; j < 16; ++j) pair[(d + j) * 2] = half[j];
  }
}

template <int R>
void naive_score_rows(const NaiveArgs& a, int64_t row0, int64_t blocks) {
  const uint16_t* q = a.q + row0 * a.dim;
  for (int64_t b = 0; b < blocks; ++b) {
    const uint16_t* k = a.k + b * 32 * a.dim;
    F acc[R][2];
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zero_f();
    for (int64_t d = 0; d < a.dim; d += 2) {
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        acc[r][0] = dot_bf16(acc[r][0], load_b(k + d * 32), q + r * a.dim + d);
        acc[r][1] = dot_bf16(acc[r][1], load_b(k + d * 32 + 32), q + r * a.dim + d);
      }
    }
    for (int r = 0; r < R; ++r) {
      store(a.s + (row0 + r) * a.n + b * 32, acc[r][0]);
      store(a.s + (row0 + r) * a.n + b * 32 + 16, acc[r][1]);
    }
  }
}

template <int R>
void naive_value_rows(const NaiveArgs& a, int64_t row0, int64_t tokens) {
  for (int64_t d = 0; d < a.dim; d += 32) {
    const uint16_t* p = a.p + row0 * a.n;
    F acc[R][2];
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zero_f();
    for (int64_t t = 0; t < tokens; t += 2) {
      const uint16_t* v = a.v + t * a.dim + d * 2;
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        acc[r][0] = dot_bf16(acc[r][0], load_b(v), p + r * a.n + t);
        acc[r][1] = dot_bf16(acc[r][1], load_b(v + 32), p + r * a.n + t);
      }
    }
    for (int r = 0; r < R; ++r) {
      const F sum = set1(a.sums[row0 + r]);
      store(a.out + (row0 + r) * a.ld + d, div(acc[r][0], sum));
      store(a.out + (row0 + r) * a.ld + d + 16, div(acc[r][1], sum));
    }
  }
}

// As many rows at once as the registers hold, like attention.inl.
void naive_scores(const NaiveArgs& a, int64_t row0) {
  const int64_t blocks = row0 / 32 + 1;
#ifdef __AVX512F__
  naive_score_rows<12>(a, row0, blocks);
  naive_score_rows<12>(a, row0 + 12, blocks);
  naive_score_rows<8>(a, row0 + 24, blocks);
#else
  for (int r = 0; r < NAIVE_ROWS; r += 4) naive_score_rows<4>(a, row0 + r, blocks);
#endif
}

void naive_values(const NaiveArgs& a, int64_t row0) {
  const int64_t tokens = row0 + NAIVE_ROWS;
#ifdef __AVX512F__
  naive_value_rows<12>(a, row0, tokens);
  naive_value_rows<12>(a, row0 + 12, tokens);
  naive_value_rows<8>(a, row0 + 24, tokens);
#else
  for (int r = 0; r < NAIVE_ROWS; r += 4) naive_value_rows<4>(a, row0 + r, tokens);
#endif
}

// Which of the keys j..j+16 the row sees.
OCTAVO_INLINE M naive_seen(int64_t row, int64_t j) {
  const int64_t n = row + 1 - j;
  return first_n(n < 0 ? 0 : n > 16 ? 16 : n);
}

void naive_softmax(const NaiveArgs& a, int64_t row0) {
  const float inf = __builtin_inff();
  const int64_t end = row0 + NAIVE_ROWS;
  for (int64_t row = row0; row < end; ++row) {
    const float* s = a.s + row * a.n;
    F m = set1(-inf);
    for (int64_t j = 0; j <= row; j += 16)
      m = max(m, select(naive_seen(row, j), load(s + j), set1(-inf)));
    const F top = set1(hmax(m)), scale = set1(a.scale);
    F sum = zero_f();
    for (int64_t j = 0; j < end; j += 16) {
      const F e = exp_(mul(sub(load(s + j), top), scale));
      uint16_t* p = a.p + row * a.n + j;
      store_bf16(p, select(naive_seen(row, j), e, zero_f()));
      sum = add(sum, load_bf16(p));
    }
    a.sums[row] = hsum(sum);
  }
}

constexpr NaiveTable NAIVE{naive_pack_q, naive_pack_k,  naive_pack_v,
                           naive_scores, naive_softmax, naive_values};

}  // namespace
}  // namespace octavo
