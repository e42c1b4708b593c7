// Attention over a cache in bf16 by matrix tiles (tiles.h): attention.inl's passes, with both products
// in tiles of up to TILE_ROWS rows. Keys and values lie in the cache as tiles want them (rowops.h).
// The additions of one output are in the order of dims, or of tokens by blocks of 32: what else is in
// the tile, or how many blocks of zeros come before and behind, changes no bit.
#include "attention.inl"
#include "tiles.h"

namespace octavo {
namespace {

struct Tiled {
  using T = uint16_t;
};

// With every product so many lines are asked for that will be read later: all at once, they would
// hold up what is read now.
constexpr int64_t ASKED = 16 * 64;
OCTAVO_INLINE void ask(const uint8_t*& p) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) prefetch_l2(p + 64 * i);
  p += ASKED;
}

// Scores of up to two blocks, s[row][0..64), for the rows of the tiles' shape. values: theirs, asked
// for.
template <int BLOCKS>
OCTAVO_INLINE void tile_scores(const uint16_t* q, const uint8_t* const* keys,
                               const uint8_t* const* values, int64_t dim, float* s) {
  constexpr int64_t Q_ROW = MAX_HEAD_DIM * sizeof(float), K_ROW = KV_BLOCK * 4;
  constexpr int64_t S_ROW = KV_SPLIT * sizeof(float);
  const uint8_t *v0 = values[0], *v1 = values[BLOCKS - 1];
  tile_zero<SUM0>();
  tile_zero<SUM1>();
  if constexpr (BLOCKS > 1) {
    tile_zero<SUM2>();
    tile_zero<SUM3>();
  }
  for (int64_t d = 0; d < dim; d += 32) {
    tile_load<LEFT0>(q + d, Q_ROW);
    const uint8_t* k = keys[0] + d * KV_BLOCK * 2;
    tile_load<RIGHT0>(k, K_ROW);
    tile_product<SUM0, LEFT0, RIGHT0>();
    ask(v0);
    tile_load<RIGHT1>(k + 64, K_ROW);
    tile_product<SUM1, LEFT0, RIGHT1>();
    ask(v0);
    if constexpr (BLOCKS > 1) {
      k = keys[1] + d * KV_BLOCK * 2;
      tile_load<RIGHT0>(k, K_ROW);
      tile_product<SUM2, LEFT0, RIGHT0>();
      ask(v1);
      tile_load<RIGHT1>(k + 64, K_ROW);
      tile_product<SUM3, LEFT0, RIGHT1>();
      ask(v1);
    }
  }
  tile_store<SUM0>(s, S_ROW);
  tile_store<SUM1>(s + 16, S_ROW);
  if constexpr (BLOCKS > 1) {
    tile_store<SUM2>(s + 32, S_ROW);
    tile_store<SUM3>(s + 48, S_ROW);
  }
}

// The values of a block with zeros for the tokens outside lo..hi (of the block), which may be stale:
// 0 * NaN is NaN.
void mask_values(const uint8_t* values, int64_t dim, int64_t lo, int64_t hi, uint16_t* out) {
  const uint16_t* v = reinterpret_cast<const uint16_t*>(values);
  const B even = load_b(EVEN_HALVES), odd = xor_b(even, set1_u8(255));
  for (int64_t t = 0; t < KV_BLOCK; t += 2) {
    B keep = set1_u8(0);
    if (t >= lo && t < hi) keep = or_b(keep, even);
    if (t + 1 >= lo && t + 1 < hi) keep = or_b(keep, odd);
    for (int64_t i = 0; i < 2 * dim; i += 32)
      store_b(out + t * dim + i, and_b(load_b(v + t * dim + i), keep));
  }
}

// A split's values, whole blocks of them: those at its ends may be copies.
struct SplitValues {
  const uint8_t* of[SPLIT_BLOCKS];
  int64_t begin, end;  // blocks
  alignas(64) uint16_t copies[2][KV_BLOCK * MAX_HEAD_DIM];
};

void whole_values(const SplitKv& kv, SplitValues& out) {
  out.begin = kv.lo / KV_BLOCK;
  out.end = (kv.hi + KV_BLOCK - 1) / KV_BLOCK;
  int copies = 0;
  for (int64_t b = out.begin; b < out.end; ++b) {
    const int64_t lo = kv.lo - b * KV_BLOCK, hi = kv.hi - b * KV_BLOCK;
    out.of[b] = kv.values[b];
    if (lo <= 0 && hi >= KV_BLOCK) continue;
    uint16_t* copy = out.copies[copies++];  // one at each end at most
    mask_values(kv.values[b], kv.dim, lo, hi, copy);
    out.of[b] = reinterpret_cast<const uint8_t*>(copy);
  }
}

// o[row][0..16 NV) of P times V, for the rows of the tiles' shape. next: the keys that are read next,
// asked for.
template <int NV>
OCTAVO_INLINE void tile_values(const uint16_t* p, const SplitValues& v, const uint8_t* const* next,
                               int64_t dim, int64_t d0, float* o) {
  constexpr int64_t P_ROW = KV_SPLIT * sizeof(float);
  const int64_t row = 4 * dim;
  tile_zero<SUM0>();
  tile_zero<SUM1>();
  if constexpr (NV > 2) {
    tile_zero<SUM2>();
    tile_zero<SUM3>();
  }
  for (int64_t b = v.begin; b < v.end; ++b) {
    const uint8_t *at = v.of[b] + 4 * d0, *ahead = next[b] + d0 / 16 * ASKED;
    tile_load<LEFT0>(p + b * KV_BLOCK, P_ROW);
    tile_load<RIGHT0>(at, row);
    tile_product<SUM0, LEFT0, RIGHT0>();
    ask(ahead);
    tile_load<RIGHT1>(at + 64, row);
    tile_product<SUM1, LEFT0, RIGHT1>();
    ask(ahead);
    if constexpr (NV > 2) {
      tile_load<RIGHT0>(at + 128, row);
      tile_product<SUM2, LEFT0, RIGHT0>();
      ask(ahead);
      tile_load<RIGHT1>(at + 192, row);
      tile_product<SUM3, LEFT0, RIGHT1>();
      ask(ahead);
    }
  }
  tile_store<SUM0>(o + d0, row);
  tile_store<SUM1>(o + d0 + 16, row);
  if constexpr (NV > 2) {
    tile_store<SUM2>(o + d0 + 32, row);
    tile_store<SUM3>(o + d0 + 48, row);
  }
}

template <>
void attend_split<Tiled>(const AttendArgs& a, int64_t row0, int rows, int64_t split,
                         const SplitKv& kv, const Queries& queries, AttendScratch& x, float* part) {
  const auto* q = reinterpret_cast<const uint16_t*>(queries.q[0]);
  const int64_t begin = kv.lo / KV_BLOCK, end = (kv.hi + KV_BLOCK - 1) / KV_BLOCK;
  int64_t b = begin;
  for (; b + 2 <= end; b += 2)
    tile_scores<2>(q, kv.keys + b, kv.values + b, kv.dim, &x.scores[0][b * KV_BLOCK]);
  if (b < end)
    tile_scores<1>(q, kv.keys + b, kv.values + b, kv.dim, &x.scores[0][b * KV_BLOCK]);
  for (int r = 0; r < rows; ++r) {
    const RowSum sum = softmax_row<Half>(x, r, a.scale * LOG2_E, seen(a, row0 + r, 1, split), kv);
    part[r] = sum.max;
    part[rows + r] = sum.sum;
    // It has written halves of blocks; tiles read whole ones.
    auto* p = reinterpret_cast<uint16_t*>(x.p[r]);
    const int64_t first = kv.lo / 16 * 16, last = (kv.hi + 15) / 16 * 16;
    if (first % KV_BLOCK != 0) put_p(p + first - 16, zero_f());
    if (last % KV_BLOCK != 0) put_p(p + last, zero_f());
  }
  SplitValues values;
  whole_values(kv, values);
  const auto* p = reinterpret_cast<const uint16_t*>(x.p[0]);
  float* o = part + 2 * rows;
  int64_t d = 0;
  for (; d + 64 <= kv.dim; d += 64) tile_values<4>(p, values, kv.next, kv.dim, d, o);
  if (d < kv.dim) tile_values<2>(p, values, kv.next, kv.dim, d, o);
}

void attend_with_tiles(const AttendArgs& a, int64_t row0, int rows, SplitRange splits,
                       const Upcoming& next, float* state) {
  if (a.type != KvType::BF16 || a.dim % 32 != 0)
    return KERNELS_AVX512.attention->attend(a, row0, rows, splits, next, state);
  const TileShape shape(rows < TILE_ROWS ? rows : TILE_ROWS, 16);
  attend_as<Tiled>(a, row0, rows, splits, next, state);
}

}  // namespace

constinit const AttentionTable ATTENTION_AMX{attend_with_tiles, fold, finish};

}  // namespace octavo
