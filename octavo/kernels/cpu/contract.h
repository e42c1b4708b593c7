// What the translation units share: plain data and tables of function pointers, no code.
// Each instruction set's unit (isa_*.cpp) includes the kernel sources (*.inl) inside its own
// anonymous namespace and exports one table. Nothing inline may be added here: an inline function
// compiled in two units with different flags is one symbol, and the linker keeps either.
#pragma once
#include <cstddef>
#include <cstdint>

namespace octavo {

// ggml's numbers, so that GGUF files need no table.
enum class WType : int32_t {
  F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8,
  Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30,
};

// P16: panels of 16 output channels. n is padded with zero rows to a multiple of 16.
struct PackedWeight {
  WType type;
  int64_t n, k, panels, panel_bytes;
  const uint8_t* data;  // panel p starts at data + p * panel_bytes, 64-byte aligned
};

// Activations of `rows` tokens in every form that the linears reading them need (a bit each).
enum ActNeeds : uint32_t { ACT_A8 = 1, ACT_BF16 = 2, ACT_F32 = 4 };

}  // namespace octavo
