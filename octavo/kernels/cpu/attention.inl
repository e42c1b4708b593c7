// Two passes inside a split: all scores, then max, exp and sum in index order, then P times V.
// A row's bits depend on its position and its keys and values only: lanes and tiles share nothing.
#include "attention.h"

namespace octavo {
namespace {

constexpr int64_t KV_BLOCK = 32;
constexpr int64_t KV_SPLIT = SPLIT_TOKENS;

struct AttendScratch {
  alignas(64) float scores[TILE_ROWS][KV_SPLIT];
  alignas(64) float q[TILE_ROWS][MAX_HEAD_DIM];     // bf16 mode: uint16 in the same place
  alignas(64) float p[TILE_ROWS][KV_SPLIT];            // likewise
  alignas(64) float part[TILE_ROWS * (MAX_HEAD_DIM + 2)];
};

// --- The two products, for R rows in registers. bf16 rows are uint16[256], f32 rows float[256]. --

struct Half {
  using T = uint16_t;
  static constexpr int64_t PAIR = 2;  // elements that meet in one product
  OCTAVO_INLINE F dot(F acc, const T* kv, const T* x) { return dot_bf16(acc, load_b(kv), x); }
};
struct Full {
  using T = float;
  static constexpr int64_t PAIR = 1;
  OCTAVO_INLINE F dot(F acc, const T* kv, const T* x) { return fma(load(kv), set1(*x), acc); }
};

// Scores of one block: s[r][0..32). K is [dim/PAIR][32][PAIR]. `ahead`: the K and V that come next.
// Few rows wait for memory: each line of theirs is asked for while a line of this K is multiplied.
template <class P, int R>
void block_scores(const typename P::T* q, const typename P::T* k, int64_t dim, float* s,
                  const typename P::T* ahead) {
  F acc[R][2];
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zero_f();
  for (int64_t d = 0; d < dim; d += P::PAIR) {
    const typename P::T* kd = k + d * KV_BLOCK;
    if (R <= 8) {
      const auto* line = reinterpret_cast<const uint8_t*>(ahead + 2 * d * KV_BLOCK);
      for (int i = 0; i < 4; ++i) __builtin_prefetch(line + 64 * i, 0, 2);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      acc[r][0] = P::dot(acc[r][0], kd, q + r * 256 + d);
      acc[r][1] = P::dot(acc[r][1], kd + 16 * P::PAIR, q + r * 256 + d);
    }
  }
  for (int r = 0; r < R; ++r) {
    store(s + r * KV_SPLIT, acc[r][0]);
    store(s + r * KV_SPLIT + 16, acc[r][1]);
  }
}

alignas(64) constexpr uint16_t EVEN_HALVES[32] = {
    0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff, 0,
    0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff, 0};

// Where the values of a split are: the blocks, and the tokens lo..hi of it that any row sees.
template <class T>
struct Values {
  const T* block[KV_SPLIT / KV_BLOCK];
  int64_t dim, lo, hi;
  const T* next[KV_SPLIT / KV_BLOCK];  // the keys of the next split, to be asked for meanwhile
};

// o[r][0..16 NV) of P [R][256] times V, V being [32/PAIR][dim][PAIR] in each block. In bf16 an odd
// end leaves half a pair that may be stale: it is cut out by AND, for 0 * NaN is NaN.
template <class P, int R, int NV>
void split_values(const typename P::T* p, const Values<typename P::T>& v, int64_t d0, float* o) {
  F acc[R][NV];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < NV; ++j) acc[r][j] = zero_f();
  const int64_t whole = v.hi / P::PAIR * P::PAIR;
  for (int64_t t = v.lo / P::PAIR * P::PAIR; t < whole; t += P::PAIR) {
    const typename P::T* vt = v.block[t / KV_BLOCK] + (t % KV_BLOCK) * v.dim + d0 * P::PAIR;
    if (R <= 8 && d0 == 0) {
      const typename P::T* line = v.next[t / KV_BLOCK] + (t % KV_BLOCK) * v.dim;
      for (int64_t i = 0; i < v.dim * P::PAIR; i += 64 / int64_t(sizeof *line))
        __builtin_prefetch(line + i, 0, 2);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j)
        acc[r][j] = P::dot(acc[r][j], vt + j * 16 * P::PAIR, p + r * KV_SPLIT + t);
  }
  if (whole < v.hi) {
    const typename P::T* vt = v.block[whole / KV_BLOCK] + (whole % KV_BLOCK) * v.dim + d0 * P::PAIR;
    for (int j = 0; j < NV; ++j) {
      alignas(64) typename P::T even[32];
      store_b(even, and_b(load_b(vt + j * 16 * P::PAIR), load_b(EVEN_HALVES)));
      for (int r = 0; r < R; ++r) acc[r][j] = P::dot(acc[r][j], even, p + r * KV_SPLIT + whole);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < NV; ++j) store(o + r * v.dim + d0 + j * 16, acc[r][j]);
}

// --- The same for any number of rows and dims. Registers: 2 R or NV R accumulators. ---

#ifdef __AVX512F__
constexpr int WIDE_ROWS = 12;
#else
constexpr int WIDE_ROWS = 4;
#endif

template <class P, int R>
void all_values(const typename P::T* p, const Values<typename P::T>& v, float* o) {
  constexpr int WIDE = R <= 6 ? 4 : 2;
  int64_t d = 0;
  for (; d + 16 * WIDE <= v.dim; d += 16 * WIDE) split_values<P, R, WIDE>(p, v, d, o);
  if (WIDE == 4 && d + 32 <= v.dim) {
    split_values<P, R, 2>(p, v, d, o);
    d += 32;
  }
  if (d < v.dim) split_values<P, R, 1>(p, v, d, o);
}

// Calls f.template run<R>(r) so that the R's cover rows 0..rows.
template <class Fn>
OCTAVO_INLINE void cover_rows(int rows, const Fn& f) {
  int r = 0;
  if constexpr (WIDE_ROWS == 12) {
    for (; rows - r >= 12; r += 12) f.template run<12>(r);
    for (; rows - r >= 8; r += 8) f.template run<8>(r);
    if (rows - r >= 7) f.template run<7>(r), r += 7;
    if (rows - r >= 6) f.template run<6>(r), r += 6;
    if (rows - r >= 5) f.template run<5>(r), r += 5;
  }
  for (; rows - r >= 4; r += 4) f.template run<4>(r);
  if (rows - r >= 3) f.template run<3>(r), r += 3;
  if (rows - r >= 2) f.template run<2>(r), r += 2;
  if (rows - r >= 1) f.template run<1>(r);
}

template <class P>
struct ScoreRows {
  const typename P::T* q;
  const typename P::T* k;
  int64_t dim;
  float* s;
  const typename P::T* ahead;
  template <int R>
  void run(int r) const { block_scores<P, R>(q + r * 256, k, dim, s + r * KV_SPLIT, ahead); }
};

template <class P>
struct ValueRows {
  const typename P::T* p;
  const Values<typename P::T>& v;
  float* o;
  template <int R>
  void run(int r) const { all_values<P, R>(p + r * KV_SPLIT, v, o + r * v.dim); }
};

// --- Softmax of one row over the tokens lo..hi of a split; P is written over tlo..thi. ---

struct RowSum {
  float max, sum;
};

OCTAVO_INLINE M between(int64_t j, int64_t lo, int64_t hi) {
  const I i = add(iota(), set1(static_cast<int32_t>(j)));
  return and_(lt(i, set1(static_cast<int32_t>(hi))), gt(i, set1(static_cast<int32_t>(lo - 1))));
}

OCTAVO_INLINE F put_p(uint16_t* p, F x) {
  store_bf16(p, x);
  return load_bf16(p);  // the sum is of what will be multiplied
}
OCTAVO_INLINE F put_p(float* p, F x) {
  store(p, x);
  return x;
}

template <class T>
RowSum softmax_row(const float* s, T* p, float scale, int64_t lo, int64_t hi, int64_t tlo,
                   int64_t thi) {
  const float inf = __builtin_inff();
  F m = set1(-inf);
  for (int64_t j = lo / 16 * 16; j < hi; j += 16)
    m = max(m, select(between(j, lo, hi), load(s + j), set1(-inf)));
  const float top = hmax(m);
  F sum = zero_f();
  for (int64_t j = tlo / 16 * 16; j < thi; j += 16) {
    const F e = exp_(mul(sub(load(s + j), set1(top)), set1(scale)));
    sum = add(sum, put_p(p + j, select(between(j, lo, hi), e, zero_f())));
  }
  return {lo < hi ? top * scale : -inf, lo < hi ? hsum(sum) : 0.0f};
}

// --- Splits into states. ---

void fold(float* state, const float* part, int rows, int dim) {
  for (int r = 0; r < rows; ++r) {
    float *m = state + r, *l = state + rows + r, *o = state + 2 * rows + r * dim;
    const float pm = part[r], pl = part[rows + r];
    const float* po = part + 2 * rows + r * dim;
    if (pl == 0.0f) continue;  // sees nothing of this split
    if (*l == 0.0f) {
      *m = pm;
      *l = pl;
      for (int d = 0; d < dim; d += 16) store(o + d, load(po + d));
      continue;
    }
    const float top = *m > pm ? *m : pm;
    alignas(64) float e[16] = {*m - top, pm - top};
    store(e, exp_(load(e)));
    const F keep = set1(e[0]), take = set1(e[1]);
    *m = top;
    *l = *l * e[0] + pl * e[1];
    for (int d = 0; d < dim; d += 16)
      store(o + d, fma(load(po + d), take, mul(load(o + d), keep)));
  }
}

void load_queries(const AttendArgs& a, int64_t row0, int rows, AttendScratch& x) {
  for (int r = 0; r < rows; ++r) {
    const int64_t row = row0 + r;
    const float* q = a.q + row / a.group * a.q_ld + row % a.group * a.dim;
    for (int d = 0; d < a.dim; d += 16) {
      if (a.fp32) store(x.q[r] + d, load(q + d));
      else store_bf16(reinterpret_cast<uint16_t*>(x.q) + r * 256 + d, load(q + d));
    }
  }
}

OCTAVO_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

// One split of a tile into `part`. Only blocks that some row sees are touched.
template <class P>
void attend_split(const AttendArgs& a, int64_t row0, int rows, int64_t split, AttendScratch& x,
                  float* part) {
  using T = typename P::T;
  const int64_t base = split * KV_SPLIT, first = a.start + row0 / a.group,
                last = a.start + (row0 + rows - 1) / a.group;
  const int64_t tlo = a.window ? clamp(first - a.window + 1 - base, 0, KV_SPLIT) : 0;
  const int64_t thi = clamp(last + 1 - base, 0, KV_SPLIT);
  Values<T> v{{}, a.dim, tlo, thi, {}};
  for (int64_t b = tlo / KV_BLOCK; b * KV_BLOCK < thi; ++b) {
    const int64_t at = base / KV_BLOCK + b, next = at < last / KV_BLOCK ? at + 1 : at;
    const T* k = reinterpret_cast<const T*>(a.kv + a.table[at] * a.block_bytes);
    const T* ahead = reinterpret_cast<const T*>(a.kv + a.table[next] * a.block_bytes);
    v.block[b] = k + a.dim * KV_BLOCK;
    const int64_t later = at + KV_SPLIT / KV_BLOCK;
    v.next[b] = later <= last / KV_BLOCK
                    ? reinterpret_cast<const T*>(a.kv + a.table[later] * a.block_bytes)
                    : ahead;
    cover_rows(rows, ScoreRows<P>{reinterpret_cast<const T*>(x.q), k, a.dim,
                                  &x.scores[0][b * KV_BLOCK], ahead});
  }
  T* p = reinterpret_cast<T*>(x.p);
  for (int r = 0; r < rows; ++r) {
    const int64_t pos = a.start + (row0 + r) / a.group;
    const int64_t hi = clamp(pos + 1 - base, 0, KV_SPLIT);
    const int64_t lo = a.window ? clamp(pos - a.window + 1 - base, 0, KV_SPLIT) : 0;
    const RowSum sum = softmax_row(x.scores[r], p + r * KV_SPLIT, a.scale, lo, hi, tlo, thi);
    part[r] = sum.max;
    part[rows + r] = sum.sum;
  }
  cover_rows(rows, ValueRows<P>{p, v, part + 2 * rows});
}

void attend(const AttendArgs& a, int64_t row0, int rows, int64_t split0, int64_t split1,
            float* state, bool fresh) {
  AttendScratch x;
  load_queries(a, row0, rows, x);
  for (int64_t s = split0; s < split1; ++s) {
    float* part = fresh ? state : x.part;
    if (a.fp32) attend_split<Full>(a, row0, rows, s, x, part);
    else attend_split<Half>(a, row0, rows, s, x, part);
    if (!fresh) fold(state, part, rows, a.dim);
    fresh = false;
  }
}

void finish(const AttendArgs& a, int64_t row0, int rows, const float* state) {
  for (int r = 0; r < rows; ++r) {
    const int64_t row = row0 + r;
    float* out = a.out + row / a.group * a.out_ld + row % a.group * a.dim;
    const F sum = set1(state[rows + r]);
    const float* o = state + 2 * rows + r * a.dim;
    for (int d = 0; d < a.dim; d += 16) store(out + d, div(load(o + d), sum));
  }
}

constexpr AttentionTable ATTENTION{attend, fold, finish};

}  // namespace
}  // namespace octavo
