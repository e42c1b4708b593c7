// Two passes inside a split: all scores, then max, exp and sum in index order, then P times V.
// A row's bits depend on its position and its keys and values only: lanes and tiles share nothing.
#include "attention.h"

namespace octavo {
namespace {

constexpr int64_t KV_BLOCK = BLOCK_TOKENS;
constexpr int64_t KV_SPLIT = SPLIT_TOKENS;
constexpr int64_t SPLIT_BLOCKS = KV_SPLIT / KV_BLOCK;

// A row of queries or of probabilities fills 256 floats' room in its cache's own format: floats,
// bf16, or pairs of int8 (256 of the first bytes, then 256 of the second).
struct AttendScratch {
  alignas(64) float scores[TILE_ROWS][KV_SPLIT];
  alignas(64) float p[TILE_ROWS][KV_SPLIT];
  alignas(64) float part[TILE_ROWS * (MAX_HEAD_DIM + 2)];
  float p_scale[TILE_ROWS];
  int32_t p_sum[TILE_ROWS][2];
};
struct Queries {
  alignas(64) float q[TILE_ROWS][MAX_HEAD_DIM];
  float scale[TILE_ROWS];  // 1 where there is none
  int32_t sum[TILE_ROWS][2];
};

// What a split reads: keys and values of its blocks, its tokens lo..hi that any row sees, and the
// keys of what comes next, which are asked for meanwhile.
struct SplitKv {
  const uint8_t* keys[SPLIT_BLOCKS];
  const uint8_t* values[SPLIT_BLOCKS];
  const uint8_t* next[SPLIT_BLOCKS];
  int64_t dim, lo, hi;
};

alignas(64) constexpr uint16_t EVEN_HALVES[32] = {
    0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff, 0,
    0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff, 0};

// --- The two products in bf16 and f32, for R rows in registers. ---
//
// A line of what will be read later is asked for with every line that is read now: of the block's
// values with its keys, of the next split's keys with the values.

struct Half {
  using T = uint16_t;
  static constexpr int64_t PAIR = 2, ROW = 512;  // elements that meet in one product; of a row
  OCTAVO_INLINE F dot(F acc, const T* kv, const T* x) { return dot_bf16(acc, load_b(kv), x); }
};
struct Full {
  using T = float;
  static constexpr int64_t PAIR = 1, ROW = 256;
  OCTAVO_INLINE F dot(F acc, const T* kv, const T* x) { return fma(load(kv), set1(*x), acc); }
};

// Scores of one block: s[r][0..32). K is [dim/PAIR][32][PAIR].
template <class P, int R>
void block_scores(const typename P::T* q, const typename P::T* k, int64_t dim, float* s) {
  F acc[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zero_f();
  for (int64_t d = 0; d < dim; d += P::PAIR) {
    const typename P::T* kd = k + d * KV_BLOCK;
    prefetch_l2(kd + dim * KV_BLOCK);
    prefetch_l2(kd + dim * KV_BLOCK + 16 * P::PAIR);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      acc[r][0] = P::dot(acc[r][0], kd, q + r * P::ROW + d);
      acc[r][1] = P::dot(acc[r][1], kd + 16 * P::PAIR, q + r * P::ROW + d);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    store(s + r * KV_SPLIT, acc[r][0]);
    store(s + r * KV_SPLIT + 16, acc[r][1]);
  }
}

// o[r][0..16 NV) of P [R][256] times V, V being [32/PAIR][dim][PAIR] in each block. In bf16 an odd
// end leaves half a pair that may be stale: it is cut out by AND, for 0 * NaN is NaN.
template <class P, int R, int NV>
void split_values(const typename P::T* p, const SplitKv& kv, int64_t d0, float* o) {
  using T = typename P::T;
  F acc[R][NV];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) acc[r][j] = zero_f();
  const int64_t whole = kv.hi / P::PAIR * P::PAIR;
  for (int64_t t = kv.lo / P::PAIR * P::PAIR; t < whole;) {
    const int64_t b = t / KV_BLOCK, end = whole < (b + 1) * KV_BLOCK ? whole : (b + 1) * KV_BLOCK;
    const int64_t from = (t % KV_BLOCK) * kv.dim + d0 * P::PAIR;
    const T* v = reinterpret_cast<const T*>(kv.values[b]) + from;
    const T* ahead = reinterpret_cast<const T*>(kv.next[b]) + from;
    for (; t < end; t += P::PAIR, v += kv.dim * P::PAIR, ahead += kv.dim * P::PAIR) {
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) prefetch_l2(ahead + j * 16 * P::PAIR);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j)
          acc[r][j] = P::dot(acc[r][j], v + j * 16 * P::PAIR, p + r * P::ROW + t);
    }
  }
  if (whole < kv.hi) {
    const T* v = reinterpret_cast<const T*>(kv.values[whole / KV_BLOCK]) +
                 (whole % KV_BLOCK) * kv.dim + d0 * P::PAIR;
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      alignas(64) T even[32];
      store_b(even, and_b(load_b(v + j * 16 * P::PAIR), load_b(EVEN_HALVES)));
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) acc[r][j] = P::dot(acc[r][j], even, p + r * P::ROW + whole);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) store(o + r * kv.dim + d0 + j * 16, acc[r][j]);
}

// --- The same in int8: x = 256 hi + lo, each byte times (value + 128), exact in int32. ---

struct Bytes {
  using T = int8_t;
};

// What int32 sums of both bytes' products mean. Each is below 2^24: floats hold it exactly.
OCTAVO_INLINE F joined(I hi, I lo) { return fma(to_f32(hi), set1(256.0f), to_f32(lo)); }

// K is [dim/4][32][4], then the scales. Rows are 1024 bytes apart.
template <int R>
void block_scores_int8(const int8_t* q, const int32_t (*sum)[2], const uint8_t* k, int64_t dim,
                       float* s) {
  I hi[R][2], lo[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    hi[r][0] = hi[r][1] = set1(-128 * sum[r][0]);
    lo[r][0] = lo[r][1] = set1(-128 * sum[r][1]);
  }
  const int64_t values = KV_BLOCK * dim + 2 * KV_BLOCK;
  prefetch_l2(k + values + KV_BLOCK * dim);
  for (int64_t d = 0; d < dim; d += 4) {
    const uint8_t* kd = k + d * KV_BLOCK;
    prefetch_l2(kd + values);
    prefetch_l2(kd + values + 64);
    const B k0 = load_b(kd), k1 = load_b(kd + 64);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const int8_t* x = q + r * 1024 + d;
      hi[r][0] = dot_u8s8(hi[r][0], k0, x);
      hi[r][1] = dot_u8s8(hi[r][1], k1, x);
      lo[r][0] = dot_u8s8(lo[r][0], k0, x + 256);
      lo[r][1] = dot_u8s8(lo[r][1], k1, x + 256);
    }
  }
  const auto* scales = reinterpret_cast<const uint16_t*>(k + KV_BLOCK * dim);
#pragma GCC unroll 4
  for (int i = 0; i < 2; ++i) {
    const F scale = load_bf16(scales + 16 * i);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
      store(s + r * KV_SPLIT + 16 * i, mul(joined(hi[r][i], lo[r][i]), scale));
  }
}

// V is [8][dim][4] in each block; the tokens' scales are in p already.
template <int R, int NV>
void split_values_int8(const int8_t* p, const int32_t (*sum)[2], const float* scale,
                       const SplitKv& kv, int64_t d0, float* o) {
  I hi[R][NV], lo[R][NV];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      hi[r][j] = set1(-128 * sum[r][0]);
      lo[r][j] = set1(-128 * sum[r][1]);
    }
  for (int64_t t = kv.lo / 4 * 4; t < kv.hi;) {
    const int64_t b = t / KV_BLOCK, end = kv.hi < (b + 1) * KV_BLOCK ? kv.hi : (b + 1) * KV_BLOCK;
    const int64_t from = (t % KV_BLOCK) * kv.dim + d0 * 4;
    const uint8_t *v = kv.values[b] + from, *ahead = kv.next[b] + from;
    prefetch_l2(kv.next[b] + KV_BLOCK * kv.dim);
    for (; t < end; t += 4, v += 4 * kv.dim, ahead += 4 * kv.dim)
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) {
        prefetch_l2(ahead + 64 * j);
        const B line = load_b(v + 64 * j);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          hi[r][j] = dot_u8s8(hi[r][j], line, p + r * 1024 + t);
          lo[r][j] = dot_u8s8(lo[r][j], line, p + r * 1024 + t + 256);
        }
      }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j)
      store(o + r * kv.dim + d0 + j * 16, mul(joined(hi[r][j], lo[r][j]), set1(scale[r])));
}

// --- The same for any number of rows and dims. Registers: 2 R or NV R accumulators. ---

#ifdef __AVX512F__
constexpr int WIDE_ROWS = 12;
#else
constexpr int WIDE_ROWS = 4;
#endif

template <class P, int R>
void all_values(const AttendScratch& x, int row, const SplitKv& kv, float* o) {
  constexpr bool INT8 = sizeof(typename P::T) == 1;
  constexpr int WIDE = INT8 ? (R <= 3 ? 4 : R <= 6 ? 2 : 1) : R <= 6 ? 4 : 2;
  const auto* p = reinterpret_cast<const typename P::T*>(x.p[row]);
  auto some = [&]<int NV>(int64_t d) {
    if constexpr (INT8) split_values_int8<R, NV>(p, x.p_sum + row, x.p_scale + row, kv, d, o);
    else split_values<P, R, NV>(p, kv, d, o);
  };
  int64_t d = 0;
  for (; d + 16 * WIDE <= kv.dim; d += 16 * WIDE) some.template operator()<WIDE>(d);
  if (WIDE == 4 && d + 32 <= kv.dim) {
    some.template operator()<2>(d);
    d += 32;
  }
  if (WIDE > 1 && d < kv.dim) some.template operator()<1>(d);
}

// Calls f.template run<R>(r) so that the R's cover rows 0..rows.
template <int MOST, class Fn>
OCTAVO_INLINE void cover_rows(int rows, const Fn& f) {
  int r = 0;
  if constexpr (MOST >= 12)
    for (; rows - r >= 12; r += 12) f.template run<12>(r);
  if constexpr (MOST >= 8) {
    for (; rows - r >= 8; r += 8) f.template run<8>(r);
    if (rows - r >= 7) f.template run<7>(r), r += 7;
  }
  if constexpr (MOST >= 6) {
    for (; rows - r >= 6; r += 6) f.template run<6>(r);
    if (rows - r >= 5) f.template run<5>(r), r += 5;
  }
  for (; rows - r >= 4; r += 4) f.template run<4>(r);
  if (rows - r >= 3) f.template run<3>(r), r += 3;
  if (rows - r >= 2) f.template run<2>(r), r += 2;
  if (rows - r >= 1) f.template run<1>(r);
}

template <class P>
struct ScoreRows {
  const Queries& queries;
  AttendScratch& x;
  const uint8_t* keys;
  int64_t dim, at;  // at: the block's first token in the split
  template <int R>
  void run(int r) const {
    const auto* q = reinterpret_cast<const typename P::T*>(queries.q[r]);
    float* s = &x.scores[r][at];
    if constexpr (sizeof(typename P::T) == 1)
      block_scores_int8<R>(q, queries.sum + r, keys, dim, s);
    else
      block_scores<P, R>(q, reinterpret_cast<const typename P::T*>(keys), dim, s);
  }
};

template <class P>
struct ValueRows {
  const AttendScratch& x;
  const SplitKv& kv;
  float* o;
  template <int R>
  void run(int r) const { all_values<P, R>(x, r, kv, o + r * kv.dim); }
};

// --- Softmax of one row over the tokens lo..hi of a split; P is written over tlo..thi. ---

constexpr float LOG2_E = 1.44269504f;

// max is in powers of two.
struct RowSum {
  float max, sum;
};

OCTAVO_INLINE M between(int64_t j, int64_t lo, int64_t hi) {
  const I i = add(iota(), set1(static_cast<int32_t>(j)));
  return and_(lt(i, set1(static_cast<int32_t>(hi))), gt(i, set1(static_cast<int32_t>(lo - 1))));
}
OCTAVO_INLINE F within(F x, int64_t j, int64_t lo, int64_t hi, float otherwise) {
  if (j >= lo && j + 16 <= hi) return x;
  return select(between(j, lo, hi), x, set1(otherwise));
}

OCTAVO_INLINE float top_score(const float* s, int64_t lo, int64_t hi) {
  const float inf = __builtin_inff();
  F m = set1(-inf);
  for (int64_t j = lo / 16 * 16; j < hi; j += 16) m = max(m, within(load(s + j), j, lo, hi, -inf));
  return hmax(m);
}

OCTAVO_INLINE F put_p(uint16_t* p, F x) {
  store_bf16(p, x);
  return load_bf16(p);  // the sum is of what will be multiplied
}
OCTAVO_INLINE F put_p(float* p, F x) {
  store(p, x);
  return x;
}

struct Span {
  int64_t lo, hi;  // what the row sees
};

template <class P>
RowSum softmax_row(AttendScratch& x, int row, float scale, Span see, const SplitKv& kv) {
  const float* s = x.scores[row];
  auto* p = reinterpret_cast<typename P::T*>(x.p[row]);
  if (see.lo >= see.hi) {
    for (int64_t j = kv.lo / 16 * 16; j < kv.hi; j += 16) put_p(p + j, zero_f());
    return {-__builtin_inff(), 0.0f};
  }
  const float top = top_score(s, see.lo, see.hi) * scale;
  F sum = zero_f();
  for (int64_t j = kv.lo / 16 * 16; j < kv.hi; j += 16) {
    const F e = exp2_(fma(load(s + j), set1(scale), set1(-top)));
    sum = add(sum, put_p(p + j, within(e, j, see.lo, see.hi, 0.0f)));
  }
  return {top, hsum(sum)};
}

constexpr float PAIR_MOST = 32512.0f;  // 127 * 256: the first byte is at most 127

// 256 hi + lo = round(x / scale): writes 16 of each, and adds them to the sums.
OCTAVO_INLINE void put_pair(int8_t* out, F x, F inverse, I* sums) {
  const I n = to_i32(mul(x, inverse));
  const I hi = shr<8>(add(n, set1(128))), lo = sub(n, shl<8>(hi));
  store_i8(out, hi);
  store_i8(out + 256, lo);
  sums[0] = add(sums[0], hi);
  sums[1] = add(sums[1], lo);
}

// The tokens' scales of V go into P, after the sum.
template <>
[[maybe_unused]] RowSum softmax_row<Bytes>(AttendScratch& x, int row, float scale, Span see,
                                           const SplitKv& kv) {
  float* s = x.scores[row];
  auto* p = reinterpret_cast<int8_t*>(x.p[row]);
  const bool any = see.lo < see.hi;
  const float top = any ? top_score(s, see.lo, see.hi) * scale : -__builtin_inff();
  F sum = zero_f(), most = zero_f();
  const int64_t begin = kv.lo / 16 * 16;
  for (int64_t j = begin; any && j < kv.hi; j += 16) {
    const uint8_t* scales = kv.values[j / KV_BLOCK] + KV_BLOCK * kv.dim + 2 * (j % KV_BLOCK);
    const F e = within(exp2_(fma(load(s + j), set1(scale), set1(-top))), j, see.lo, see.hi, 0.0f);
    const F scaled = mul(e, load_bf16(reinterpret_cast<const uint16_t*>(scales)));
    const F w = within(scaled, j, see.lo, see.hi, 0.0f);
    sum = add(sum, e);
    most = max(most, w);
    store(s + j, w);
  }
  const float widest = any ? hmax(most) : 0.0f;
  const F inverse = set1(widest > 0.0f ? PAIR_MOST / widest : 0.0f);
  I sums[2] = {zero_i(), zero_i()};
  for (int64_t j = begin; j < kv.hi; j += 16)
    put_pair(p + j, any ? load(s + j) : zero_f(), inverse, sums);
  x.p_scale[row] = widest / PAIR_MOST;
  x.p_sum[row][0] = hsum(sums[0]);
  x.p_sum[row][1] = hsum(sums[1]);
  return {top, any ? hsum(sum) : 0.0f};
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
    store(e, exp2_(load(e)));
    const F keep = set1(e[0]), take = set1(e[1]);
    *m = top;
    *l = *l * e[0] + pl * e[1];
    for (int d = 0; d < dim; d += 16)
      store(o + d, fma(load(po + d), take, mul(load(o + d), keep)));
  }
}

void load_query_int8(const float* q, int64_t dim, Queries& x, int row) {
  F most = zero_f();
  for (int64_t d = 0; d < dim; d += 16) most = max(most, abs(load(q + d)));
  const float widest = hmax(most);
  const F inverse = set1(widest > 0.0f ? PAIR_MOST / widest : 0.0f);
  I sums[2] = {zero_i(), zero_i()};
  for (int64_t d = 0; d < dim; d += 16)
    put_pair(reinterpret_cast<int8_t*>(x.q[row]) + d, load(q + d), inverse, sums);
  x.scale[row] = widest / PAIR_MOST;
  x.sum[row][0] = hsum(sums[0]);
  x.sum[row][1] = hsum(sums[1]);
}

void load_queries(const AttendArgs& a, int64_t row0, int rows, Queries& x) {
  for (int r = 0; r < rows; ++r) {
    const int64_t row = row0 + r;
    const float* q = a.q + row / a.group * a.q_ld + row % a.group * a.dim;
    x.scale[r] = 1.0f;
    if (a.type == KvType::INT8) {
      load_query_int8(q, a.dim, x, r);
      continue;
    }
    for (int d = 0; d < a.dim; d += 16) {
      if (a.type == KvType::F32) store(x.q[r] + d, load(q + d));
      else store_bf16(reinterpret_cast<uint16_t*>(x.q[r]) + d, load(q + d));
    }
  }
}

OCTAVO_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

// The tokens of a split that rows row0 .. row0+rows see.
OCTAVO_INLINE Span seen(const AttendArgs& a, int64_t row0, int64_t rows, int64_t split) {
  const int64_t base = split * KV_SPLIT, first = a.start + row0 / a.group;
  const int64_t last = a.start + (row0 + rows - 1) / a.group;
  return {a.window ? clamp(first - a.window + 1 - base, 0, KV_SPLIT) : 0,
          clamp(last + 1 - base, 0, KV_SPLIT)};
}

SplitKv split_kv(const AttendArgs& a, int64_t row0, int rows, int64_t split, const Upcoming& next) {
  const Span see = seen(a, row0, rows, split);
  SplitKv kv{{}, {}, {}, a.dim, see.lo, see.hi};
  for (int64_t b = see.lo / KV_BLOCK; b * KV_BLOCK < see.hi; ++b) {
    const int64_t at = split * SPLIT_BLOCKS + b;
    kv.keys[b] = a.kv + a.table[at] * a.block_bytes;
    kv.values[b] = kv.keys[b] + a.half_bytes;
    // Where there is nothing more, what is at hand: asking for it again costs little.
    const int64_t there = next.begin + b < next.end ? next.begin + b : next.end - 1;
    kv.next[b] = next.kv ? next.kv + next.table[there] * a.block_bytes : kv.values[b];
  }
  return kv;
}

// One split of a tile into `part`. Only blocks that some row sees are touched.
template <class P>
void attend_split(const AttendArgs& a, int64_t row0, int rows, int64_t split, const SplitKv& kv,
                  const Queries& q, AttendScratch& x, float* part) {
  constexpr int MOST = sizeof(typename P::T) == 1 && WIDE_ROWS > 6 ? 6 : WIDE_ROWS;
  for (int64_t b = kv.lo / KV_BLOCK; b * KV_BLOCK < kv.hi; ++b)
    cover_rows<MOST>(rows, ScoreRows<P>{q, x, kv.keys[b], a.dim, b * KV_BLOCK});
  for (int r = 0; r < rows; ++r) {
    const float scale = a.scale * LOG2_E * q.scale[r];
    const RowSum sum = softmax_row<P>(x, r, scale, seen(a, row0 + r, 1, split), kv);
    part[r] = sum.max;
    part[rows + r] = sum.sum;
  }
  cover_rows<WIDE_ROWS>(rows, ValueRows<P>{x, kv, part + 2 * rows});
}

// Split by split, all tiles with each, so that keys and values come from the second cache for all
// tiles but the first.
template <class P>
void attend_as(const AttendArgs& a, int64_t row0, int rows, SplitRange splits,
               const Upcoming& next, float* state) {
  AttendScratch x;
  Queries queries[UNIT_TILES];
  const int64_t last = (a.start + (row0 + rows - 1) / a.group) / KV_BLOCK;
  const int64_t stride = TILE_ROWS * (a.dim + 2);
  for (int r = 0; r < rows; r += TILE_ROWS)
    load_queries(a, row0 + r, rows - r < TILE_ROWS ? rows - r : TILE_ROWS, queries[r / TILE_ROWS]);
  bool begun[UNIT_TILES] = {};
  for (int64_t s = splits.begin; s < splits.end; ++s) {
    const Upcoming own{a.kv, a.table, (s + 1) * SPLIT_BLOCKS, last + 1};
    for (int r = 0; r < rows; r += TILE_ROWS) {
      const int tile = r / TILE_ROWS, n = rows - r < TILE_ROWS ? rows - r : TILE_ROWS;
      const SplitKv kv = split_kv(a, row0 + r, n, s, s + 1 < splits.end ? own : next);
      if (kv.lo >= kv.hi) continue;  // this tile sees nothing of it
      float *whole = state + tile * stride, *part = begun[tile] ? x.part : whole;
      const Queries& q = queries[tile];
      attend_split<P>(a, row0 + r, n, s, kv, q, x, part);
      if (begun[tile]) fold(whole, part, n, a.dim);
      begun[tile] = true;
    }
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

}  // namespace
}  // namespace octavo
