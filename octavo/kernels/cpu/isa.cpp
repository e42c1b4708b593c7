// Chooses among the units by cpuid, and by xgetbv: a processor may have registers that the
// operating system does not save.
#include "isa.h"

#include <cstring>

#ifdef OCTAVO_X86
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace octavo {

#ifdef OCTAVO_X86
namespace {

struct Features {
  bool avx2;
  bool avx512;
  bool amx;
};

// Linux gives a process the tiles' 8 KB of state when it asks (Documentation/arch/x86/xstate.rst).
bool tiles_granted() {
#ifdef __linux__
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return false;
#endif
}

uint64_t xgetbv0() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t(high) << 32) | low;
}

constexpr bool all(uint32_t word, uint32_t bits) { return (word & bits) == bits; }
constexpr uint32_t bit(int i) { return uint32_t(1) << i; }

// Leaf 1 ecx: 12 FMA, 27 OSXSAVE, 28 AVX, 29 F16C. Leaf 7 ebx: 5 AVX2, 8 BMI2, 16 F, 17 DQ, 30 BW,
// 31 VL; ecx: 1 VBMI, 11 VNNI; edx: 22 AMX-BF16, 24 AMX-TILE, 25 AMX-INT8 (the probe's). Leaf 7.1
// eax: 5 BF16. XCR0: 1-2 ymm, 5-7 zmm, 17-18 tiles.
Features detect() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !all(c, bit(12) | bit(27) | bit(28) | bit(29))) return {};
  const uint64_t saved = xgetbv0();
  if ((saved & 0x6) != 0x6) return {};
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !all(b, bit(5) | bit(8))) return {};
  Features f{true, false, false};
  const bool tiles = all(d, bit(22) | bit(24) | bit(25)) &&
                     all(uint32_t(saved), bit(17) | bit(18));
  const bool wide = all(b, bit(16) | bit(17) | bit(30) | bit(31)) && all(c, bit(1) | bit(11));
  if (!wide || (saved & 0xE6) != 0xE6 || a < 1) return f;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return f;
  f.avx512 = all(a, bit(5));
  f.amx = f.avx512 && tiles && tiles_granted();
  return f;
}

}  // namespace
#endif

int usable_isas(const Kernels* out[MAX_ISAS]) {
  int n = 0;
#ifdef OCTAVO_X86
  static const Features features = detect();
  if (features.amx) out[n++] = &KERNELS_AMX;
  if (features.avx512) out[n++] = &KERNELS_AVX512;
  if (features.avx2) out[n++] = &KERNELS_AVX2;
#endif
  out[n++] = &KERNELS_PORTABLE;
  return n;
}

const Kernels* find_isa(const char* name) {
  const Kernels* usable[MAX_ISAS];
  const int n = usable_isas(usable);
  if (name == nullptr || std::strcmp(name, "auto") == 0) return usable[0];
  for (int i = 0; i < n; ++i)
    if (std::strcmp(usable[i]->name, name) == 0) return usable[i];
  return nullptr;
}

}  // namespace octavo
