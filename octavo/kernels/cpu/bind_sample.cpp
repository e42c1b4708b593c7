// Python's view of the sampler, for tests and benches, and what the executor needs to call it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa.h"
#include "sample.h"

namespace nb = nanobind;

namespace octavo {

namespace {

int64_t padded(int64_t n) { return (n + 255) / 256 * 256; }

bool within(int64_t at, int64_t count, int64_t words) {
  return at >= 0 && count >= 0 && at + count <= words;
}

}  // namespace

// What `carve_all` in sample.inl carves: two 64-bit keys, four floats and an id for each id of
// the vocabulary, two maxima for each 16, seven floats for each 256 and a bit for each.
size_t sample_scratch_bytes(int64_t vocab) {
  const size_t n = static_cast<size_t>(padded(vocab));
  return n * (2 * 8 + 5 * 4) + n / 16 * 2 * 4 + n / 256 * 7 * 4 + n / 8;
}

const char* link_sample_rows(SampleRow* rows, int64_t num_rows, const int32_t* data,
                             int64_t words) {
  for (int64_t i = 0; i < num_rows; ++i) {
    SampleRow& r = rows[i];
    const bool ok = within(r.history_at, r.num_history, words) &&
                    within(r.bias_at, int64_t(2) * r.num_bias, words) &&
                    within(r.allowed_at, r.num_allowed, words) &&
                    within(r.banned_at, r.num_banned, words) &&
                    within(r.suppress_at, r.num_suppress, words) && r.mask_bytes >= 0 &&
                    within(r.mask_at, (int64_t(r.mask_bytes) + 3) / 4, words);
    if (!ok) return "a sample row points outside of its data";
    if (r.num_bias < 0 || r.num_logprobs > MAX_TOP || r.target_top > MAX_TOP || r.target_top < 0)
      return "a sample row has a count out of range";
    r.data = data;
  }
  return nullptr;
}

namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

const SampleTable& table_of(const std::string& isa) {
  const Kernels* kernels = find_isa(isa.c_str());
  if (kernels == nullptr || kernels->sample == nullptr)
    throw std::invalid_argument("no such instruction set here: " + isa);
  return *kernels->sample;
}

struct Free {
  void operator()(void* p) const { ::operator delete(p, std::align_val_t(64)); }
};
using Scratch = std::unique_ptr<void, Free>;
Scratch new_scratch(int64_t vocab) {
  return Scratch(::operator new(sample_scratch_bytes(vocab), std::align_val_t(64)));
}

// Rows copied out of the bytes and linked; the words are copied too, bytes have no alignment.
struct Linked {
  std::vector<SampleRow> rows;
  std::vector<int32_t> data;

  Linked(const nb::bytes& row_bytes, const nb::bytes& data_bytes, size_t num_rows)
      : rows(num_rows), data(data_bytes.size() / 4) {
    if (row_bytes.size() != num_rows * sizeof(SampleRow) || data_bytes.size() % 4 != 0)
      throw std::invalid_argument("rows must hold one record for each row of logits");
    if (!rows.empty()) std::memcpy(rows.data(), row_bytes.data(), row_bytes.size());
    if (!data.empty()) std::memcpy(data.data(), data_bytes.data(), data_bytes.size());
    const int64_t words = static_cast<int64_t>(data.size());
    const char* wrong =
        link_sample_rows(rows.data(), static_cast<int64_t>(num_rows), data.data(), words);
    if (wrong != nullptr) throw std::invalid_argument(wrong);
  }
};

nb::bytes sample_all(const Logits& logits, const nb::bytes& rows, const nb::bytes& data,
                     const std::string& isa) {
  const SampleTable& table = table_of(isa);
  const int64_t vocab = static_cast<int64_t>(logits.shape(1));
  const Linked linked(rows, data, logits.shape(0));
  const Scratch scratch = new_scratch(vocab);
  std::vector<SampleOut> out(linked.rows.size());
  {
    nb::gil_scoped_release release;
    for (size_t i = 0; i < out.size(); ++i)
      table.sample(logits.data() + i * vocab, vocab, &linked.rows[i], scratch.get(), &out[i]);
  }
  return nb::bytes(out.data(), out.size() * sizeof(SampleOut));
}

nb::bytes probabilities(const Logits& logits, const nb::bytes& row, const nb::bytes& data,
                        const std::string& isa) {
  if (logits.shape(0) != 1) throw std::invalid_argument("one row of logits is expected");
  const int64_t vocab = static_cast<int64_t>(logits.shape(1));
  const Linked linked(row, data, 1);
  const Scratch scratch = new_scratch(vocab);
  std::vector<float> out(static_cast<size_t>(vocab));
  const SampleError error = table_of(isa).probabilities(logits.data(), vocab, &linked.rows[0],
                                                        scratch.get(), out.data());
  if (error != SampleError::NONE)
    throw std::invalid_argument("sample error " + std::to_string(static_cast<int>(error)));
  return nb::bytes(out.data(), out.size() * sizeof(float));
}

std::array<uint32_t, 4> philox(const std::array<uint32_t, 4>& counter,
                               const std::array<uint32_t, 2>& key, const std::string& isa) {
  std::array<uint32_t, 4> out;
  table_of(isa).philox(counter.data(), key.data(), out.data());
  return out;
}

}  // namespace

void bind_sample(nb::module_& m) {
  using namespace nb::literals;
  m.def("sample", &sample_all, "logits"_a, "rows"_a, "data"_a, "isa"_a = "auto",
        "Choose or score one token for each row of logits, float32 [S, V]; rows and data as "
        "octavo.runtime.sampling.encode makes them. Returns S records for decode. Raises "
        "ValueError if they do not fit together.");
  m.def("sample_probabilities", &probabilities, "logits"_a, "row"_a, "data"_a, "isa"_a = "auto",
        "With which probability each id would be chosen, as V float32; logits float32 [1, V].");
  m.def("philox", &philox, "counter"_a, "key"_a, "isa"_a = "auto",
        "Philox4x32-10 (Salmon et al. 2011): 4 words from a counter of 4 and a key of 2.");
}

}  // namespace octavo
