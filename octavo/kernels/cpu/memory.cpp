#include "memory.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace octavo {
namespace {
constexpr size_t HUGE_PAGE = size_t(2) << 20;
}

Region::Region(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  const bool huge = bytes >= HUGE_PAGE;
  mapped_ = (bytes + 4095) / 4096 * 4096 + (huge ? HUGE_PAGE : 0);
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw std::bad_alloc();
  }
  auto address = reinterpret_cast<uintptr_t>(mapping_);
  if (huge) address = (address + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  data_ = reinterpret_cast<uint8_t*>(address);
  if (huge) madvise(data_, bytes, MADV_HUGEPAGE);  // advice: without it only speed is lost
}

Region::~Region() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_);
}

bool Region::touch(size_t from, size_t to) const {
  constexpr int populate_write = 23;  // MADV_POPULATE_WRITE, from Linux 5.14 on
  return madvise(data_ + from, to - from, populate_write) == 0;
}

Region::Region(Region&& other) noexcept { *this = std::move(other); }

Region& Region::operator=(Region&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_, other.mapped_);
  return *this;
}

}  // namespace octavo
