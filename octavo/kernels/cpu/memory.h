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
  // Touches the pages of from..to, which may hold data, as if each were written; false: it cannot be.
  bool touch(size_t from, size_t to) const;
  template <class T>
  T* as() const { return reinterpret_cast<T*>(data_); }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
  void* mapping_ = nullptr;
  size_t mapped_ = 0;
};

}  // namespace octavo
