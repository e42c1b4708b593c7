#include "linear.h"

#include <type_traits>

namespace octavo {
namespace {

constexpr size_t align64(size_t n) { return (n + 63) / 64 * 64; }

// Lays the planes out one after another from `mem`; returns how far they reach.
size_t lay_out(Acts& a, uint8_t* mem) {
  const size_t groups = size_t((a.rows + a.group - 1) / a.group);
  const size_t blocks = groups * size_t(a.blocks * a.group);  // blocks of 32, of all rows
  size_t at = 0;
  auto plane = [&](auto*& pointer, size_t count, bool wanted) {
    using T = std::remove_reference_t<decltype(*pointer)>;
    pointer = wanted ? reinterpret_cast<T*>(mem + at) : nullptr;
    if (wanted) at = align64(at + count * sizeof(T));
  };
  const bool a8 = a.needs & ACT_A8, tiles = (a.needs & ACT_TILES) && a.rows >= LEAST_TILE_ROWS;
  plane(a.q, blocks * (a.needs & ACT_PAIR ? 64 : 32), a8 && !tiles);
  plane(a.t, blocks * (a.needs & ACT_PAIR ? 64 : 32), a8 && tiles);
  plane(a.wide, blocks, a.needs & ACT_PAIR);
  plane(a.d, blocks, a8);
  plane(a.s, blocks, a.needs & ACT_S);
  plane(a.s16, blocks * 2, a.needs & ACT_S16);
  plane(a.n8, blocks, (a.needs & ACT_N8) && !tiles);
  plane(a.n16, blocks, (a.needs & ACT_N16) && !tiles);
  plane(a.n128, blocks, (a.needs & ACT_N128) && !tiles);
  plane(a.n32, blocks * 2, (a.needs & ACT_N32) && !tiles);
  plane(a.h, blocks * 32, a.needs & ACT_BF16);
  plane(a.f, blocks * 32, a.needs & ACT_F32);
  return at;
}

Acts shape(int64_t rows, int64_t k, uint32_t needs) {
  Acts a = {};
  a.rows = rows;
  a.k = k;
  a.blocks = (k + 63) / 64 * 2;
  a.group = rows < 1 ? 1 : rows < MAX_GROUP ? rows : MAX_GROUP;
  a.needs = needs;
  return a;
}

}  // namespace

size_t acts_bytes(int64_t rows, int64_t k, uint32_t needs) {
  Acts a = shape(rows, k, needs);
  return lay_out(a, nullptr);
}

Acts acts_at(void* mem, int64_t rows, int64_t k, uint32_t needs) {
  Acts a = shape(rows, k, needs);
  lay_out(a, static_cast<uint8_t*>(mem));
  return a;
}

}  // namespace octavo
