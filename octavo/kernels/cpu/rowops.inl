#include "rowops.h"

namespace octavo {
namespace {

// Four chains, so that the latency of fma is hidden; which element joins which chain is fixed.
OCTAVO_INLINE float sum_squares(const float* x, int64_t n) {
  F s0 = zero_f(), s1 = zero_f(), s2 = zero_f(), s3 = zero_f();
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    const F a = load(x + i), b = load(x + i + 16), c = load(x + i + 32), d = load(x + i + 48);
    s0 = fma(a, a, s0);
    s1 = fma(b, b, s1);
    s2 = fma(c, c, s2);
    s3 = fma(d, d, s3);
  }
  for (; i < n; i += 16) {
    const F a = load_n(x + i, n - i < 16 ? n - i : 16);
    s0 = fma(a, a, s0);
  }
  return hsum(add(add(s0, s1), add(s2, s3)));
}

void rms_norm(const float* x, const float* w, int64_t n, float eps, float* out) {
  const float mean = sum_squares(x, n) / static_cast<float>(n);
  const F scale = set1(1.0f / __builtin_sqrtf(mean + eps));
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, mul(mul(load(x + i), scale), load(w + i)));
  if (i < n) store_n(out + i, mul(mul(load_n(x + i, n - i), scale), load_n(w + i, n - i)), n - i);
}

void add_rows(const float* a, const float* b, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, add(load(a + i), load(b + i)));
  if (i < n) store_n(out + i, add(load_n(a + i, n - i), load_n(b + i, n - i)), n - i);
}

// x * sigmoid(y), written so that neither end overflows.
OCTAVO_INLINE F times_sigmoid(F x, F y) { return div(x, add(set1(1.0f), exp_(neg(y)))); }

OCTAVO_INLINE F silu(F x) { return times_sigmoid(x, x); }

// 0.5 x (1 + tanh(z)) = x * sigmoid(2z), z = sqrt(2/pi) (x + 0.044715 x^3).
OCTAVO_INLINE F gelu_tanh(F x) {
  const F cubic = fma(mul(x, x), set1(0.044715f), set1(1.0f));
  return times_sigmoid(x, mul(mul(x, cubic), set1(1.5957691216057308f)));
}

template <F (*f)(F)>
OCTAVO_INLINE void act_mul_with(const float* gate, const float* up, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, mul(f(load(gate + i)), load(up + i)));
  if (i < n) store_n(out + i, mul(f(load_n(gate + i, n - i)), load_n(up + i, n - i)), n - i);
}

void act_mul(Act act, const float* gate, const float* up, int64_t n, float* out) {
  if (act == Act::Silu) return act_mul_with<silu>(gate, up, n, out);
  act_mul_with<gelu_tanh>(gate, up, n, out);
}

void rope(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t n = half - i < 16 ? half - i : 16;
    const F a = load_n(x + i, n), b = load_n(x + half + i, n);
    const F c = load_n(cos + i, n), s = load_n(sin + i, n);
    store_n(x + i, sub(mul(a, c), mul(b, s)), n);
    store_n(x + half + i, fma(a, s, mul(b, c)), n);
  }
}

constexpr float KV_MOST = 0x1.fep127f;  // the largest bf16

// x, with zeros for what is no finite bf16; `fine` loses those lanes.
OCTAVO_INLINE F finite_or_zero(F x, M& fine) {
  const M ok = le(abs(x), set1(KV_MOST));  // of NaN: no
  fine = and_(fine, ok);
  return select(ok, x, zero_f());
}

// d values as v / scale + 128, and the bits of the scale in bf16. It is rounded up before it
// divides, so that no value leaves -127..127.
OCTAVO_INLINE uint16_t quantise(const float* x, int64_t d, uint8_t* out, M& fine) {
  F most = zero_f();
  for (int64_t i = 0; i < d; i += 16) most = max(most, abs(finite_or_zero(load(x + i), fine)));
  const float exact = hmax(most) / 127.0f;
  uint32_t bits;
  __builtin_memcpy(&bits, &exact, 4);
  bits = (bits + 0xffff) & 0xffff0000u;
  float scale;
  __builtin_memcpy(&scale, &bits, 4);
  const F inverse = set1(scale > 0.0f ? 1.0f / scale : 0.0f);
  for (int64_t i = 0; i < d; i += 16)
    store_i8(reinterpret_cast<int8_t*>(out) + i,
             to_i32(mul(finite_or_zero(load(x + i), fine), inverse)));
  for (int64_t i = 0; i < d; ++i) out[i] ^= 0x80;
  return static_cast<uint16_t>(bits >> 16);
}

bool store_k_int8(const float* k, int64_t d, void* keys, int64_t slot) {
  uint8_t bytes[256];
  M fine = first_n(16);
  auto* out = static_cast<uint8_t*>(keys);
  const uint16_t scale = quantise(k, d, bytes, fine);
  for (int64_t i = 0; i < d; i += 4)
    __builtin_memcpy(out + (i / 4 * BLOCK_TOKENS + slot) * 4, bytes + i, 4);
  __builtin_memcpy(out + BLOCK_TOKENS * d + 2 * slot, &scale, 2);
  return all(fine);
}

bool store_v_int8(const float* v, int64_t d, void* values, int64_t slot) {
  uint8_t bytes[256];
  M fine = first_n(16);
  auto* out = static_cast<uint8_t*>(values);
  const uint16_t scale = quantise(v, d, bytes, fine);
  uint8_t* at = out + slot / 4 * d * 4 + slot % 4;
  for (int64_t i = 0; i < d; ++i) at[4 * i] = bytes[i];
  __builtin_memcpy(out + BLOCK_TOKENS * d + 2 * slot, &scale, 2);
  return all(fine);
}

bool store_k(const float* k, int64_t d, void* keys, int64_t slot, KvType type) {
  if (type == KvType::INT8) return store_k_int8(k, d, keys, slot);
  M fine = first_n(16);
  if (type == KvType::F32) {
    auto* out = static_cast<float*>(keys) + slot;
    for (int64_t i = 0; i < d; i += 16) {
      alignas(64) float some[16];
      store(some, finite_or_zero(load(k + i), fine));
      for (int64_t j = 0; j < 16; ++j) out[(i + j) * BLOCK_TOKENS] = some[j];
    }
    return all(fine);
  }
  auto* out = static_cast<uint32_t*>(keys) + slot;
  for (int64_t i = 0; i < d; i += 16) {
    alignas(64) uint32_t pairs[8];
    store_bf16(reinterpret_cast<uint16_t*>(pairs), finite_or_zero(load(k + i), fine));
    __asm__("" : "+m"(pairs));  // read below as dwords what was written as halves
    for (int64_t j = 0; j < 8; ++j) out[(i / 2 + j) * BLOCK_TOKENS] = pairs[j];
  }
  return all(fine);
}

bool store_v(const float* v, int64_t d, int64_t i0, int64_t i1, void* values, int64_t slot,
             KvType type) {
  if (type == KvType::INT8) return store_v_int8(v, d, values, slot);
  M fine = first_n(16);
  if (type == KvType::F32) {
    auto* out = static_cast<float*>(values) + slot * d;
    for (int64_t i = i0; i < i1; i += 16) store(out + i, finite_or_zero(load(v + (i - i0)), fine));
    return all(fine);
  }
  auto* out = static_cast<uint16_t*>(values) + (slot / 2) * d * 2 + slot % 2;
  for (int64_t i = i0; i < i1; i += 16) {
    alignas(64) uint16_t half[16];
    store_bf16(half, finite_or_zero(load(v + (i - i0)), fine));
    for (int64_t j = 0; j < 16; ++j) out[(i + j) * 2] = half[j];
  }
  return all(fine);
}

template <bool asks>
OCTAVO_INLINE float sum_bytes(const uint8_t* p, int64_t n, int64_t ahead) {
  I s0 = zero_i(), s1 = zero_i(), s2 = zero_i(), s3 = zero_i();
  for (int64_t i = 0; i < n; i += 256) {
    const auto* q = reinterpret_cast<const int32_t*>(p + i);
    if constexpr (asks)
      for (int64_t line = 0; line < 256; line += 64) prefetch_l2(p + i + ahead + line);
    s0 = add(s0, load(q));
    s1 = add(s1, load(q + 16));
    s2 = add(s2, load(q + 32));
    s3 = add(s3, load(q + 48));
  }
  return static_cast<float>(hsum(add(add(s0, s1), add(s2, s3))));
}

float read_bytes(const uint8_t* p, int64_t n, int64_t ahead) {
  return ahead ? sum_bytes<true>(p, n, ahead) : sum_bytes<false>(p, n, 0);
}

constexpr int PEAK_CHAINS = 12;

// Loaded anew each time, so that no product of it is computed beforehand.
OCTAVO_INLINE B opaque(const uint8_t* bytes) {
  __asm__ volatile("" : : "r"(bytes) : "memory");
  return load_b(bytes);
}

int64_t peak(int kind, int64_t iterations, float* sink) {
  alignas(64) uint8_t bytes[64] = {1, 2, 3, 4};
  F f[PEAK_CHAINS];
  I n[PEAK_CHAINS];
#pragma GCC unroll 12
  for (int c = 0; c < PEAK_CHAINS; ++c) {
    n[c] = add(set1(c), iota());  // unequal, or the compiler would keep one chain of equals
    f[c] = to_f32(n[c]);
  }
  const F x = set1(*sink);
  int64_t per = 0;
  if (kind == 0) {
    per = 16 * 4 * 2;
    for (int64_t i = 0; i < iterations; ++i) {
      const B w = opaque(bytes);
#pragma GCC unroll 12
      for (int c = 0; c < PEAK_CHAINS; ++c) n[c] = dot_u8s8(n[c], w, 0x01020304);
    }
  } else if (kind == 1) {
    per = 16 * 2 * 2;
    for (int64_t i = 0; i < iterations; ++i) {
      const B w = opaque(bytes);
#pragma GCC unroll 12
      for (int c = 0; c < PEAK_CHAINS; ++c) f[c] = dot_bf16(f[c], w, 0x3f803f80u);
    }
  } else if (kind == 3 || kind == 4) {
    // Of 32 values 8 dot products, and a multiply-add of floats for their scale, another for their
    // minimum.
    constexpr int DOTS = 24;
    per = 16 * 4 * 2 * DOTS / PEAK_CHAINS;
    for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 24
      for (int c = 0; c < DOTS; ++c) {
        const B w = opaque(bytes);
        I& chain = n[c % PEAK_CHAINS];
        chain = dot_u8s8(chain, w, 0x01020304);
        if (c % 8 == 3) f[c / 8] = fma(f[c / 8], x, x);
        if (c % 8 == 7 && kind == 4) f[3 + c / 8] = fma(f[3 + c / 8], x, x);
      }
    }
  } else {
    per = 16 * 2;
    for (int64_t i = 0; i < iterations; ++i)
#pragma GCC unroll 12
      for (int c = 0; c < PEAK_CHAINS; ++c) f[c] = fma(f[c], x, x);
  }
#pragma GCC unroll 12
  for (int c = 0; c < PEAK_CHAINS; ++c) *sink += hsum(add(f[c], to_f32(n[c])));
  return per * PEAK_CHAINS * iterations;
}

constexpr RowTable ROWS{rms_norm, add_rows, act_mul,    rope, store_k,
                        store_v,  read_bytes, peak};

}  // namespace
}  // namespace octavo
