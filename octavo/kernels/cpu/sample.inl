// Choosing and scoring one token; octavo/runtime/sampling.py says what is computed and in which
// order. Ids are walked in blocks of 256 = 16 vectors. The highest logit of each lane of each block
// (of 16 ids) is kept, so that looking for the few likely ids touches few blocks: a bound that k of
// these maxima reach is reached by at least k ids. Bounds only gather candidates; which are kept is
// then decided exactly, in the order (logit falling, id rising).
//
// Sums run in one order: 16 lanes by 4 accumulators in a block, blocks in double. So every result
// depends on the row alone.
#include <float.h>
#include <math.h>

#include "sample.h"

namespace octavo {
namespace {

constexpr int64_t S_LANES = 16, S_BLOCK = 256;
constexpr float S_INF = __builtin_inff();

OCTAVO_INLINE int64_t s_min(int64_t a, int64_t b) { return a < b ? a : b; }
OCTAVO_INLINE int64_t s_blocks(int64_t n) { return (n + S_BLOCK - 1) / S_BLOCK; }

// The scratch, carved. Sizes in elements for n ids padded to whole blocks.
struct SampleScratch {
  uint64_t *keys, *spare;         // [n] each
  float *adjusted, *weights;      // [n] each, by id
  float* list_logit;              // [n]: candidates in rising order of id
  float* list_weight;             // [n]
  int32_t* list_id;               // [n]
  float *maxima, *adjusted_maxima;  // [n / 16] each
  float* sums;                    // [n / 256]
  uint8_t* bits;                  // [n / 8]
};

template <class T> OCTAVO_INLINE T* s_carve(uint8_t*& at, int64_t count) {
  T* p = reinterpret_cast<T*>(at);
  at += count * static_cast<int64_t>(sizeof(T));
  return p;
}

static SampleScratch s_carve_all(void* memory, int64_t vocab) {
  const int64_t n = s_blocks(vocab) * S_BLOCK;
  uint8_t* at = static_cast<uint8_t*>(memory);
  SampleScratch s;
  s.keys = s_carve<uint64_t>(at, n);
  s.spare = s_carve<uint64_t>(at, n);
  s.adjusted = s_carve<float>(at, n);
  s.weights = s_carve<float>(at, n);
  s.list_logit = s_carve<float>(at, n);
  s.list_weight = s_carve<float>(at, n);
  s.list_id = s_carve<int32_t>(at, n);
  s.maxima = s_carve<float>(at, n / 16);
  s.adjusted_maxima = s_carve<float>(at, n / 16);
  s.sums = s_carve<float>(at, n / 256);
  s.bits = s_carve<uint8_t>(at, n / 8);
  return s;
}

// Logits of one row with the maxima over them.
struct Field {
  const float* logit;
  int64_t n;
  const float* maxima;
  float top;
};

// f(x, first id) for each vector of ids [first, after); ids beyond have logit -inf.
template <class Fn>
OCTAVO_INLINE void s_each(const float* logit, int64_t first, int64_t after, Fn f) {
  int64_t i = first;
  for (; i + S_LANES <= after; i += S_LANES) f(load(logit + i), i);
  if (i < after)
    f(select(first_n(after - i), load_n(logit + i, after - i), set1(-S_INF)), i);
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
static double s_uniform(const SampleRow& row) {
  const uint32_t counter[4] = {static_cast<uint32_t>(row.position),
                               static_cast<uint32_t>(row.choice), 0, 0};
  const uint32_t key[2] = {static_cast<uint32_t>(row.seed), static_cast<uint32_t>(row.seed >> 32)};
  uint32_t r[4];
  philox(counter, key, r);
  return static_cast<double>((uint64_t(r[1]) << 32 | r[0]) >> 11) * 0x1p-53;
}

// --- Passes over all ids -------------------------------------------------------------------------

// Fills maxima; top is the highest of them. False if any logit is NaN.
static bool s_scan(const float* logit, int64_t n, float* maxima, Field* out) {
  F top = set1(-S_INF);
  M bad = ne(set1(0.0f), set1(0.0f));
  for (int64_t b = 0; b < s_blocks(n); ++b) {
    F high = set1(-S_INF);
    s_each(logit, b * S_BLOCK, s_min(n, (b + 1) * S_BLOCK), [&](F x, int64_t) {
      bad = or_(bad, ne(x, x));
      high = max(x, high);
    });
    store(maxima + b * S_LANES, high);
    top = max(high, top);
  }
  *out = {logit, n, maxima, hmax(top)};
  return !any(bad);
}

// The lowest id whose logit is `value`, or is NaN if value is; n if none.
static int64_t s_find(const float* logit, int64_t n, float value) {
  const F v = set1(value);
  const bool nan = value != value;
  for (int64_t b = 0; b < s_blocks(n); ++b) {
    int64_t found = n;
    s_each(logit, b * S_BLOCK, s_min(n, (b + 1) * S_BLOCK), [&](F x, int64_t i) {
      const uint32_t hit = bits(nan ? ne(x, x) : eq(x, v));
      if (hit != 0 && found == n) found = i + __builtin_ctz(hit);
    });
    if (found < n) return found;
  }
  return n;
}

static int32_t s_argmax(const Field& f) {
  const F top = set1(f.top);
  int64_t b = 0;
  while (!any(eq(load(f.maxima + b * S_LANES), top))) ++b;
  const int64_t first = b * S_BLOCK;
  return static_cast<int32_t>(
      first + s_find(f.logit + first, s_min(S_BLOCK, f.n - first), f.top));
}

struct Warp {
  float top, inv_t;
};
OCTAVO_INLINE F s_exponent(F x, const Warp& w) { return mul(sub(x, set1(w.top)), set1(w.inv_t)); }
OCTAVO_INLINE float s_exponent(float x, const Warp& w) { return (x - w.top) * w.inv_t; }

// Weights exp((logit - top) / T) of ids [first, after), those below `floor` 0, handed to f; returns
// their sum.
template <class Fn>
OCTAVO_INLINE float s_weigh(const Field& f, const Warp& warp, float floor, int64_t b, Fn use) {
  F sum[4] = {zero_f(), zero_f(), zero_f(), zero_f()};
  const F low = set1(floor);
  s_each(f.logit, b * S_BLOCK, s_min(f.n, (b + 1) * S_BLOCK), [&](F x, int64_t i) {
    F w = exp_(s_exponent(x, warp));
    w = select(ge(w, low), w, zero_f());
    sum[i / S_LANES % 4] = add(sum[i / S_LANES % 4], w);
    use(w, i);
  });
  return hsum(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
}

// Sum of all weights; sums[b] is block b's. Weights are kept only where `weights` is given.
static double s_total(const Field& f, const Warp& warp, float floor, float* weights, float* sums) {
  double total = 0;
  for (int64_t b = 0; b < s_blocks(f.n); ++b) {
    sums[b] = weights == nullptr
                  ? s_weigh(f, warp, floor, b, [](F, int64_t) {})
                  : s_weigh(f, warp, floor, b, [&](F w, int64_t i) { store(weights + i, w); });
    total += static_cast<double>(sums[b]);
  }
  return total;
}

struct Amount {
  double mass;
  int64_t count;
};

// Of the ids with logit >= bound.
static Amount s_above(const Field& f, const float* weights, float bound) {
  const F low = set1(bound);
  Amount a = {0, 0};
  for (int64_t b = 0; b < s_blocks(f.n); ++b) {
    if (!any(ge(load(f.maxima + b * S_LANES), low))) continue;
    F sum = zero_f();
    s_each(f.logit, b * S_BLOCK, s_min(f.n, (b + 1) * S_BLOCK), [&](F x, int64_t i) {
      const M in = ge(x, low);
      sum = add(sum, select(in, load(weights + i), zero_f()));
      a.count += __builtin_popcount(bits(in));
    });
    a.mass += static_cast<double>(hsum(sum));
  }
  return a;
}

// Of the ids whose exponent is within `radius` of `centre`.
static Amount s_near(const Field& f, const Warp& warp, const float* weights, float centre,
                     float radius) {
  Amount a = {0, 0};
  for (int64_t b = 0; b < s_blocks(f.n); ++b) {
    F sum = zero_f();
    s_each(f.logit, b * S_BLOCK, s_min(f.n, (b + 1) * S_BLOCK), [&](F x, int64_t i) {
      const M in = le(abs(sub(s_exponent(x, warp), set1(centre))), set1(radius));
      sum = add(sum, select(in, load(weights + i), zero_f()));
      a.count += __builtin_popcount(bits(in));
    });
    a.mass += static_cast<double>(hsum(sum));
  }
  return a;
}

static int64_t s_count(const float* x, int64_t n, float bound) {
  const F low = set1(bound);
  I count = zero_i();
  s_each(x, 0, n, [&](F v, int64_t) {
    count = add(count, select(ge(v, low), set1(1), zero_i()));
  });
  return hsum(count);
}

// --- Bounds that gather enough candidates, and not many more -------------------------------------

OCTAVO_INLINE float s_middle(float low, float high) { return 0.5f * low + 0.5f * high; }

// A bound reached by at least k of x, seldom by many more; -FLT_MAX if fewer than k are finite.
static float s_bound_k(const float* x, int64_t n, float top, int64_t k) {
  if (s_count(x, n, top) >= k) return top;
  float high = top, low = top, step = 1.0f;
  while (s_count(x, n, low) < k) {
    if (low == -FLT_MAX) return low;
    high = low;
    low = top - step;
    if (!(low >= -FLT_MAX)) low = -FLT_MAX;
    step *= 2;
  }
  for (int i = 0; i < 24; ++i) {
    const float mid = s_middle(low, high);
    if (!(mid > low && mid < high)) break;
    const int64_t count = s_count(x, n, mid);
    if (count >= k) low = mid; else high = mid;
    if (count >= k && count <= k + k / 4 + 8) break;
  }
  return low;
}

// Maxima are 16 times fewer than logits, and serve as long as k is well below their number.
static float s_bound_k(const Field& f, int64_t k) {
  const int64_t num_maxima = s_blocks(f.n) * S_LANES;
  if (k <= num_maxima / 4) {
    const float bound = s_bound_k(f.maxima, num_maxima, f.top, k);
    if (bound > -FLT_MAX) return bound;
  }
  return s_bound_k(f.logit, f.n, f.top, k);
}

// Sums in different orders differ in the last bits: bounds ask for a little more than is needed.
constexpr double S_MARGIN = 1 + 1e-5;

// A bound such that the ids that reach it have at least `mass`; -FLT_MAX if that takes them all.
static float s_bound_mass(const Field& f, const Warp& warp, const float* weights, double mass) {
  const float unit = 1.0f / warp.inv_t;
  float high = f.top, low = f.top, step = 4 * unit;
  while (s_above(f, weights, low).mass < mass * S_MARGIN) {
    if (low == -FLT_MAX) return low;
    high = low;
    low = f.top - step;
    if (!(low >= -FLT_MAX) || step > 128 * unit) low = -FLT_MAX;
    step *= 2;
  }
  if (low == -FLT_MAX) return low;
  for (int i = 0; i < 6; ++i) {
    const float mid = s_middle(low, high);
    const Amount a = s_above(f, weights, mid);
    if (a.mass < mass * S_MARGIN) { high = mid; continue; }
    low = mid;
    if (a.count <= 128) break;
  }
  return low;
}

// --- The list of candidates ----------------------------------------------------------------------

// `size` candidates in rising order of id; once sorted, ranks [first, after) of `order` are kept.
struct List {
  const SampleScratch* s;
  int64_t size;
  const uint64_t* order;  // key: falling logit above, place in the list below
  int64_t first, after;
};

OCTAVO_INLINE uint64_t s_key(float logit, int64_t place) {
  logit += 0.0f;  // -0 and 0 are equal
  int32_t i;
  __builtin_memcpy(&i, &logit, 4);
  const uint32_t rising = static_cast<uint32_t>(i) ^ (static_cast<uint32_t>(i >> 31) | 0x80000000u);
  return static_cast<uint64_t>(~rising) << 32 | static_cast<uint64_t>(place);
}
OCTAVO_INLINE int64_t s_place(const List& list, int64_t rank) {
  return static_cast<int64_t>(list.order[rank] & 0xffffffffu);
}
OCTAVO_INLINE float s_weight(const List& list, int64_t rank) {
  return list.s->list_weight[s_place(list, rank)];
}

// Appends to the list the ids of block b that `in` chooses.
template <class Fn>
OCTAVO_INLINE int64_t s_gather(const Field& f, const SampleScratch& s, int64_t b, int64_t size,
                               Fn in) {
  s_each(f.logit, b * S_BLOCK, s_min(f.n, (b + 1) * S_BLOCK), [&](F x, int64_t i) {
    for (uint32_t hit = bits(in(x)); hit != 0; hit &= hit - 1) {
      const int64_t id = i + __builtin_ctz(hit);
      s.list_logit[size] = f.logit[id];
      s.list_id[size++] = static_cast<int32_t>(id);
    }
  });
  return size;
}

// The ids with logit >= bound.
static List s_gather_above(const Field& f, const SampleScratch& s, float bound) {
  const F low = set1(bound);
  int64_t size = 0;
  for (int64_t b = 0; b < s_blocks(f.n); ++b)
    if (any(ge(load(f.maxima + b * S_LANES), low)))
      size = s_gather(f, s, b, size, [&](F x) { return ge(x, low); });
  return {&s, size, nullptr, 0, size};
}

static List s_gather_near(const Field& f, const SampleScratch& s, const Warp& warp, float centre,
                          float radius) {
  int64_t size = 0;
  for (int64_t b = 0; b < s_blocks(f.n); ++b)
    size = s_gather(f, s, b, size, [&](F x) {
      return and_(le(abs(sub(s_exponent(x, warp), set1(centre))), set1(radius)),
                  ge(x, set1(-FLT_MAX)));
    });
  return {&s, size, nullptr, 0, size};
}

static void s_weigh(const List& list, const Warp& warp) {
  const SampleScratch& s = *list.s;
  for (int64_t i = 0; i < list.size; i += S_LANES) {
    const int64_t n = s_min(S_LANES, list.size - i);
    store_n(s.list_weight + i, exp_(s_exponent(load_n(s.list_logit + i, n), warp)), n);
  }
}

// Stable by the key's upper half, whose lower half rises already: four passes of a byte each.
static const uint64_t* s_radix(uint64_t* keys, uint64_t* spare, int64_t n) {
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

static void s_sort(List* list) {
  const SampleScratch& s = *list->s;
  for (int64_t i = 0; i < list->size; ++i) s.keys[i] = s_key(s.list_logit[i], i);
  list->order = s.keys;
  if (list->size > 48) {
    list->order = s_radix(s.keys, s.spare, list->size);
    return;
  }
  for (int64_t i = 1; i < list->size; ++i) {
    const uint64_t key = s.keys[i];
    int64_t j = i;
    for (; j > 0 && s.keys[j - 1] > key; --j) s.keys[j] = s.keys[j - 1];
    s.keys[j] = key;
  }
}

static double s_mass(const List& list) {
  double mass = 0;
  for (int64_t r = list.first; r < list.after; ++r) mass += static_cast<double>(s_weight(list, r));
  return mass;
}

// --- Truncation ----------------------------------------------------------------------------------

// The shortest prefix that has `mass`.
static void s_keep_mass(List* list, double mass) {
  double sum = 0;
  for (int64_t r = list->first; r < list->after; ++r) {
    sum += static_cast<double>(s_weight(*list, r));
    if (sum >= mass) list->after = r + 1;
  }
}

static void s_keep_min(List* list, float min_p) {
  const float floor = min_p * s_weight(*list, list->first);
  while (list->after > list->first + 1 && s_weight(*list, list->after - 1) < floor) --list->after;
}

// Those nearest to `centre`, on both sides, until they have `mass`; equally near ones all stay.
// A token's surprise less the entropy is centre - exponent: both lack the same log of the total.
static void s_keep_typical(List* list, const Warp& warp, float centre, double mass) {
  const auto far = [&](int64_t rank) {
    const float e = s_exponent(list->s->list_logit[s_place(*list, rank)], warp);
    return __builtin_fabsf(e - centre);
  };
  int64_t right = list->first;
  while (right < list->after &&
         s_exponent(list->s->list_logit[s_place(*list, right)], warp) > centre)
    ++right;
  int64_t left = right;  // kept: [left, right)
  double sum = 0;
  float radius = -1;
  while (left > list->first || right < list->after) {
    const float before = left > list->first ? far(left - 1) : S_INF;
    const float after = right < list->after ? far(right) : S_INF;
    const float next = before <= after ? before : after;
    if (sum >= mass && next > radius) break;
    radius = next;
    sum += static_cast<double>(s_weight(*list, before <= after ? --left : right++));
  }
  list->first = left;
  list->after = right;
}

static float s_centre(const List& list, const Warp& warp, double mass) {
  double sum = 0;
  for (int64_t r = list.first; r < list.after; ++r) {
    const float w = s_weight(list, r);
    const float e = s_exponent(list.s->list_logit[s_place(list, r)], warp);
    if (w > 0) sum += static_cast<double>(w) * static_cast<double>(e);
  }
  return static_cast<float>(sum / mass);
}

// Gathers what typical_p keeps of all ids, and what is as near.
static List s_typical_of_all(const Field& f, const SampleScratch& s, const Warp& warp,
                             float typical_p) {
  const double mass = s_total(f, warp, 0, s.weights, s.sums);
  double sum = 0;
  for (int64_t b = 0; b < s_blocks(f.n); ++b) {
    F part = zero_f();
    s_each(f.logit, b * S_BLOCK, s_min(f.n, (b + 1) * S_BLOCK), [&](F x, int64_t i) {
      const F w = load(s.weights + i);
      part = add(part, select(gt(w, zero_f()), mul(w, s_exponent(x, warp)), zero_f()));
    });
    sum += static_cast<double>(hsum(part));
  }
  const float centre = static_cast<float>(sum / mass);
  const double wanted = static_cast<double>(typical_p) * mass;
  float low = 0, high = 0.5f;
  while (high < 256 && s_near(f, warp, s.weights, centre, high).mass < wanted * S_MARGIN) {
    low = high;
    high *= 2;
  }
  for (int i = 0; i < 8 && high < 256; ++i) {
    const float mid = s_middle(low, high);
    const Amount a = s_near(f, warp, s.weights, centre, mid);
    if (a.mass < wanted * S_MARGIN) { low = mid; continue; }
    high = mid;
    if (a.count <= 128) break;
  }
  List list = s_gather_near(f, s, warp, centre, high < 256 ? high : S_INF);
  s_weigh(list, warp);
  s_sort(&list);
  s_keep_typical(&list, warp, centre, wanted);
  return list;
}

constexpr int64_t S_NUCLEUS_GUESS = 64;

// Gathers what top_p keeps of all ids: often within the likeliest few, else by bisecting the bound.
static List s_nucleus_of_all(const Field& f, const SampleScratch& s, const Warp& warp,
                             float top_p) {
  const double mass = static_cast<double>(top_p) * s_total(f, warp, 0, s.weights, s.sums);
  float bound = s_bound_k(f, s_min(S_NUCLEUS_GUESS, f.n));
  if (s_above(f, s.weights, bound).mass < mass * S_MARGIN)
    bound = s_bound_mass(f, warp, s.weights, mass);
  List list = s_gather_above(f, s, bound);
  s_weigh(list, warp);
  s_sort(&list);
  s_keep_mass(&list, mass);
  return list;
}

static List s_top_k_of_all(const Field& f, const SampleScratch& s, const Warp& warp, int64_t k) {
  List list = s_gather_above(f, s, s_bound_k(f, k));
  s_sort(&list);
  list.after = s_min(k, list.size);
  s_weigh(list, warp);
  return list;
}

// What may be chosen: a list, or all ids of weight >= floor.
struct Kept {
  bool listed;
  List list;
  float floor;
};

static Kept s_truncate(const Field& f, const SampleScratch& s, const SampleRow& row,
                       const Warp& warp) {
  const bool top_k = row.top_k > 0 && row.top_k < f.n;
  const bool typical = row.typical_p < 1, top_p = row.top_p < 1;
  if (!top_k && !typical && !top_p) return {false, {}, row.min_p};
  Kept kept = {true, {}, 0};
  List& list = kept.list;
  if (top_k) {
    list = s_top_k_of_all(f, s, warp, row.top_k);
    if (typical) {
      const double mass = s_mass(list);
      s_keep_typical(&list, warp, s_centre(list, warp, mass),
                     static_cast<double>(row.typical_p) * mass);
    }
  } else if (typical) {
    list = s_typical_of_all(f, s, warp, row.typical_p);
  } else {
    list = s_nucleus_of_all(f, s, warp, row.top_p);
  }
  if (top_p && (top_k || typical))
    s_keep_mass(&list, static_cast<double>(row.top_p) * s_mass(list));
  if (row.min_p > 0) s_keep_min(&list, row.min_p);
  return kept;
}

// --- Choosing among what is left: inverse CDF in rising order of id ------------------------------

// The place in w[0, n) where the running sum first exceeds u of the whole.
static int64_t s_invert(const float* w, int64_t n, double aim) {
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
static double s_cut(const List& list) {
  const SampleScratch& s = *list.s;
  const uint64_t first = list.order[list.first], last = list.order[list.after - 1];
  double sum = 0;
  for (int64_t i = 0; i < list.size; ++i) {
    const uint64_t key = s_key(s.list_logit[i], i);
    if (key < first || key > last) s.list_weight[i] = 0;
    sum += static_cast<double>(s.list_weight[i]);
  }
  return sum;
}

static int32_t s_choose(const Field& f, const SampleScratch& s, const Warp& warp, float floor,
                        double u) {
  const double aim = u * s_total(f, warp, floor, nullptr, s.sums);
  double sum = 0, before = 0;
  int64_t block = 0;
  for (int64_t b = 0; b < s_blocks(f.n); ++b) {
    if (!(s.sums[b] > 0)) continue;
    block = b;
    before = sum;
    sum += static_cast<double>(s.sums[b]);
    if (sum > aim) break;
  }
  float w[S_BLOCK];
  const int64_t first = block * S_BLOCK, n = s_min(S_BLOCK, f.n - first);
  s_weigh(f, warp, floor, block, [&](F x, int64_t i) { store(w + (i - first), x); });
  double exact = 0;  // the same weights summed in order of id: the last bits differ
  for (int64_t i = 0; i < n; ++i) exact += static_cast<double>(w[i]);
  const double part = (aim - before) / static_cast<double>(s.sums[block]);
  return static_cast<int32_t>(first + s_invert(w, n, part * exact));
}

static int32_t s_choose(const List& list, double u) {
  const double total = s_cut(list);
  return list.s->list_id[s_invert(list.s->list_weight, list.size, u * total)];
}

// --- Penalties, bias, masks ----------------------------------------------------------------------

struct Failure {
  SampleError error;
  int64_t detail;
};
constexpr Failure S_FINE = {SampleError::NONE, 0};

static bool s_penalised(const SampleRow& r) {
  return r.num_history > 0 && (r.repetition != 1 || r.presence != 0 || r.frequency != 0);
}
static bool s_untouched(const SampleRow& r) {
  return !s_penalised(r) && r.num_bias == 0 && r.num_allowed == 0 && r.num_banned == 0 &&
         r.num_suppress == 0 && r.mask_bytes == 0;
}

static Failure s_penalise(const SampleRow& r, int64_t n, float* z, int32_t* count) {
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
  return S_FINE;
}

static Failure s_bias(const SampleRow& r, int64_t n, float* z) {
  const int32_t* ids = r.data + r.bias_at;
  for (int64_t i = 0; i < r.num_bias; ++i) {
    if (static_cast<uint32_t>(ids[i]) >= n) return {SampleError::BAD_ID, ids[i]};
    float bias;
    __builtin_memcpy(&bias, ids + r.num_bias + i, 4);
    z[ids[i]] += bias;
  }
  return S_FINE;
}

// z is padded to whole blocks; bits cover n ids.
static void s_apply_bits(const uint8_t* allow, int64_t n, float* z) {
  static const int32_t LANE[16] = {1,      2,      4,       8,       0x10,    0x20,   0x40,   0x80,
                                   0x100,  0x200,  0x400,   0x800,   0x1000,  0x2000, 0x4000, 0x8000};
  const I lane = load(LANE);
  const int64_t num_bytes = (n + 7) / 8;
  for (int64_t i = 0; i < n; i += S_LANES) {
    const int64_t at = i / 8;
    const int32_t high = at + 1 < num_bytes ? allow[at + 1] : 0;
    const int32_t word = allow[at] | high << 8;
    if (word == 0xffff) continue;
    const M off = eq(and_(set1(word), lane), zero_i());
    store(z + i, select(off, set1(-S_INF), load(z + i)));
  }
}

static Failure s_mask(const SampleRow& r, int64_t n, float* z, uint8_t* allow) {
  if (r.num_allowed > 0) {
    __builtin_memset(allow, 0, static_cast<size_t>((n + 7) / 8));
    const int32_t* ids = r.data + r.allowed_at;
    for (int64_t i = 0; i < r.num_allowed; ++i) {
      if (static_cast<uint32_t>(ids[i]) >= n) return {SampleError::BAD_ID, ids[i]};
      allow[ids[i] >> 3] |= static_cast<uint8_t>(1 << (ids[i] & 7));
    }
    s_apply_bits(allow, n, z);
  }
  if (r.mask_bytes > 0) {
    if (r.mask_bytes < (n + 7) / 8) return {SampleError::SHORT_MASK, r.mask_bytes};
    s_apply_bits(reinterpret_cast<const uint8_t*>(r.data + r.mask_at), n, z);
  }
  for (int64_t i = 0; i < r.num_banned; ++i) {
    const int32_t id = r.data[r.banned_at + i];
    if (static_cast<uint32_t>(id) >= n) return {SampleError::BAD_ID, id};
    z[id] = -S_INF;
  }
  for (int64_t i = 0; i < r.num_suppress; ++i) {  // an id beyond the vocabulary is out of reach
    const int32_t id = r.data[r.suppress_at + i];
    if (static_cast<uint32_t>(id) < n) z[id] = -S_INF;
  }
  return S_FINE;
}

// --- One row -------------------------------------------------------------------------------------

static Failure s_broken(const Field& f, bool numbers) {
  if (!numbers) return {SampleError::NOT_A_NUMBER, s_find(f.logit, f.n, __builtin_nanf(""))};
  if (f.top == S_INF) return {SampleError::INFINITE, s_find(f.logit, f.n, S_INF)};
  if (f.top == -S_INF) return {SampleError::ALL_MASKED, 0};
  return S_FINE;
}

// The logits to choose from: the model's own, or a copy with the row's penalties, bias and masks.
static Failure s_adjust(const Field& raw, const SampleRow& row, const SampleScratch& s,
                        Field* out) {
  *out = raw;
  if (s_untouched(row)) return S_FINE;
  float* const z = s.adjusted;
  s_each(raw.logit, 0, raw.n, [&](F x, int64_t i) { store(z + i, x); });
  Failure failure = S_FINE;
  if (s_penalised(row)) failure = s_penalise(row, raw.n, z, reinterpret_cast<int32_t*>(s.keys));
  if (failure.error == SampleError::NONE) failure = s_bias(row, raw.n, z);
  if (failure.error == SampleError::NONE) failure = s_mask(row, raw.n, z, s.bits);
  if (failure.error != SampleError::NONE) return failure;
  const bool numbers = s_scan(z, raw.n, s.adjusted_maxima, out);
  return s_broken(*out, numbers);
}

static Warp s_warp(const Field& f, float temperature) {
  const float inv_t = 1.0f / temperature;
  return {f.top, inv_t <= FLT_MAX ? inv_t : FLT_MAX};
}

static int32_t s_token(const Field& f, const SampleScratch& s, const SampleRow& row) {
  if (row.temperature == 0) return s_argmax(f);
  const Warp warp = s_warp(f, row.temperature);
  const Kept kept = s_truncate(f, s, row, warp);
  const double u = s_uniform(row);
  return kept.listed ? s_choose(kept.list, u) : s_choose(f, s, warp, kept.floor, u);
}

static void s_logprobs(const Field& raw, const SampleScratch& s, const SampleRow& row,
                       SampleOut* out) {
  const Warp plain = {raw.top, 1.0f};
  const double log_total = log(s_total(raw, plain, 0, nullptr, s.sums));
  const auto logprob = [&](float x) {
    return static_cast<float>(static_cast<double>(x) - static_cast<double>(raw.top) - log_total);
  };
  if (out->token >= 0) out->logprob = logprob(raw.logit[out->token]);
  if (row.target >= 0) out->score = logprob(raw.logit[row.target]);
  const int64_t k = row.num_logprobs > row.target_top ? row.num_logprobs : row.target_top;
  if (k <= 0) return;
  List list = s_gather_above(raw, s, s_bound_k(raw, k));
  s_sort(&list);
  out->num_top = static_cast<int32_t>(s_min(k, list.size));
  for (int32_t i = 0; i < out->num_top; ++i) {
    const int64_t place = s_place(list, i);
    out->top_id[i] = s.list_id[place];
    out->top_logprob[i] = logprob(s.list_logit[place]);
  }
}

static Failure s_sample(const float* logits, int64_t vocab, const SampleRow& row,
                        const SampleScratch& s, SampleOut* out) {
  Field raw;
  const bool numbers = s_scan(logits, vocab, s.maxima, &raw);
  Failure failure = s_broken(raw, numbers);
  if (failure.error != SampleError::NONE) return failure;
  if (row.target >= vocab) return {SampleError::BAD_ID, row.target};
  if (row.temperature >= 0) {
    Field field;
    failure = s_adjust(raw, row, s, &field);
    if (failure.error != SampleError::NONE) return failure;
    out->token = s_token(field, s, row);
  }
  if (row.target >= 0 || (row.temperature >= 0 && row.num_logprobs >= 0))
    s_logprobs(raw, s, row, out);
  return S_FINE;
}

static void sample(const float* logits, int64_t vocab, const SampleRow* row, void* scratch,
                   SampleOut* out) {
  __builtin_memset(out, 0, sizeof *out);
  out->token = -1;
  const Failure failure = s_sample(logits, vocab, *row, s_carve_all(scratch, vocab), out);
  out->error = failure.error;
  out->detail = static_cast<int32_t>(failure.detail);
}

static SampleError probabilities(const float* logits, int64_t vocab, const SampleRow* row,
                                 void* scratch, float* out) {
  const SampleScratch s = s_carve_all(scratch, vocab);
  Field raw, f;
  const bool numbers = s_scan(logits, vocab, s.maxima, &raw);
  Failure failure = s_broken(raw, numbers);
  if (failure.error == SampleError::NONE) failure = s_adjust(raw, *row, s, &f);
  if (failure.error != SampleError::NONE) return failure.error;
  __builtin_memset(out, 0, static_cast<size_t>(vocab) * sizeof(float));
  if (row->temperature <= 0) {
    out[s_argmax(f)] = 1;
    return SampleError::NONE;
  }
  const Warp warp = s_warp(f, row->temperature);
  const Kept kept = s_truncate(f, s, *row, warp);
  if (kept.listed) {
    const double total = s_cut(kept.list);
    for (int64_t i = 0; i < kept.list.size; ++i)
      out[s.list_id[i]] = static_cast<float>(static_cast<double>(s.list_weight[i]) / total);
    return SampleError::NONE;
  }
  const double total = s_total(f, warp, kept.floor, s.weights, s.sums);
  for (int64_t i = 0; i < vocab; ++i)
    out[i] = static_cast<float>(static_cast<double>(s.weights[i]) / total);
  return SampleError::NONE;
}

constexpr SampleTable SAMPLE{&sample, &probabilities, &philox};

}  // namespace
}  // namespace octavo
