#include "pack.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace octavo {
namespace {

constexpr int64_t BLOCK = 32;
constexpr int64_t SUPER = 256;

struct TypeInfo {
  WType type;
  const char* name;
  int64_t group;   // elements that a file block holds
  int64_t bytes;   // of a file block
  int64_t packed;  // bytes of 16 channels x 64 k; K-quants: x 256 k
};

constexpr TypeInfo TYPES[] = {
    {WType::F32, "F32", 1, 4, 4096},       {WType::F16, "F16", 1, 2, 2048},
    {WType::BF16, "BF16", 1, 2, 2048},     {WType::Q4_0, "Q4_0", 32, 18, 576},
    {WType::Q4_1, "Q4_1", 32, 20, 640},    {WType::Q5_0, "Q5_0", 32, 22, 704},
    {WType::Q5_1, "Q5_1", 32, 24, 768},    {WType::Q8_0, "Q8_0", 32, 34, 1088},
    {WType::Q4_K, "Q4_K", 256, 144, 2368}, {WType::Q5_K, "Q5_K", 256, 176, 2880},
    {WType::Q6_K, "Q6_K", 256, 210, 3328},
};

const TypeInfo* find(int32_t type) {
  for (const TypeInfo& t : TYPES)
    if (static_cast<int32_t>(t.type) == type) return &t;
  return nullptr;
}

const TypeInfo& info(WType type) {
  const TypeInfo* t = find(static_cast<int32_t>(type));
  if (t == nullptr)
    throw std::invalid_argument("tensor type " + std::to_string(static_cast<int32_t>(type)) +
                                " cannot be packed");
  return *t;
}

// Where the d of Q6_K's super-blocks end and its super-blocks begin.
constexpr size_t q6k_head(int64_t k) { return size_t(k / SUPER * 32 + 63) / 64 * 64; }

// ---- blocks of 16 channels x 32 k, as bytes, to and from vectors --------------------------------

using Quants = uint8_t[16][BLOCK];

void put_nibbles(const Quants& q, uint8_t* out) {
  for (int j = 0; j < 4; ++j)
    for (int c = 0; c < 16; ++c)
      for (int t = 0; t < 4; ++t)
        out[64 * j + 4 * c + t] =
            static_cast<uint8_t>((q[c][4 * j + t] & 15) | q[c][4 * j + t + 16] << 4);
}

void take_nibbles(const uint8_t* in, Quants& q) {
  for (int j = 0; j < 4; ++j)
    for (int c = 0; c < 16; ++c)
      for (int t = 0; t < 4; ++t) {
        q[c][4 * j + t] = in[64 * j + 4 * c + t] & 15;
        q[c][4 * j + t + 16] = in[64 * j + 4 * c + t] >> 4;
      }
}

void put_fifth_bits(const Quants& q, uint8_t* out) {
  for (int j = 0; j < 8; ++j) {
    uint64_t mask = 0;
    for (int c = 0; c < 16; ++c)
      for (int t = 0; t < 4; ++t)
        mask |= static_cast<uint64_t>(q[c][4 * j + t] >> 4 & 1) << (4 * c + t);
    std::memcpy(out + 8 * j, &mask, 8);
  }
}

void take_fifth_bits(const uint8_t* in, Quants& q) {
  for (int j = 0; j < 8; ++j) {
    uint64_t mask;
    std::memcpy(&mask, in + 8 * j, 8);
    for (int c = 0; c < 16; ++c)
      for (int t = 0; t < 4; ++t) q[c][4 * j + t] |= (mask >> (4 * c + t) & 1) << 4;
  }
}

// Byte 4c + t of vector v: bits 2i, 2i + 1 are the high pair of quad 4v + i.
void put_high_pairs(const Quants& q, uint8_t* out) {
  for (int v = 0; v < 2; ++v)
    for (int c = 0; c < 16; ++c)
      for (int t = 0; t < 4; ++t) {
        int byte = 0;
        for (int i = 0; i < 4; ++i) byte |= (q[c][16 * v + 4 * i + t] >> 4 & 3) << (2 * i);
        out[64 * v + 4 * c + t] = static_cast<uint8_t>(byte);
      }
}

void take_high_pairs(const uint8_t* in, Quants& q) {
  for (int v = 0; v < 2; ++v)
    for (int c = 0; c < 16; ++c)
      for (int t = 0; t < 4; ++t)
        for (int i = 0; i < 4; ++i)
          q[c][16 * v + 4 * i + t] |= (in[64 * v + 4 * c + t] >> (2 * i) & 3) << 4;
}

void put_bytes(const Quants& q, uint8_t* out) {
  for (int j = 0; j < 8; ++j)
    for (int c = 0; c < 16; ++c) std::memcpy(out + 64 * j + 4 * c, &q[c][4 * j], 4);
}

void take_bytes(const uint8_t* in, Quants& q) {
  for (int j = 0; j < 8; ++j)
    for (int c = 0; c < 16; ++c) std::memcpy(&q[c][4 * j], in + 64 * j + 4 * c, 4);
}

// ---- file blocks to and from unsigned quants ----------------------------------------------------

// d[, m][, qh], qs: the blocks of 32 that predate K-quants. Offsets of their parts in the file.
struct Legacy {
  bool has_m, has_fifth;
  int qh, qs;
};

constexpr Legacy legacy(WType type) {
  switch (type) {
    case WType::Q4_1: return {true, false, 0, 4};
    case WType::Q5_0: return {false, true, 2, 6};
    case WType::Q5_1: return {true, true, 4, 8};
    default: return {false, false, 0, 2};  // Q4_0, Q8_0
  }
}

void read_legacy(WType type, const uint8_t* in, uint8_t* q) {
  const Legacy l = legacy(type);
  if (type == WType::Q8_0) {
    for (int i = 0; i < 32; ++i) q[i] = in[2 + i] ^ 0x80;
    return;
  }
  for (int i = 0; i < 16; ++i) {
    q[i] = in[l.qs + i] & 15;
    q[i + 16] = in[l.qs + i] >> 4;
  }
  if (!l.has_fifth) return;
  uint32_t high;
  std::memcpy(&high, in + l.qh, 4);
  for (int i = 0; i < 32; ++i) q[i] |= (high >> i & 1) << 4;
}

void write_legacy(WType type, const uint8_t* q, uint8_t* out) {
  const Legacy l = legacy(type);
  if (type == WType::Q8_0) {
    for (int i = 0; i < 32; ++i) out[2 + i] = q[i] ^ 0x80;
    return;
  }
  for (int i = 0; i < 16; ++i)
    out[l.qs + i] = static_cast<uint8_t>((q[i] & 15) | q[i + 16] << 4);
  if (!l.has_fifth) return;
  uint32_t high = 0;
  for (int i = 0; i < 32; ++i) high |= static_cast<uint32_t>(q[i] >> 4 & 1) << i;
  std::memcpy(out + l.qh, &high, 4);
}

// Q4_K and Q5_K: d, dmin, 12 bytes of 6-bit scales and minima, [32 bytes of fifth bits,] 128 of qs.
void read_scales(const uint8_t* in, uint8_t* sc, uint8_t* mn) {
  for (int b = 0; b < 4; ++b) {
    sc[b] = in[b] & 63;
    mn[b] = in[b + 4] & 63;
    sc[b + 4] = static_cast<uint8_t>((in[b + 8] & 15) | in[b] >> 6 << 4);
    mn[b + 4] = static_cast<uint8_t>(in[b + 8] >> 4 | in[b + 4] >> 6 << 4);
  }
}

void write_scales(const uint8_t* sc, const uint8_t* mn, uint8_t* out) {
  for (int b = 0; b < 4; ++b) {
    out[b] = static_cast<uint8_t>(sc[b] | sc[b + 4] >> 4 << 6);
    out[b + 4] = static_cast<uint8_t>(mn[b] | mn[b + 4] >> 4 << 6);
    out[b + 8] = static_cast<uint8_t>((sc[b + 4] & 15) | mn[b + 4] << 4);
  }
}

// Block b (32 k) of a Q4_K or Q5_K super-block.
void read_k45(WType type, const uint8_t* in, int b, uint8_t* q) {
  const bool fifth = type == WType::Q5_K;
  const uint8_t* qs = in + (fifth ? 48 : 16) + b / 2 * 32;
  for (int i = 0; i < 32; ++i) q[i] = qs[i] >> (b % 2 * 4) & 15;
  if (fifth)
    for (int i = 0; i < 32; ++i) q[i] |= (in[16 + i] >> b & 1) << 4;
}

void write_k45(WType type, const uint8_t* q, int b, uint8_t* out) {
  const bool fifth = type == WType::Q5_K;
  uint8_t* qs = out + (fifth ? 48 : 16) + b / 2 * 32;
  for (int i = 0; i < 32; ++i) qs[i] |= (q[i] & 15) << (b % 2 * 4);
  if (fifth)
    for (int i = 0; i < 32; ++i) out[16 + i] |= (q[i] >> 4 & 1) << b;
}

// Block b of a Q6_K super-block: ql[128], qh[64], sc[16], d. Halves of 128 k; in each, blocks 0, 1
// are the low nibbles of its 64 ql, blocks 2, 3 the high ones; qh has two bits per block.
void read_q6k(const uint8_t* in, int b, uint8_t* q) {
  const uint8_t* ql = in + b / 4 * 64 + b % 2 * 32;
  const uint8_t* qh = in + 128 + b / 4 * 32;
  for (int i = 0; i < 32; ++i)
    q[i] = static_cast<uint8_t>((ql[i] >> (b % 4 / 2 * 4) & 15) | (qh[i] >> (b % 4 * 2) & 3) << 4);
}

void write_q6k(const uint8_t* q, int b, uint8_t* out) {
  uint8_t* ql = out + b / 4 * 64 + b % 2 * 32;
  uint8_t* qh = out + 128 + b / 4 * 32;
  for (int i = 0; i < 32; ++i) {
    ql[i] |= (q[i] & 15) << (b % 4 / 2 * 4);
    qh[i] |= (q[i] >> 4) << (b % 4 * 2);
  }
}

// ---- panels -------------------------------------------------------------------------------------

// The 16 rows of a panel in the file; null beyond the last.
struct Rows {
  const uint8_t* row[16];
};

void pack_legacy(WType type, const Rows& rows, int64_t blocks, uint8_t* out) {
  const TypeInfo& t = info(type);
  const Legacy l = legacy(type);
  const int64_t quants = type == WType::Q8_0 ? 512 : l.has_fifth ? 320 : 256;
  for (int64_t b = 0; b < blocks; ++b) {
    uint8_t* scales = out + b / 2 * t.packed + b % 2 * (l.has_m ? t.packed / 2 : 32);
    uint8_t* body = l.has_m ? scales + 64 : out + b / 2 * t.packed + 64 + b % 2 * quants;
    Quants q = {};
    for (int c = 0; c < 16; ++c) {
      if (rows.row[c] == nullptr) continue;
      const uint8_t* in = rows.row[c] + b * t.bytes;
      std::memcpy(scales + 2 * c, in, 2);
      if (l.has_m) std::memcpy(scales + 32 + 2 * c, in + 2, 2);
      read_legacy(type, in, q[c]);
    }
    if (type == WType::Q8_0) {
      put_bytes(q, body);
      continue;
    }
    if (l.has_fifth) put_fifth_bits(q, body);
    put_nibbles(q, body + (l.has_fifth ? 64 : 0));
  }
}

void pack_k45(WType type, const Rows& rows, int64_t supers, uint8_t* out) {
  const TypeInfo& t = info(type);
  const bool fifth = type == WType::Q5_K;
  for (int64_t u = 0; u < supers; ++u, out += t.packed) {
    for (int c = 0; c < 16; ++c) {
      if (rows.row[c] == nullptr) continue;
      const uint8_t* in = rows.row[c] + u * t.bytes;
      uint8_t sc[8], mn[8];
      std::memcpy(out + 2 * c, in, 2);
      std::memcpy(out + 32 + 2 * c, in + 2, 2);
      read_scales(in + 4, sc, mn);
      for (int b = 0; b < 8; ++b) out[64 + 16 * b + c] = sc[b];
      for (int b = 0; b < 8; ++b) out[192 + 16 * b + c] = mn[b];
    }
    for (int b = 0; b < 8; ++b) {
      Quants q = {};
      for (int c = 0; c < 16; ++c)
        if (rows.row[c] != nullptr) read_k45(type, rows.row[c] + u * t.bytes, b, q[c]);
      uint8_t* body = out + 320 + b * (fifth ? 320 : 256);
      if (fifth) put_fifth_bits(q, body);
      put_nibbles(q, body + (fifth ? 64 : 0));
    }
  }
}

void pack_q6k(const Rows& rows, int64_t supers, uint8_t* out) {
  const TypeInfo& t = info(WType::Q6_K);
  uint8_t* d = out;
  out += q6k_head(supers * SUPER);
  for (int64_t u = 0; u < supers; ++u, out += t.packed, d += 32) {
    for (int c = 0; c < 16; ++c) {
      if (rows.row[c] == nullptr) continue;
      const uint8_t* in = rows.row[c] + u * t.bytes;
      std::memcpy(d + 2 * c, in + 208, 2);
      for (int i = 0; i < 16; ++i) out[16 * i + c] = in[192 + i];
    }
    for (int b = 0; b < 8; ++b) {
      Quants q = {};
      for (int c = 0; c < 16; ++c)
        if (rows.row[c] != nullptr) read_q6k(rows.row[c] + u * t.bytes, b, q[c]);
      put_nibbles(q, out + 256 + b * 384);
      put_high_pairs(q, out + 256 + b * 384 + 256);
    }
  }
}

// [k][16] of elements; bf16 keeps pairs of k together: [k/2][16][2].
template <class T>
void pack_float(const Rows& rows, int64_t k, bool pairs, uint8_t* out) {
  for (int c = 0; c < 16; ++c) {
    if (rows.row[c] == nullptr) continue;
    for (int64_t i = 0; i < k; ++i) {
      const int64_t at = pairs ? i / 2 * 32 + 2 * c + i % 2 : i * 16 + c;
      std::memcpy(out + at * int64_t(sizeof(T)), rows.row[c] + i * int64_t(sizeof(T)), sizeof(T));
    }
  }
}

void pack_panel(const Source& s, const Rows& rows, uint8_t* out) {
  switch (s.type) {
    case WType::F32: return pack_float<uint32_t>(rows, s.k, false, out);
    case WType::F16: return pack_float<uint16_t>(rows, s.k, false, out);
    case WType::BF16: return pack_float<uint16_t>(rows, s.k, true, out);
    case WType::Q4_K:
    case WType::Q5_K: return pack_k45(s.type, rows, s.k / SUPER, out);
    case WType::Q6_K: return pack_q6k(rows, s.k / SUPER, out);
    default: return pack_legacy(s.type, rows, s.k / BLOCK, out);
  }
}

// ---- back again ---------------------------------------------------------------------------------

// Channel c's row of a panel; `count` of the 16 are real.
struct Target {
  uint8_t* row[16];
  int count;
};

void unpack_legacy(WType type, const uint8_t* in, int64_t blocks, const Target& target) {
  const TypeInfo& t = info(type);
  const Legacy l = legacy(type);
  const int64_t quants = type == WType::Q8_0 ? 512 : l.has_fifth ? 320 : 256;
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* scales = in + b / 2 * t.packed + b % 2 * (l.has_m ? t.packed / 2 : 32);
    const uint8_t* body = l.has_m ? scales + 64 : in + b / 2 * t.packed + 64 + b % 2 * quants;
    Quants q = {};
    if (type == WType::Q8_0) {
      take_bytes(body, q);
    } else {
      take_nibbles(body + (l.has_fifth ? 64 : 0), q);
      if (l.has_fifth) take_fifth_bits(body, q);
    }
    for (int c = 0; c < target.count; ++c) {
      uint8_t* out = target.row[c] + b * t.bytes;
      std::memcpy(out, scales + 2 * c, 2);
      if (l.has_m) std::memcpy(out + 2, scales + 32 + 2 * c, 2);
      write_legacy(type, q[c], out);
    }
  }
}

void unpack_k45(WType type, const uint8_t* in, int64_t supers, const Target& target) {
  const TypeInfo& t = info(type);
  const bool fifth = type == WType::Q5_K;
  for (int64_t u = 0; u < supers; ++u, in += t.packed) {
    for (int c = 0; c < target.count; ++c) {
      uint8_t* out = target.row[c] + u * t.bytes;
      uint8_t sc[8], mn[8];
      std::memcpy(out, in + 2 * c, 2);
      std::memcpy(out + 2, in + 32 + 2 * c, 2);
      for (int b = 0; b < 8; ++b) sc[b] = in[64 + 16 * b + c];
      for (int b = 0; b < 8; ++b) mn[b] = in[192 + 16 * b + c];
      write_scales(sc, mn, out + 4);
    }
    for (int b = 0; b < 8; ++b) {
      const uint8_t* body = in + 320 + b * (fifth ? 320 : 256);
      Quants q = {};
      take_nibbles(body + (fifth ? 64 : 0), q);
      if (fifth) take_fifth_bits(body, q);
      for (int c = 0; c < target.count; ++c) write_k45(type, q[c], b, target.row[c] + u * t.bytes);
    }
  }
}

void unpack_q6k(const uint8_t* in, int64_t supers, const Target& target) {
  const TypeInfo& t = info(WType::Q6_K);
  const uint8_t* d = in;
  in += q6k_head(supers * SUPER);
  for (int64_t u = 0; u < supers; ++u, in += t.packed, d += 32) {
    for (int c = 0; c < target.count; ++c) {
      uint8_t* out = target.row[c] + u * t.bytes;
      std::memcpy(out + 208, d + 2 * c, 2);
      for (int i = 0; i < 16; ++i) out[192 + i] = in[16 * i + c];
    }
    for (int b = 0; b < 8; ++b) {
      Quants q = {};
      take_nibbles(in + 256 + b * 384, q);
      take_high_pairs(in + 256 + b * 384 + 256, q);
      for (int c = 0; c < target.count; ++c) write_q6k(q[c], b, target.row[c] + u * t.bytes);
    }
  }
}

template <class T>
void unpack_float(const uint8_t* in, int64_t k, bool pairs, const Target& target) {
  for (int c = 0; c < target.count; ++c)
    for (int64_t i = 0; i < k; ++i) {
      const int64_t at = pairs ? i / 2 * 32 + 2 * c + i % 2 : i * 16 + c;
      std::memcpy(target.row[c] + i * int64_t(sizeof(T)), in + at * int64_t(sizeof(T)), sizeof(T));
    }
}

void unpack_panel(const PackedWeight& w, const uint8_t* in, const Target& target) {
  switch (w.type) {
    case WType::F32: return unpack_float<uint32_t>(in, w.k, false, target);
    case WType::F16: return unpack_float<uint16_t>(in, w.k, false, target);
    case WType::BF16: return unpack_float<uint16_t>(in, w.k, true, target);
    case WType::Q4_K:
    case WType::Q5_K: return unpack_k45(w.type, in, w.k / SUPER, target);
    case WType::Q6_K: return unpack_q6k(in, w.k / SUPER, target);
    default: return unpack_legacy(w.type, in, w.k / BLOCK, target);
  }
}

// ---- memory -------------------------------------------------------------------------------------

constexpr size_t HUGE_PAGE = size_t(2) << 20;
constexpr size_t SLAB = size_t(32) << 20;

// Zeroed and 2 MiB aligned, in huge pages where the system grants them; resident once touched.
std::shared_ptr<uint8_t> map_aligned(size_t bytes) {
  bytes = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  const size_t mapped = bytes + HUGE_PAGE;
  void* p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  auto at = (reinterpret_cast<uintptr_t>(p) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  uint8_t* data = reinterpret_cast<uint8_t*>(at);
  madvise(data, bytes, MADV_HUGEPAGE);  // advice: without it only speed is lost
  try {
    return {data, [p, mapped](uint8_t*) { munmap(p, mapped); }};
  } catch (...) {
    munmap(p, mapped);
    throw;
  }
}

// Small tensors share a slab: one huge page each would multiply a small model's memory. A slab goes
// when its last tensor does.
std::shared_ptr<uint8_t> allocate(size_t bytes) {
  if (bytes >= SLAB / 4) return map_aligned(bytes);
  static std::mutex mutex;
  static std::weak_ptr<uint8_t> slab;
  static size_t used = 0;
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<uint8_t> current = slab.lock();
  if (current == nullptr || used + bytes > SLAB) {
    current = map_aligned(SLAB);
    slab = current;
    used = 0;
  }
  uint8_t* at = current.get() + used;
  used += (bytes + 63) / 64 * 64;
  return {current, at};
}

// Where row `row` of the packed tensor is in the file.
int64_t source_row(const Source& s, int64_t row) {
  if (s.permute_heads == 0) return row;
  const int64_t dim = s.rows / s.permute_heads;
  const int64_t head = row / dim, i = row % dim;
  return head * dim + i % (dim / 2) * 2 + i / (dim / 2);
}

void pack_range(const Source& s, const PackedWeight& w, uint8_t* out, int64_t p0, int64_t p1) {
  const int64_t stride = static_cast<int64_t>(row_bytes(s.type, s.k));
  for (int64_t p = p0; p < p1; ++p) {
    Rows rows = {};
    for (int c = 0; c < 16 && p * 16 + c < s.rows; ++c)
      rows.row[c] = s.data + source_row(s, p * 16 + c) * stride;
    pack_panel(s, rows, out + p * w.panel_bytes);
  }
}

}  // namespace

const char* type_name(int32_t type) {
  const TypeInfo* t = find(type);
  return t == nullptr ? nullptr : t->name;
}

size_t row_bytes(WType type, int64_t k) {
  const TypeInfo& t = info(type);
  if (k < 1 || k % t.group != 0)
    throw std::invalid_argument("a row of " + std::string(t.name) + " cannot have " +
                                std::to_string(k) + " elements: not a multiple of " +
                                std::to_string(t.group));
  return static_cast<size_t>(k / t.group * t.bytes);
}

size_t panel_bytes(WType type, int64_t k) {
  const TypeInfo& t = info(type);
  if (t.group == SUPER)
    return static_cast<size_t>(k / SUPER * t.packed) + (type == WType::Q6_K ? q6k_head(k) : 0);
  return static_cast<size_t>((k + 63) / 64 * t.packed);
}

namespace {

bool finite_half(const uint8_t* p) { return (p[1] & 0x7c) != 0x7c; }

// An infinite or undefined scale is a damaged file: its products would mean nothing, and in other
// bits alone than in company (the kernels' Levels are of finite scales).
void check_scales(const Source& s) {
  const TypeInfo& t = info(s.type);
  if (t.group == 1) return;
  const bool minimum = s.type == WType::Q4_1 || s.type == WType::Q5_1 || s.type == WType::Q4_K ||
                       s.type == WType::Q5_K;
  const size_t scale = s.type == WType::Q6_K ? 208 : 0;
  const size_t bytes = size_t(t.bytes), row = row_bytes(s.type, s.k), blocks = row / bytes;
  for (int64_t r = 0; r < s.rows; ++r)
    for (size_t b = 0; b < blocks; ++b) {
      const uint8_t* p = s.data + size_t(r) * row + b * bytes + scale;
      if (!finite_half(p) || (minimum && !finite_half(p + 2)))
        throw std::invalid_argument("row " + std::to_string(r) + " has a scale that is no number");
    }
}

}  // namespace

Packed pack(const Source& s, int threads) {
  row_bytes(s.type, s.k);  // refuses k
  check_scales(s);
  if (s.rows < 1) throw std::invalid_argument("a tensor needs at least one row");
  if (s.permute_heads < 0 ||
      (s.permute_heads > 0 && (s.rows % s.permute_heads != 0 ||
                               s.rows / s.permute_heads % 2 != 0)))
    throw std::invalid_argument(std::to_string(s.rows) + " rows are not " +
                                std::to_string(s.permute_heads) + " heads of even size");
  PackedWeight w = {};
  w.type = s.type;
  w.n = s.rows;
  w.k = s.k;
  w.panels = (s.rows + 15) / 16;
  w.panel_bytes = static_cast<int64_t>(panel_bytes(s.type, s.k));
  std::shared_ptr<uint8_t> memory = allocate(static_cast<size_t>(w.panels * w.panel_bytes));
  uint8_t* out = memory.get();
  w.data = out;
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(threads, w.panels));
  std::vector<std::jthread> workers;
  for (int64_t i = 1; i < parts; ++i)
    workers.emplace_back([&s, &w, out, i, parts] {
      pack_range(s, w, out, w.panels * i / parts, w.panels * (i + 1) / parts);
    });
  pack_range(s, w, out, 0, w.panels / parts);
  return {w, std::move(memory)};
}

void unpack(const PackedWeight& w, uint8_t* out) {
  const size_t stride = row_bytes(w.type, w.k);
  std::memset(out, 0, static_cast<size_t>(w.n) * stride);
  for (int64_t p = 0; p < w.panels; ++p) {
    Target target = {};
    for (int c = 0; c < 16 && p * 16 + c < w.n; ++c, ++target.count)
      target.row[c] = out + static_cast<size_t>(p * 16 + c) * stride;
    unpack_panel(w, w.data + p * w.panel_bytes, target);
  }
}

}  // namespace octavo
