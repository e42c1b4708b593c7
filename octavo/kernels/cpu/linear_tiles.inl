// Products of many rows with quantised weights by matrix tiles (tiles.h), to the very bits of
// linear.inl's: a block's sum is an exact integer there, and here too. Quants and quantised
// activations are integers of at most eight significant bits, which bf16 holds; their products and
// sums are floats below 2^24, whatever their order. Scales then come to them as they do there.
//
// A register sums one block of 16 rows x 16 channels and must then be stored and scaled: the vector
// pipes have about as much to do as the tiles' unit, and only in part at the same time (a float
// multiply-add takes a slot of the unit's). So that they do at all, each instruction is given when
// its operands are ready: what is stored waits in order, and so does what comes behind it. Hence
// Procession: the four registers in turn, each stored two turns after its products, and in every
// turn an eighth of what was summed before is added. Measured on Emerald Rapids, one core, 128 rows:
// Q4_1 and Q4_K 1.4 times the vectors' speed, Q8_0 1.15, Q6_K and Q5_K 1.05; of the 400 cycles that a
// block of 16 rows x 64 channels takes the unit needs 190.
#include "linear.h"
#include "tiles.h"
#include "weights.inl"

namespace octavo {
namespace {

// CHUNK: blocks of a few panels that TOGETHER tiles of rows pass before the next; L1 holds their
// weights and sums. SEGMENT: blocks that are unpacked, into L2, for all rows.
constexpr int64_t CHUNK = 2, TOGETHER = 8, SEGMENT = 64;
constexpr int64_t TILE = MAX_GROUP;
constexpr int TURNS = 4;  // of a block: one for each register of sums

// How a type's blocks become tiles. In one register a block's sum stays exact if no weight exceeds
// 16 (32 of them, times 2^15 - 128 at most); else the high bytes' products have one of their own. A
// type with two scales a block has a register for each half: 16 times 32. Register i is of panel
// i % kPanels.
template <class T>
struct TileType {
  static constexpr bool kHalves = T::kOffset == SPLIT;
  static constexpr int kMost = T::kOffset == NONE ? (T::kFifthBit ? 31 : 15) : T::kOffsetValue;
  static constexpr bool kApart = !kHalves && kMost > 16;
  static constexpr int kPanels = kHalves || kApart ? 2 : 4;  // computed together
};

// One block of a panel in bf16: row i has the elements 2i and 2i + 1 of all channels.
struct TileBlock {
  alignas(64) uint16_t w[16][32];
  float d[16], other[16];  // other: d2 or m
};

// The bf16 of -16..15 or of 0..31, in the order of their low five bits as unsigned quants.
struct Words {
  alignas(64) uint16_t of[32];
};
constexpr Words small_integers(int offset) {
  Words w = {};
  for (int i = 0; i < 32; ++i)
    w.of[i] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, float(i - offset)) >> 16);
  return w;
}

// Pair h of each channel's four bytes as bf16, less the type's offset.
template <class T, int h>
OCTAVO_INLINE B tile_row(B quad) {
  if constexpr (T::kAnyByte || T::kOffset == SPLIT) {
    const I offset = set1(int32_t{T::kOffsetValue});
    const I even = bitcast_i(to_f32(sub(u8_lane<2 * h>(quad), offset)));
    const I odd = bitcast_i(to_f32(sub(u8_lane<2 * h + 1>(quad), offset)));
    return {or_(shru<16>(even), odd).v};
  } else {
    static constexpr Words integers = small_integers(T::kOffsetValue);
    alignas(64) static constexpr Pairs which = pairs_of(h);  // every other byte is not looked at
    const __m512i index = _mm512_permutexvar_epi8(_mm512_load_si512(&which), quad.v);
    return {_mm512_permutexvar_epi16(index, _mm512_load_si512(&integers))};
  }
}

template <class T>
void unpack_tiles(const uint8_t* panel, int64_t blocks, int64_t b0, int64_t count, TileBlock* out) {
  const int64_t units = blocks / T::kBlocks;
  for (int64_t b = b0; b < b0 + count; ++b, ++out) {
    const Unit unit = T::unit(panel, b / T::kBlocks, units);
    constexpr int64_t lines = (T::kUnit / 64 + T::kBlocks - 1) / T::kBlocks;
#pragma GCC unroll 16
    for (int64_t i = 0; i < lines; ++i)
      prefetch_l2(unit.at + (b % T::kBlocks * lines + i) * 64 + 8192);
    const Block x = T::block(unit, b % T::kBlocks);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      store_b(out->w[2 * j], tile_row<T, 0>(x.w[j]));
      store_b(out->w[2 * j + 1], tile_row<T, 1>(x.w[j]));
    }
    store(out->d, x.d);
    if constexpr (T::kHasMin) store(out->other, x.m);
    else store(out->other, x.d2);
  }
}

// The sums of a chunk of one tile of rows: of each block its registers, as they leave them.
struct Sums {
  alignas(64) float of[CHUNK][TURNS][TILE][16];
};

// The weights of a chunk. Of fewer panels than kPanels the others' products are computed from
// whatever lies there, and not wanted.
template <class T>
using Weights = TileBlock[TileType<T>::kPanels][CHUNK];

// A chunk of a tile of rows.
template <class T>
struct Piece {
  const uint16_t* t;    // [blocks][2, or 1 without ACT_PAIR][TILE][32]
  const uint8_t* wide;  // [blocks][TILE]; null without ACT_PAIR
  const float *d, *s;   // likewise
  const Weights<T>* w;
  float (*f)[16 * TileType<T>::kPanels];  // the rows' outputs
};

// Whether any row has a wide quad among those of `mask` in each byte.
OCTAVO_INLINE bool any_wide(const uint8_t* wide, uint64_t mask) {
  return ((word64(wide) | word64(wide + 8)) & mask) != 0;
}

// The products of block b that register i is for. What LEFT0 and LEFT1 hold, the low and the high
// bytes, stays for the turns that follow; `high`: whether there are any.
template <class T, int i>
OCTAVO_INLINE void multiply(const Piece<T>& x, int64_t b, bool& high) {
  using Type = TileType<T>;
  constexpr int panel = i % Type::kPanels, half = Type::kHalves ? i / Type::kPanels : 0;
  constexpr Tile SUM = Tile(SUM0 + i), RIGHT = Tile(RIGHT0 + i % 2);
  constexpr bool apart = Type::kApart && i >= Type::kPanels;
  if constexpr (i % Type::kPanels == 0 && !apart) {
    const uint16_t* t = x.t + b * (x.wide ? 2 : 1) * TILE * 32 + half * 16;
    constexpr uint64_t quads = !Type::kHalves ? ~0ull : 0x0f0f0f0f0f0f0f0full << 4 * half;
    tile_load<LEFT0>(t, 64);
    high = x.wide != nullptr && any_wide(x.wide + b * TILE, quads);
    if (high) tile_load<LEFT1>(t + TILE * 32, 64);
  }
  if constexpr (!apart) tile_load<RIGHT>((*x.w)[panel][b].w[half * 8], 64);
  tile_zero<SUM>();
  if constexpr (!apart) tile_product<SUM, LEFT0, RIGHT>();
  if constexpr (apart || !Type::kApart)
    if (high) tile_product<SUM, LEFT1, RIGHT>();
}

// A block's part of 16 outputs of a row, in linear.inl's order of operations. sums: their panel's.
template <class T>
OCTAVO_INLINE F add_block(F f, const float (*sums)[TILE][16], int64_t r, F d, F other, F scale,
                          F s) {
  using Type = TileType<T>;
  const F sum = load(sums[0][r]);
  if constexpr (Type::kHalves)
    return fma(fma(load(sums[Type::kPanels][r]), other, mul(sum, d)), scale, f);
  F all = sum;
  if constexpr (Type::kApart) all = add(sum, load(sums[Type::kPanels][r]));
  f = fma(all, mul(d, scale), f);
  return T::kHasMin ? fma(other, s, f) : f;
}

// Adds a piece's sums to an eighth of its outputs: some rows of one panel.
template <class T>
OCTAVO_INLINE void add_part(const Piece<T>& x, int64_t part, const Sums& sums) {
  constexpr int P = TileType<T>::kPanels, R = TILE * P / (CHUNK * TURNS);
  const int64_t p = part * R / TILE, r0 = part * R % TILE;
  float* out = x.f[r0] + 16 * p;
  F f[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) f[r] = load(out + r * 16 * P);
#pragma GCC unroll 2
  for (int64_t b = 0; b < CHUNK; ++b) {
    const F d = load((*x.w)[p][b].d), other = load((*x.w)[p][b].other);
    const float *scale = x.d + b * TILE + r0, *s = x.s + b * TILE + r0;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      f[r] = add_block<T>(f[r], sums.of[b] + p, r0 + r, d, other, set1(scale[r]), set1(s[r]));
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store(out + r * 16 * P, f[r]);
}

// Pieces as a procession of turns (see above), CHUNK * TURNS each. In its turns 2 to 7 the parts 0 to
// 5 of the piece before are added, whose last sums are stored in turns 0 and 1; in these the parts 6
// and 7 of the piece before that, whose sums are overwritten from turn 2 on.
template <class T>
class Procession {
 public:
  void step(const Piece<T>& x) {
    for (int64_t b = 0; b < CHUNK; ++b) {
      turn<0>(x, b);
      turn<1>(x, b);
      turn<2>(x, b);
      turn<3>(x, b);
    }
    two_before_ = before_;
    before_ = x;
    ++count_;
  }
  // What the last pieces' turns have left to do.
  void finish() {
    if (count_ > 1) add(two_before_, CHUNK * TURNS - LAG, CHUNK * TURNS, count_);
    tile_store<SUM2>(late_[2], 64);
    tile_store<SUM3>(late_[3], 64);
    add(before_, 0, CHUNK * TURNS, count_ - 1);
  }

 private:
  static constexpr int64_t LAG = 2;

  template <int i>
  inline __attribute__((always_inline)) void turn(const Piece<T>& x, int64_t b) {
    multiply<T, i>(x, b, high_);
    float* mine = sums_[count_ % 2].of[b][i][0];
    constexpr int stored = (i + LAG) % TURNS;
    if constexpr (i < LAG) {
      tile_store<Tile(SUM0 + stored)>(late_[stored], 64);
      late_[stored] = mine + LAG * TILE * 16;
    } else {
      tile_store<Tile(SUM0 + stored)>(mine - LAG * TILE * 16, 64);
    }
    const int64_t part = b * TURNS + i - LAG;
    const int64_t late = part + CHUNK * TURNS;
    if (part < 0 && count_ > 1) add(two_before_, late, late + 1, count_);
    if (part >= 0 && count_ > 0) add(before_, part, part + 1, count_ - 1);
  }
  inline __attribute__((always_inline)) void add(const Piece<T>& x, int64_t from, int64_t to,
                                                 int64_t piece) {
    for (int64_t part = from; part < to; ++part) add_part<T>(x, part, sums_[piece % 2]);
  }

  Sums sums_[2];
  Piece<T> before_ = {}, two_before_ = {};
  // Where registers 2 and 3 of the block before go; at first, where nobody looks.
  float* late_[TURNS] = {nullptr, nullptr, sums_[1].of[0][0][0], sums_[1].of[0][0][0]};
  int64_t count_ = 0;
  bool high_ = false;
};

// Where outputs go: row0's first.
struct Outputs {
  int64_t row0, row1;
  float* out;
  int64_t ld;
};

// Blocks b0.. of as many chunks, unpacked, for the rows of some tiles.
template <class T>
void run_segment(const Weights<T>* w, int64_t chunks, const Acts& a, int64_t b0, int64_t tile0,
                 int64_t tiles, int panels, const Outputs& to) {
  constexpr int P = TileType<T>::kPanels;
  const int64_t per = a.wide ? 64 : 32;
  alignas(64) float f[TOGETHER][TILE][16 * P];
  auto each = [&](auto&& fn) {
    for (int64_t i = 0; i < tiles * TILE; ++i) {
      const int64_t row = tile0 * TILE + i;
      if (row < to.row0 || row >= to.row1) continue;
      for (int p = 0; p < panels; ++p)
        fn(to.out + (row - to.row0) * to.ld + 16 * p, f[i / TILE][i % TILE] + 16 * p);
    }
  };
  if (b0 > 0) {
    each([](const float* out, float* own) { store(own, load(out)); });
  } else {
    for (int64_t i = 0; i < tiles * TILE * P; ++i) store(f[0][0] + 16 * i, zero_f());
  }
  Procession<T> procession;
  for (int64_t c = 0; c < chunks; ++c)
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t at = ((tile0 + i) * a.blocks + b0 + c * CHUNK) * TILE;
      const float* s = a.s ? a.s : a.d;
      procession.step({a.t + at * per, a.wide ? a.wide + at : nullptr, a.d + at, s + at, w + c, f[i]});
    }
  procession.finish();
  each([](float* out, const float* own) { store(out, load(own)); });
}

// A thread's unpacked segment: too large for the stacks that some systems give to threads.
alignas(64) thread_local uint8_t unpacked[SEGMENT * 4 * sizeof(TileBlock)];

template <class T>
void linear_tiles(const PackedWeight& weight, int64_t panel0, int64_t panel1, const Acts& a,
                  int64_t row0, int64_t row1, float* out, int64_t ld) {
  if (row0 >= row1) return;
  constexpr int64_t P = TileType<T>::kPanels;
  const TileShape shape(TILE, TileType<T>::kHalves ? 8 : 16);
  static_assert(sizeof(Weights<T>) * SEGMENT / CHUNK <= sizeof unpacked);
  auto* w = reinterpret_cast<Weights<T>*>(unpacked);
  const int64_t tile1 = (row1 + TILE - 1) / TILE;
  for (int64_t p0 = panel0; p0 < panel1; p0 += P) {
    const int panels = static_cast<int>(P < panel1 - p0 ? P : panel1 - p0);
    const Outputs to = {row0, row1, out + (p0 - panel0) * 16, ld};
    for (int64_t b0 = 0; b0 < a.blocks; b0 += SEGMENT) {
      const int64_t left = a.blocks - b0, chunks = (SEGMENT < left ? SEGMENT : left) / CHUNK;
      for (int64_t c = 0; c < chunks; ++c)
        for (int p = 0; p < panels; ++p)
          unpack_tiles<T>(weight.data + (p0 + p) * weight.panel_bytes, a.blocks, b0 + c * CHUNK,
                          CHUNK, w[c][p]);
      for (int64_t tile = row0 / TILE; tile < tile1; tile += TOGETHER)
        run_segment<T>(w, chunks, a, b0, tile, TOGETHER < tile1 - tile ? TOGETHER : tile1 - tile,
                       panels, to);
    }
  }
}

// Few rows, and other products than int8's, are the vectors'.
void linear_with_tiles(const PackedWeight& w, int64_t panel0, int64_t panel1, const Acts& a,
                       int64_t row0, int64_t row1, float* out, int64_t ld) {
  const auto vectors = KERNELS_AVX512.linear->linear;
  if (a.t == nullptr) return vectors(w, panel0, panel1, a, row0, row1, out, ld);
  switch (w.type) {
    case WType::Q4_0: return linear_tiles<Q4_0>(w, panel0, panel1, a, row0, row1, out, ld);
    case WType::Q4_1: return linear_tiles<Q4_1>(w, panel0, panel1, a, row0, row1, out, ld);
    case WType::Q5_0: return linear_tiles<Q5_0>(w, panel0, panel1, a, row0, row1, out, ld);
    case WType::Q5_1: return linear_tiles<Q5_1>(w, panel0, panel1, a, row0, row1, out, ld);
    case WType::Q8_0: return linear_tiles<Q8_0>(w, panel0, panel1, a, row0, row1, out, ld);
    case WType::Q4_K: return linear_tiles<Q4_K>(w, panel0, panel1, a, row0, row1, out, ld);
    case WType::Q5_K: return linear_tiles<Q5_K>(w, panel0, panel1, a, row0, row1, out, ld);
    case WType::Q6_K: return linear_tiles<Q6_K>(w, panel0, panel1, a, row0, row1, out, ld);
    default: return vectors(w, panel0, panel1, a, row0, row1, out, ld);
  }
}

uint32_t needs_with_tiles(WType type, Products products) {
  const uint32_t needs = KERNELS_AVX512.linear->needs(type, products);
  return needs & ACT_A8 ? needs | ACT_TILES : needs;
}

void embed_row_by_vectors(const PackedWeight& w, int64_t id, float scale, float* out) {
  KERNELS_AVX512.linear->embed_row(w, id, scale, out);
}

}  // namespace

constinit const LinearTable LINEAR_AMX = {needs_with_tiles, prepare, linear_with_tiles,
                                          embed_row_by_vectors};

}  // namespace octavo
