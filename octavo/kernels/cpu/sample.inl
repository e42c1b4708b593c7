// Choosing and scoring one token; octavo/runtime/sampling.py says what is computed and in which
// order. Ids are walked in blocks of 256 = 16 vectors. The highest logit of each lane of each block
// (of 16 ids) is kept, so that looking for the few likely ids touches few blocks: a bound that k of
// these maxima reach is reached by at least k ids. Bounds only gather candidates; which are kept is
// then decided exactly, in the order (logit falling, id rising).
//
// Sums run in one order: 16 lanes by 4 accumulators in a block, relative to its own highest logit;
// blocks in double, in order. So every result depends on the row alone.
#include <float.h>
#include <math.h>

#include "sample.h"

namespace octavo {
namespace {
namespace sampling {

constexpr int64_t LANES = 16, BLOCK = SAMPLE_BLOCK;
constexpr float POS_INF = __builtin_inff();

OCTAVO_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
OCTAVO_INLINE int64_t num_blocks(int64_t n) { return (n + BLOCK - 1) / BLOCK; }

// The scratch, carved. Sizes in elements for n ids padded to whole blocks.
struct Scratch {
  uint64_t *keys, *spare;           // [n] each
  float *adjusted, *weights;        // [n] each, by id
  float *list_logit, *list_weight;  // [n] each: candidates in rising order of id
  int32_t* list_id;                 // [n]
  float *maxima, *adjusted_maxima;  // [n / 16] each
  float* sums;                      // [n / 256]
  float *tops, *plain, *warped;     // [n / 256] each: digest of logits that come whole
  float *adjusted_tops, *adjusted_plain, *adjusted_warped;
  uint8_t* bits;                    // [n / 8]
};

template <class T> OCTAVO_INLINE T* carve(uint8_t*& at, int64_t count) {
  T* p = reinterpret_cast<T*>(at);
  at += count * static_cast<int64_t>(sizeof(T));
  return p;
}

static Scratch carve_all(void* memory, int64_t vocab) {
  const int64_t n = num_blocks(vocab) * BLOCK;
  uint8_t* at = static_cast<uint8_t*>(memory);
  Scratch s;
  s.keys = carve<uint64_t>(at, n);
  s.spare = carve<uint64_t>(at, n);
  s.adjusted = carve<float>(at, n);
  s.weights = carve<float>(at, n);
  s.list_logit = carve<float>(at, n);
  s.list_weight = carve<float>(at, n);
  s.list_id = carve<int32_t>(at, n);
  s.maxima = carve<float>(at, n / 16);
  s.adjusted_maxima = carve<float>(at, n / 16);
  s.sums = carve<float>(at, n / 256);
  s.tops = carve<float>(at, n / 256);
  s.plain = carve<float>(at, n / 256);
  s.warped = carve<float>(at, n / 256);
  s.adjusted_tops = carve<float>(at, n / 256);
  s.adjusted_plain = carve<float>(at, n / 256);
  s.adjusted_warped = carve<float>(at, n / 256);
  s.bits = carve<uint8_t>(at, n / 8);
  return s;
}

// Logits of one row as digested.
struct Field {
  const float* logit;
  int64_t n;
  const float* maxima;
  const float *tops, *plain, *warped;
  float top;
  int32_t top_id;
};

// f(x, first id) for each vector of ids [first, after); ids beyond have logit -inf.
template <class Fn>
OCTAVO_INLINE void each_vector(const float* logit, int64_t first, int64_t after, Fn f) {
  int64_t i = first;
  for (; i + LANES <= after; i += LANES) f(load(logit + i), i);
  if (i < after)
    f(select(first_n(after - i), load_n(logit + i, after - i), set1(-POS_INF)), i);
}

// --- Philox4x32-10, Salmon et al. 2011 -----------------------------------------------------------

static void philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  uint32_t k0 = key[0], k1 = key[1];
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}

// In [0, 1), 53 bits.
static double uniform(const SampleRow& row) {
  const uint32_t counter[4] = {static_cast<uint32_t>(row.position),
                               static_cast<uint32_t>(row.choice), 0, 0};
  const uint32_t key[2] = {static_cast<uint32_t>(row.seed), static_cast<uint32_t>(row.seed >> 32)};
  uint32_t r[4];
  philox(counter, key, r);
  return static_cast<double>((uint64_t(r[1]) << 32 | r[0]) >> 11) * 0x1p-53;
}

// --- Passes over all ids -------------------------------------------------------------------------

// The lowest id whose logit is `value`, or is NaN if value is; n if none.
static int64_t find(const float* logit, int64_t n, float value) {
  const F v = set1(value);
  const bool nan = value != value;
  for (int64_t b = 0; b < num_blocks(n); ++b) {
    int64_t found = n;
    each_vector(logit, b * BLOCK, least(n, (b + 1) * BLOCK), [&](F x, int64_t i) {
      const uint32_t hit = bits(nan ? ne(x, x) : eq(x, v));
      if (hit != 0 && found == n) found = i + __builtin_ctz(hit);
    });
    if (found < n) return found;
  }
  return n;
}

// exponent = (logit - top) / T; scale = log2(e) / T.
struct Warp {
  float top, inv_t, scale;
};
OCTAVO_INLINE F exponent(F x, const Warp& w) { return mul(sub(x, set1(w.top)), set1(w.inv_t)); }
OCTAVO_INLINE float exponent(float x, const Warp& w) { return (x - w.top) * w.inv_t; }

constexpr float LOG2_E = 1.44269504f, LEAST_EXPONENT = -125;

// exp(exponent) for logits up to top, where it is exactly 1; 0 where log2 of it is below `limit`,
// which is LEAST_EXPONENT or more. exp_ serves any argument and takes half as long again. Relative
// error 2e-7 and that of a rounded exponent.
OCTAVO_INLINE F weight(F x, const Warp& warp, F limit) {
  const F y = mul(sub(x, set1(warp.top)), set1(warp.scale));
  const I n = to_i32(y);
  const F r = sub(y, to_f32(n));
  F p = fma(r, set1(0.00132645903f), set1(0.00967161903f));
  p = fma(p, r, set1(0.0555073503f));
  p = fma(p, r, set1(0.240222405f));
  p = fma(p, r, set1(0.693146976f));
  p = fma(p, r, set1(1.0f));
  const F w = bitcast_f(add(bitcast_i(p), shl<23>(n)));
  return select(ge(y, limit), w, zero_f());
}

static float limit_of(float floor) {
  const float limit = floor > 0 ? static_cast<float>(log(floor)) * LOG2_E : LEAST_EXPONENT;
  return limit > LEAST_EXPONENT ? limit : LEAST_EXPONENT;
}

// Weights of at most a block of logits, those below the limit 0, handed to use(w, place); returns
// their sum.
template <class Fn>
OCTAVO_INLINE float weigh(const float* logit, int64_t n, const Warp& warp, F limit, Fn use) {
  const auto one = [&](F x, int64_t i) {
    const F w = weight(x, warp, limit);
    use(w, i);
    return w;
  };
  F s0 = zero_f(), s1 = zero_f(), s2 = zero_f(), s3 = zero_f();
  int64_t i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES) {
    s0 = add(s0, one(load(logit + i), i));
    s1 = add(s1, one(load(logit + i + LANES), i + LANES));
    s2 = add(s2, one(load(logit + i + 2 * LANES), i + 2 * LANES));
    s3 = add(s3, one(load(logit + i + 3 * LANES), i + 3 * LANES));
  }
  each_vector(logit, i, n, [&](F x, int64_t at) { s0 = add(s0, one(x, at)); });
  return hsum(add(add(s0, s1), add(s2, s3)));
}

// Of block b, handed to use(w, first id).
template <class Fn>
OCTAVO_INLINE float weigh(const Field& f, const Warp& warp, F limit, int64_t b, Fn use) {
  const int64_t first = b * BLOCK;
  return weigh(f.logit + first, least(BLOCK, f.n - first), warp, limit,
               [&](F w, int64_t i) { use(w, first + i); });
}

// Sum of all weights; sums[b] is block b's. Weights are kept only where `weights` is given.
static double weigh_all(const Field& f, const Warp& warp, float floor, float* weights,
                        float* sums) {
  const F limit = set1(limit_of(floor));
  double total = 0;
  for (int64_t b = 0; b < num_blocks(f.n); ++b) {
    sums[b] = weights == nullptr
                  ? weigh(f, warp, limit, b, [](F, int64_t) {})
                  : weigh(f, warp, limit, b, [&](F w, int64_t i) { store(weights + i, w); });
    total += static_cast<double>(sums[b]);
  }
  return total;
}

// The same from the digest, as far as its own sums go: no logit is read.
static double total_of(const Field& f, const Warp& warp, const float* block_sums, float* sums) {
  const F limit = set1(LEAST_EXPONENT);
  const int64_t blocks = num_blocks(f.n);
  for (int64_t b = 0; b < blocks; b += LANES) {
    const int64_t n = least(LANES, blocks - b);
    const F w = weight(load_n(f.tops + b, n), warp, limit);
    store_n(sums + b, mul(w, load_n(block_sums + b, n)), n);
  }
  double total = 0;
  for (int64_t b = 0; b < blocks; ++b) total += static_cast<double>(sums[b]);
  return total;
}

struct Amount {
  double mass;
  int64_t count;
};

// Of the ids with logit >= bound.
static Amount amount_above(const Field& f, const float* weights, float bound) {
  const F low = set1(bound);
  I count = zero_i();
  Amount a = {0, 0};
  for (int64_t b = 0; b < num_blocks(f.n); ++b) {
    if (!any(ge(load(f.maxima + b * LANES), low))) continue;
    F sum = zero_f();
    each_vector(f.logit, b * BLOCK, least(f.n, (b + 1) * BLOCK), [&](F x, int64_t i) {
      const M in = ge(x, low);
      sum = add(sum, select(in, load(weights + i), zero_f()));
      count = add(count, select(in, set1(1), zero_i()));
    });
    a.mass += static_cast<double>(hsum(sum));
  }
  a.count = hsum(count);
  return a;
}

// Of the ids whose exponent is within `radius` of `centre`.
static Amount amount_near(const Field& f, const Warp& warp, const float* weights, float centre,
                     float radius) {
  I count = zero_i();
  Amount a = {0, 0};
  for (int64_t b = 0; b < num_blocks(f.n); ++b) {
    F sum = zero_f();
    each_vector(f.logit, b * BLOCK, least(f.n, (b + 1) * BLOCK), [&](F x, int64_t i) {
      const M in = le(abs(sub(exponent(x, warp), set1(centre))), set1(radius));
      sum = add(sum, select(in, load(weights + i), zero_f()));
      count = add(count, select(in, set1(1), zero_i()));
    });
    a.mass += static_cast<double>(hsum(sum));
  }
  a.count = hsum(count);
  return a;
}

static int64_t count_above(const float* x, int64_t n, float bound) {
  const F low = set1(bound);
  I count = zero_i();
  each_vector(x, 0, n, [&](F v, int64_t) {
    count = add(count, select(ge(v, low), set1(1), zero_i()));
  });
  return hsum(count);
}

// --- A row's digest, block by block ---------------------------------------------------------------

static Warp warp_of(float top, float temperature) {
  const float most = FLT_MAX / LOG2_E, inv_t = 1.0f / temperature;
  const float finite = inv_t < most ? inv_t : most;
  return {top, finite, finite * LOG2_E};
}

// Whether the choice is made among the model's own logits.
static bool penalised(const SampleRow& r) {
  return r.num_history > 0 && (r.repetition != 1 || r.presence != 0 || r.frequency != 0);
}
static bool untouched(const SampleRow& r) {
  return !penalised(r) && r.num_bias == 0 && r.num_allowed == 0 && r.num_banned == 0 &&
         r.num_suppress == 0 && r.mask_bytes == 0;
}

// Whether choosing begins with the sum over all ids.
static bool sums_warped(const SampleRow& r, int64_t vocab) {
  const bool listed = (r.top_k > 0 && r.top_k < vocab) || r.typical_p < 1;
  return r.temperature > 0 && !listed && (r.top_p < 1 || !(r.min_p > 0));
}

static uint32_t needs(const SampleRow& r, int64_t vocab) {
  const bool chooses = r.temperature >= 0, scores = r.target >= 0;
  uint32_t all = 0;
  if (scores || (chooses && r.num_logprobs >= 0)) all |= SUM_PLAIN;
  if (scores || !chooses || r.temperature > 0 || r.num_logprobs > 0 || !untouched(r))
    all |= KEEP_LOGITS;
  if (sums_warped(r, vocab) && untouched(r)) all |= SUM_WARPED;
  return all;
}

OCTAVO_INLINE LogitBest better(const LogitBest& a, const LogitBest& b) {
  const bool bad_a = a.top != a.top, bad_b = b.top != b.top;
  if (bad_a != bad_b) return bad_a ? a : b;
  if (!bad_a && a.top != b.top) return a.top > b.top ? a : b;
  return a.id < b.id ? a : b;
}

// The sums of one block whose highest logit is `top`.
static void sum_block(const float* x, int64_t n, int64_t block, float top, const SampleRow& row,
                      const LogitRow& into) {
  const F limit = set1(LEAST_EXPONENT);
  const auto ignore = [](F, int64_t) {};
  into.tops[block] = top;
  if (into.needs & SUM_PLAIN) into.plain[block] = weigh(x, n, warp_of(top, 1), limit, ignore);
  if (into.needs & SUM_WARPED)
    into.warped[block] = row.temperature == 1 && (into.needs & SUM_PLAIN)
                             ? into.plain[block]
                             : weigh(x, n, warp_of(top, row.temperature), limit, ignore);
}

static void digest_block(const float* x, int64_t n, int64_t block, const SampleRow& row,
                         const LogitRow& into, LogitBest* best) {
  F high = set1(-POS_INF);
  M bad = ne(set1(0.0f), set1(0.0f));
  each_vector(x, 0, n, [&](F v, int64_t i) {
    bad = or_(bad, ne(v, v));
    high = max(v, high);
    if (into.logits != nullptr && i + LANES <= n) store(into.logits + block * BLOCK + i, v);
  });
  const int64_t whole = n / LANES * LANES;
  if (into.logits != nullptr && whole < n)
    store_n(into.logits + block * BLOCK + whole, load_n(x + whole, n - whole), n - whole);
  if (into.needs & KEEP_LOGITS) store(into.maxima + block * LANES, high);
  const bool broke = any(bad) && best->top == best->top;
  if (broke || any(gt(high, set1(best->top)))) {
    const float top = broke ? __builtin_nanf("") : hmax(high);
    *best = {top, static_cast<int32_t>(block * BLOCK + find(x, n, top))};
  }
  if (into.needs & (SUM_PLAIN | SUM_WARPED)) sum_block(x, n, block, hmax(high), row, into);
}

static void digest(const float* logits, int64_t first, int64_t count, const SampleRow* row,
                   const LogitRow* into, LogitBest* best) {
  for (int64_t i = 0; i < count; i += BLOCK)
    digest_block(logits + i, least(BLOCK, count - i), (first + i) / BLOCK, *row, *into, best);
}

static Field field_of(const LogitRow& d, int64_t vocab, const LogitBest& best) {
  return {d.logits, vocab, d.maxima, d.tops, d.plain, d.warped, best.top, best.id};
}

// Of logits that lie there whole: into.logits is null.
static Field digest_all(const float* logits, int64_t vocab, const SampleRow& row,
                        const LogitRow& into) {
  LogitBest best = {-POS_INF, 0};
  digest(logits, 0, vocab, &row, &into, &best);
  Field f = field_of(into, vocab, best);
  f.logit = logits;
  return f;
}

static Field digest_whole(const float* logits, int64_t vocab, const SampleRow& row,
                          const Scratch& s) {
  const LogitRow into = {needs(row, vocab), nullptr, s.maxima, s.tops, s.plain, s.warped};
  return digest_all(logits, vocab, row, into);
}

// --- Bounds that gather enough candidates, and not many more -------------------------------------

OCTAVO_INLINE float middle(float low, float high) { return 0.5f * low + 0.5f * high; }

// A bound reached by at least k of x, seldom by many more; -FLT_MAX if fewer than k are finite.
static float bound_of_count(const float* x, int64_t n, float top, int64_t k) {
  if (count_above(x, n, top) >= k) return top;
  float high = top, low = top, step = 1.0f;
  while (count_above(x, n, low) < k) {
    if (low == -FLT_MAX) return low;
    high = low;
    low = top - step;
    if (!(low >= -FLT_MAX)) low = -FLT_MAX;
    step *= 2;
  }
  for (int i = 0; i < 24; ++i) {
    const float mid = middle(low, high);
    if (!(mid > low && mid < high)) break;
    const int64_t count = count_above(x, n, mid);
    if (count >= k) low = mid; else high = mid;
    if (count >= k && count <= k + k / 4 + 8) break;
  }
  return low;
}

// Maxima are 16 times fewer than logits, and serve as long as k is well below their number.
static float bound_of_count(const Field& f, int64_t k) {
  const int64_t num_maxima = num_blocks(f.n) * LANES;
  if (k <= num_maxima / 4) {
    const float bound = bound_of_count(f.maxima, num_maxima, f.top, k);
    if (bound > -FLT_MAX) return bound;
  }
  return bound_of_count(f.logit, f.n, f.top, k);
}

// The ids at which the mass of those above reaches `mass` have logits in [low, high): at least
// `mass` lies at or above low, `above` and less than `mass` at or above high.
struct Bracket {
  float low, high;
  double above;
};

// Starts from a bound known to have less, of `total` in all. Narrows where the logarithm of what
// lies below would cross if it were linear, aiming beyond that on the side that was not moved last,
// until sorting what is left between costs less than another pass.
static Bracket bracket_mass(const Field& f, const Warp& warp, const float* weights, double total,
                            double mass, float bound) {
  const float unit = 1.0f / warp.inv_t;
  Amount low_amount, high_amount = amount_above(f, weights, bound);
  float low = bound, high = bound, step = 4 * unit;
  for (;;) {
    low = low - step >= -FLT_MAX && step < 128 * unit ? low - step : -FLT_MAX;
    low_amount = amount_above(f, weights, low);
    if (low_amount.mass >= mass || low == -FLT_MAX) break;
    high = low;
    high_amount = low_amount;
    step *= 2;
  }
  bool moved_low = true;
  for (int i = 0; i < 16; ++i) {
    const int64_t between = low_amount.count - high_amount.count;
    if (between <= f.n / 64 + 64) break;
    const auto below = [&](double above) {
      return log(total - above > 1e-9 * total ? total - above : 1e-9 * total);
    };
    const double share = (below(mass) - below(low_amount.mass)) /
                         (below(high_amount.mass) - below(low_amount.mass));
    const double aside = static_cast<double>(f.n) / 256 / static_cast<double>(between);
    const double part = share + (moved_low ? aside : -aside);
    const float mid = low + (high - low) * static_cast<float>(part < 0.05   ? 0.05
                                                              : part > 0.95 ? 0.95
                                                                            : part);
    if (!(mid > low && mid < high)) break;
    const Amount amount = amount_above(f, weights, mid);
    moved_low = amount.mass >= mass;
    (moved_low ? low : high) = mid;
    (moved_low ? low_amount : high_amount) = amount;
  }
  return {low, high, high_amount.mass};
}

// --- The list of candidates ----------------------------------------------------------------------

// `size` candidates in rising order of id; once sorted, ranks [first, after) of `order` are kept.
struct List {
  const Scratch* s;
  int64_t size;
  const uint64_t* order;  // key: falling logit above, place in the list below
  int64_t first, after;
};

OCTAVO_INLINE uint64_t key_of(float logit, int64_t place) {
  logit += 0.0f;  // -0 and 0 are equal
  int32_t i;
  __builtin_memcpy(&i, &logit, 4);
  const uint32_t rising = static_cast<uint32_t>(i) ^ (static_cast<uint32_t>(i >> 31) | 0x80000000u);
  return static_cast<uint64_t>(~rising) << 32 | static_cast<uint64_t>(place);
}
OCTAVO_INLINE int64_t place_of(const List& list, int64_t rank) {
  return static_cast<int64_t>(list.order[rank] & 0xffffffffu);
}
OCTAVO_INLINE float weight_of(const List& list, int64_t rank) {
  return list.s->list_weight[place_of(list, rank)];
}

// Appends to the list the ids of block b that `in` chooses.
template <class Fn>
OCTAVO_INLINE int64_t gather(const Field& f, const Scratch& s, int64_t b, int64_t size,
                               Fn in) {
  each_vector(f.logit, b * BLOCK, least(f.n, (b + 1) * BLOCK), [&](F x, int64_t i) {
    for (uint32_t hit = bits(in(x)); hit != 0; hit &= hit - 1) {
      const int64_t id = i + __builtin_ctz(hit);
      s.list_logit[size] = f.logit[id];
      s.list_id[size++] = static_cast<int32_t>(id);
    }
  });
  return size;
}

// The ids with logit >= bound.
static List gather_above(const Field& f, const Scratch& s, float bound) {
  const F low = set1(bound);
  int64_t size = 0;
  for (int64_t b = 0; b < num_blocks(f.n); ++b)
    if (any(ge(load(f.maxima + b * LANES), low)))
      size = gather(f, s, b, size, [&](F x) { return ge(x, low); });
  return {&s, size, nullptr, 0, size};
}

// The ids with low <= logit < high.
static List gather_between(const Field& f, const Scratch& s, float low, float high) {
  const F from = set1(low), to = set1(high);
  int64_t size = 0;
  for (int64_t b = 0; b < num_blocks(f.n); ++b)
    if (any(ge(load(f.maxima + b * LANES), from)))
      size = gather(f, s, b, size, [&](F x) { return and_(ge(x, from), lt(x, to)); });
  return {&s, size, nullptr, 0, size};
}

static List gather_near(const Field& f, const Scratch& s, const Warp& warp, float centre,
                          float radius) {
  int64_t size = 0;
  for (int64_t b = 0; b < num_blocks(f.n); ++b)
    size = gather(f, s, b, size, [&](F x) {
      return and_(le(abs(sub(exponent(x, warp), set1(centre))), set1(radius)),
                  ge(x, set1(-FLT_MAX)));
    });
  return {&s, size, nullptr, 0, size};
}

static void weigh(const List& list, const Warp& warp) {
  const Scratch& s = *list.s;
  const F limit = set1(LEAST_EXPONENT);
  for (int64_t i = 0; i < list.size; i += LANES) {
    const int64_t n = least(LANES, list.size - i);
    store_n(s.list_weight + i, weight(load_n(s.list_logit + i, n), warp, limit), n);
  }
}

// Stable by the key's upper half, whose lower half rises already: four passes of a byte each.
static const uint64_t* radix_sort(uint64_t* keys, uint64_t* spare, int64_t n) {
  uint32_t starts[4][256] = {};
  for (int64_t i = 0; i < n; ++i)
    for (int d = 0; d < 4; ++d) ++starts[d][keys[i] >> (32 + 8 * d) & 255];
  for (int d = 0; d < 4; ++d) {
    uint32_t at = 0;
    bool one = false;
    for (uint32_t& start : starts[d]) {
      const uint32_t count = start;
      one = one || count == static_cast<uint64_t>(n);
      start = at;
      at += count;
    }
    if (one) continue;
    for (int64_t i = 0; i < n; ++i) spare[starts[d][keys[i] >> (32 + 8 * d) & 255]++] = keys[i];
    uint64_t* const t = keys;
    keys = spare;
    spare = t;
  }
  return keys;
}

static void sort_list(List* list) {
  const Scratch& s = *list->s;
  for (int64_t i = 0; i < list->size; ++i) s.keys[i] = key_of(s.list_logit[i], i);
  list->order = s.keys;
  if (list->size > 48) {
    list->order = radix_sort(s.keys, s.spare, list->size);
    return;
  }
  for (int64_t i = 1; i < list->size; ++i) {
    const uint64_t key = s.keys[i];
    int64_t j = i;
    for (; j > 0 && s.keys[j - 1] > key; --j) s.keys[j] = s.keys[j - 1];
    s.keys[j] = key;
  }
}

static double mass_of(const List& list) {
  double mass = 0;
  for (int64_t r = list.first; r < list.after; ++r) mass += static_cast<double>(weight_of(list, r));
  return mass;
}

// --- Truncation ----------------------------------------------------------------------------------

// The shortest prefix that has `mass`.
static void keep_mass(List* list, double mass) {
  double sum = 0;
  for (int64_t r = list->first; r < list->after; ++r) {
    sum += static_cast<double>(weight_of(*list, r));
    if (sum >= mass) list->after = r + 1;
  }
}

static void keep_min(List* list, float min_p) {
  const float floor = min_p * weight_of(*list, list->first);
  while (list->after > list->first + 1 && weight_of(*list, list->after - 1) < floor) --list->after;
}

// Those nearest to `centre`, on both sides, until they have `mass`; equally near ones all stay.
// A token's surprise less the entropy is centre - exponent: both lack the same log of the total.
static void keep_typical(List* list, const Warp& warp, float centre, double mass) {
  const auto far = [&](int64_t rank) {
    const float e = exponent(list->s->list_logit[place_of(*list, rank)], warp);
    return __builtin_fabsf(e - centre);
  };
  int64_t right = list->first;
  while (right < list->after &&
         exponent(list->s->list_logit[place_of(*list, right)], warp) > centre)
    ++right;
  int64_t left = right;  // kept: [left, right)
  double sum = 0;
  float radius = -1;
  while (left > list->first || right < list->after) {
    const float before = left > list->first ? far(left - 1) : POS_INF;
    const float after = right < list->after ? far(right) : POS_INF;
    const float next = before <= after ? before : after;
    if (sum >= mass && next > radius) break;
    radius = next;
    sum += static_cast<double>(weight_of(*list, before <= after ? --left : right++));
  }
  list->first = left;
  list->after = right;
}

static float centre_of(const List& list, const Warp& warp, double mass) {
  double sum = 0;
  for (int64_t r = list.first; r < list.after; ++r) {
    const float w = weight_of(list, r);
    const float e = exponent(list.s->list_logit[place_of(list, r)], warp);
    if (w > 0) sum += static_cast<double>(w) * static_cast<double>(e);
  }
  return static_cast<float>(sum / mass);
}

// Gathers what typical_p keeps of all ids, and what is as near.
static List typical_of_all(const Field& f, const Scratch& s, const Warp& warp,
                             float typical_p) {
  const double mass = weigh_all(f, warp, 0, s.weights, s.sums);
  double sum = 0;
  for (int64_t b = 0; b < num_blocks(f.n); ++b) {
    F part = zero_f();
    each_vector(f.logit, b * BLOCK, least(f.n, (b + 1) * BLOCK), [&](F x, int64_t i) {
      const F w = load(s.weights + i);
      part = add(part, select(gt(w, zero_f()), mul(w, exponent(x, warp)), zero_f()));
    });
    sum += static_cast<double>(hsum(part));
  }
  const float centre = static_cast<float>(sum / mass);
  const double wanted = static_cast<double>(typical_p) * mass;
  float low = 0, high = 0.5f;
  while (high < 256 && amount_near(f, warp, s.weights, centre, high).mass < wanted) {
    low = high;
    high *= 2;
  }
  for (int i = 0; i < 8 && high < 256; ++i) {
    const float mid = middle(low, high);
    const Amount a = amount_near(f, warp, s.weights, centre, mid);
    if (a.mass < wanted) { low = mid; continue; }
    high = mid;
    if (a.count <= 128) break;
  }
  List list = gather_near(f, s, warp, centre, high < 256 ? high : POS_INF);
  weigh(list, warp);
  sort_list(&list);
  keep_typical(&list, warp, centre, wanted);
  return list;
}

// What may be chosen: a list; or all ids, whose weights and sums are written (total > 0) or are yet
// to be, those below `floor` being cut.
struct Kept {
  bool listed;
  List list;
  double total;
  float floor;
};

// Zeroes the weights below floor and of ids after (logit, id) in the order of falling logit.
static double cut_weights(const Field& f, const Scratch& s, float logit, int32_t id, float floor) {
  const F edge = set1(logit), low = set1(floor);
  const I last = set1(id);
  double total = 0;
  for (int64_t b = 0; b < num_blocks(f.n); ++b) {
    F sum = zero_f();
    if (any(ge(load(f.maxima + b * LANES), edge)))
      each_vector(f.logit, b * BLOCK, least(f.n, (b + 1) * BLOCK), [&](F x, int64_t i) {
        const M after = gt(add(iota(), set1(static_cast<int32_t>(i))), last);
        const M in = or_(gt(x, edge), and_(eq(x, edge), not_(after)));
        const F w = load(s.weights + i);
        const F kept = select(and_(in, ge(w, low)), w, zero_f());
        store(s.weights + i, kept);
        sum = add(sum, kept);
      });
    s.sums[b] = hsum(sum);
    total += static_cast<double>(s.sums[b]);
  }
  return total;
}

constexpr int64_t NUCLEUS_GUESS = 64;

// What top_p and then min_p keep of all ids: often a list of the likeliest few. Else the last id
// kept is found between two bounds, and the weights of those after it are zeroed.
static Kept nucleus_of_all(const Field& f, const Scratch& s, const Warp& warp,
                           const SampleRow& row) {
  const double total = total_of(f, warp, f.warped, s.sums);
  const double mass = static_cast<double>(row.top_p) * total;
  const float bound = bound_of_count(f, least(NUCLEUS_GUESS, f.n));
  Kept kept = {true, gather_above(f, s, bound), 0, 0};
  weigh(kept.list, warp);
  sort_list(&kept.list);
  if (bound == -FLT_MAX || mass_of(kept.list) >= mass) {
    keep_mass(&kept.list, mass);
    if (row.min_p > 0) keep_min(&kept.list, row.min_p);
    return kept;
  }
  weigh_all(f, warp, 0, s.weights, s.sums);
  const Bracket edge = bracket_mass(f, warp, s.weights, total, mass, bound);
  kept = {false, gather_between(f, s, edge.low, edge.high), 0, 0};
  weigh(kept.list, warp);
  sort_list(&kept.list);
  keep_mass(&kept.list, mass - edge.above);
  const int64_t last = place_of(kept.list, kept.list.after - 1);
  kept.total = cut_weights(f, s, s.list_logit[last], s.list_id[last], row.min_p);
  return kept;
}

static List top_k_of_all(const Field& f, const Scratch& s, const Warp& warp, int64_t k) {
  List list = gather_above(f, s, bound_of_count(f, k));
  sort_list(&list);
  list.after = least(k, list.size);
  weigh(list, warp);
  return list;
}

static Kept truncate(const Field& f, const Scratch& s, const SampleRow& row, const Warp& warp) {
  const bool top_k = row.top_k > 0 && row.top_k < f.n;
  const bool typical = row.typical_p < 1, top_p = row.top_p < 1;
  if (!top_k && !typical) {
    if (top_p) return nucleus_of_all(f, s, warp, row);
    return {false, {}, 0, row.min_p};
  }
  List list;
  if (top_k) {
    list = top_k_of_all(f, s, warp, row.top_k);
    if (typical) {
      const double mass = mass_of(list);
      keep_typical(&list, warp, centre_of(list, warp, mass),
                   static_cast<double>(row.typical_p) * mass);
    }
  } else {
    list = typical_of_all(f, s, warp, row.typical_p);
  }
  if (top_p) keep_mass(&list, static_cast<double>(row.top_p) * mass_of(list));
  if (row.min_p > 0) keep_min(&list, row.min_p);
  return {true, list, 0, 0};
}

// --- Choosing among what is left: inverse CDF in rising order of id ------------------------------

// The place in w[0, n) where the running sum first exceeds u of the whole.
static int64_t invert(const float* w, int64_t n, double aim) {
  double sum = 0;
  int64_t last = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!(w[i] > 0)) continue;
    sum += static_cast<double>(w[i]);
    last = i;
    if (sum > aim) break;
  }
  return last;
}

// Zeroes the weights of what was cut; returns the sum of the rest, in order of id.
static double cut(const List& list) {
  const Scratch& s = *list.s;
  const uint64_t first = list.order[list.first], last = list.order[list.after - 1];
  double sum = 0;
  for (int64_t i = 0; i < list.size; ++i) {
    const uint64_t key = key_of(s.list_logit[i], i);
    if (key < first || key > last) s.list_weight[i] = 0;
    sum += static_cast<double>(s.list_weight[i]);
  }
  return sum;
}

static int32_t choose(const Field& f, const Scratch& s, const Warp& warp, const Kept& kept,
                      double u) {
  if (kept.listed) {
    const double total = cut(kept.list);
    return s.list_id[invert(s.list_weight, kept.list.size, u * total)];
  }
  const bool written = kept.total > 0;
  double total = kept.total;
  if (!written)
    total = kept.floor > 0 ? weigh_all(f, warp, kept.floor, nullptr, s.sums)
                           : total_of(f, warp, f.warped, s.sums);
  const double aim = u * total;
  double sum = 0, before = 0;
  int64_t block = 0;
  for (int64_t b = 0; b < num_blocks(f.n); ++b) {
    if (!(s.sums[b] > 0)) continue;
    block = b;
    before = sum;
    sum += static_cast<double>(s.sums[b]);
    if (sum > aim) break;
  }
  const int64_t first = block * BLOCK, n = least(BLOCK, f.n - first);
  if (!written)
    weigh(f, warp, set1(limit_of(kept.floor)), block,
          [&](F w, int64_t i) { store(s.weights + i, w); });
  const float* w = s.weights + first;
  double exact = 0;  // the same weights summed in order of id: the last bits differ
  for (int64_t i = 0; i < n; ++i) exact += static_cast<double>(w[i]);
  const double part = (aim - before) / static_cast<double>(s.sums[block]);
  return static_cast<int32_t>(first + invert(w, n, part * exact));
}

// --- Penalties, bias, masks ----------------------------------------------------------------------

struct Failure {
  SampleError error;
  int64_t detail;
};
constexpr Failure FINE = {SampleError::NONE, 0};

static Failure penalise(const SampleRow& r, int64_t n, float* z, int32_t* count) {
  const int32_t* ids = r.data + r.history_at;
  for (int64_t i = 0; i < r.num_history; ++i) {
    if (static_cast<uint32_t>(ids[i]) >= n) return {SampleError::BAD_ID, ids[i]};
    count[ids[i]] = 0;
  }
  for (int64_t i = r.num_prompt > 0 ? r.num_prompt : 0; i < r.num_history; ++i) ++count[ids[i]];
  for (int64_t i = 0; i < r.num_history; ++i) {
    const int32_t id = ids[i], times = count[id];
    if (times < 0) continue;  // done
    count[id] = -1;
    float x = z[id];
    if (r.repetition != 1) x = x > 0 ? x / r.repetition : x * r.repetition;
    x -= r.frequency * static_cast<float>(times);
    if (times > 0) x -= r.presence;
    z[id] = x;
  }
  return FINE;
}

static Failure add_bias(const SampleRow& r, int64_t n, float* z) {
  const int32_t* ids = r.data + r.bias_at;
  for (int64_t i = 0; i < r.num_bias; ++i) {
    if (static_cast<uint32_t>(ids[i]) >= n) return {SampleError::BAD_ID, ids[i]};
    float bias;
    __builtin_memcpy(&bias, ids + r.num_bias + i, 4);
    z[ids[i]] += bias;
  }
  return FINE;
}

// z is padded to whole blocks; bits cover n ids.
static void apply_bits(const uint8_t* allow, int64_t n, float* z) {
  static const int32_t LANE[16] = {0x1,   0x2,   0x4,   0x8,   0x10,   0x20,   0x40,   0x80,
                                   0x100, 0x200, 0x400, 0x800, 0x1000, 0x2000, 0x4000, 0x8000};
  const I lane = load(LANE);
  const int64_t num_bytes = (n + 7) / 8;
  for (int64_t i = 0; i < n; i += LANES) {
    const int64_t at = i / 8;
    const int32_t high = at + 1 < num_bytes ? allow[at + 1] : 0;
    const int32_t word = allow[at] | high << 8;
    if (word == 0xffff) continue;
    const M off = eq(and_(set1(word), lane), zero_i());
    store(z + i, select(off, set1(-POS_INF), load(z + i)));
  }
}

static Failure apply_masks(const SampleRow& r, int64_t n, float* z, uint8_t* allow) {
  if (r.num_allowed > 0) {
    __builtin_memset(allow, 0, static_cast<size_t>((n + 7) / 8));
    const int32_t* ids = r.data + r.allowed_at;
    for (int64_t i = 0; i < r.num_allowed; ++i) {
      if (static_cast<uint32_t>(ids[i]) >= n) return {SampleError::BAD_ID, ids[i]};
      allow[ids[i] >> 3] |= static_cast<uint8_t>(1 << (ids[i] & 7));
    }
    apply_bits(allow, n, z);
  }
  if (r.mask_bytes > 0) {
    if (r.mask_bytes < (n + 7) / 8) return {SampleError::SHORT_MASK, r.mask_bytes};
    apply_bits(reinterpret_cast<const uint8_t*>(r.data + r.mask_at), n, z);
  }
  for (int64_t i = 0; i < r.num_banned; ++i) {
    const int32_t id = r.data[r.banned_at + i];
    if (static_cast<uint32_t>(id) >= n) return {SampleError::BAD_ID, id};
    z[id] = -POS_INF;
  }
  for (int64_t i = 0; i < r.num_suppress; ++i) {  // an id beyond the vocabulary is out of reach
    const int32_t id = r.data[r.suppress_at + i];
    if (static_cast<uint32_t>(id) < n) z[id] = -POS_INF;
  }
  return FINE;
}

// --- One row -------------------------------------------------------------------------------------

static Failure broken(const Field& f) {
  if (f.top != f.top) return {SampleError::NOT_A_NUMBER, f.top_id};
  if (f.top == POS_INF) return {SampleError::INFINITE, f.top_id};
  if (f.top == -POS_INF) return {SampleError::ALL_MASKED, 0};
  return FINE;
}

// The logits to choose from: the model's own, or a copy with the row's penalties, bias and masks.
static Failure adjust(const Field& raw, const SampleRow& row, const Scratch& s,
                        Field* out) {
  *out = raw;
  if (untouched(row)) return FINE;
  float* const z = s.adjusted;
  each_vector(raw.logit, 0, raw.n, [&](F x, int64_t i) { store(z + i, x); });
  Failure failure = FINE;
  if (penalised(row)) failure = penalise(row, raw.n, z, reinterpret_cast<int32_t*>(s.keys));
  if (failure.error == SampleError::NONE) failure = add_bias(row, raw.n, z);
  if (failure.error == SampleError::NONE) failure = apply_masks(row, raw.n, z, s.bits);
  if (failure.error != SampleError::NONE) return failure;
  const uint32_t all = KEEP_LOGITS | (sums_warped(row, raw.n) ? SUM_WARPED : 0);
  const LogitRow into = {all, nullptr, s.adjusted_maxima, s.adjusted_tops, s.adjusted_plain,
                         s.adjusted_warped};
  *out = digest_all(z, raw.n, row, into);
  return broken(*out);
}

static int32_t choose_token(const Field& f, const Scratch& s, const SampleRow& row) {
  if (row.temperature == 0) return f.top_id;
  const Warp warp = warp_of(f.top, row.temperature);
  return choose(f, s, warp, truncate(f, s, row, warp), uniform(row));
}

static void fill_logprobs(const Field& raw, const Scratch& s, const SampleRow& row,
                       SampleOut* out) {
  const double log_total = log(total_of(raw, warp_of(raw.top, 1.0f), raw.plain, s.sums));
  const auto logprob = [&](float x) {
    return static_cast<float>(static_cast<double>(x) - static_cast<double>(raw.top) - log_total);
  };
  if (out->token >= 0)
    out->logprob = logprob(out->token == raw.top_id ? raw.top : raw.logit[out->token]);
  if (row.target >= 0) out->score = logprob(raw.logit[row.target]);
  const int64_t k = row.num_logprobs > row.target_top ? row.num_logprobs : row.target_top;
  if (k <= 0) return;
  List list = gather_above(raw, s, bound_of_count(raw, k));
  sort_list(&list);
  out->num_top = static_cast<int32_t>(least(k, list.size));
  for (int32_t i = 0; i < out->num_top; ++i) {
    const int64_t place = place_of(list, i);
    out->top_id[i] = s.list_id[place];
    out->top_logprob[i] = logprob(s.list_logit[place]);
  }
}

static Failure choose_row(const Field& raw, const SampleRow& row, const Scratch& s,
                          SampleOut* out) {
  Failure failure = broken(raw);
  if (failure.error != SampleError::NONE) return failure;
  if (row.target >= raw.n) return {SampleError::BAD_ID, row.target};
  if (row.temperature >= 0) {
    Field field;
    failure = adjust(raw, row, s, &field);
    if (failure.error != SampleError::NONE) return failure;
    out->token = choose_token(field, s, row);
  }
  if (row.target >= 0 || (row.temperature >= 0 && row.num_logprobs >= 0))
    fill_logprobs(raw, s, row, out);
  return FINE;
}

static SampleError probabilities(const float* logits, int64_t vocab, const SampleRow* row,
                                 void* scratch, float* out) {
  const Scratch s = carve_all(scratch, vocab);
  const Field raw = digest_whole(logits, vocab, *row, s);
  Field f;
  Failure failure = broken(raw);
  if (failure.error == SampleError::NONE) failure = adjust(raw, *row, s, &f);
  if (failure.error != SampleError::NONE) return failure.error;
  __builtin_memset(out, 0, static_cast<size_t>(vocab) * sizeof(float));
  if (row->temperature <= 0) {
    out[f.top_id] = 1;
    return SampleError::NONE;
  }
  const Warp warp = warp_of(f.top, row->temperature);
  const Kept kept = truncate(f, s, *row, warp);
  if (kept.listed) {
    const double total = cut(kept.list);
    for (int64_t i = 0; i < kept.list.size; ++i)
      out[s.list_id[i]] = static_cast<float>(static_cast<double>(s.list_weight[i]) / total);
    return SampleError::NONE;
  }
  const bool written = kept.total > 0;
  const double total = written ? kept.total : weigh_all(f, warp, kept.floor, s.weights, s.sums);
  for (int64_t i = 0; i < vocab; ++i)
    if (s.sums[i / BLOCK] > 0)
      out[i] = static_cast<float>(static_cast<double>(s.weights[i]) / total);
  return SampleError::NONE;
}

static void finish(const Field& raw, const SampleRow& row, const Scratch& s, SampleOut* out) {
  __builtin_memset(out, 0, sizeof *out);
  out->token = -1;
  const Failure failure = choose_row(raw, row, s, out);
  out->error = failure.error;
  out->detail = static_cast<int32_t>(failure.detail);
}

static void sample(const float* logits, int64_t vocab, const SampleRow* row, void* scratch,
                   SampleOut* out) {
  const Scratch s = carve_all(scratch, vocab);
  finish(digest_whole(logits, vocab, *row, s), *row, s, out);
}

static void choose_digested(const LogitRow* digest, const LogitBest* best, int64_t threads,
                            int64_t stride, int64_t vocab, const SampleRow* row, void* scratch,
                            SampleOut* out) {
  LogitBest top = best[0];
  for (int64_t i = 1; i < threads; ++i) top = better(top, best[i * stride]);
  finish(field_of(*digest, vocab, top), *row, carve_all(scratch, vocab), out);
}

static uint32_t needs_of(const SampleRow* row, int64_t vocab) { return needs(*row, vocab); }

}  // namespace sampling

constexpr SampleTable SAMPLE{&sampling::needs_of, &sampling::digest,        &sampling::choose_digested,
                             &sampling::sample,   &sampling::probabilities, &sampling::philox};

}  // namespace
}  // namespace octavo
