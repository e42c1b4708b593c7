// Anonymous memory for what lives as long as an executor.
#pragma once
#include <cstddef>
#include <cstdint>

namespace octavo {

// Zeroed, 2 MiB aligned, in huge pages where the system grants them; pages count once touched.
class Region {
 public:
  Region() = default;
  explicit Region(size_t bytes);  // throws std::bad_alloc
  ~Region();
  Region(Region&& other) noexcept;
  Region& operator=(Region&& other) noexcept;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  template <class T>
  T* as() const { return reinterpret_cast<T*>(data_); }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
  void* mapping_ = nullptr;
  size_t mapped_ = 0;
};

}  // namespace octavo
