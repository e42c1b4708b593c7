// Attention by vectors, over a cache of every type.
#include "attention.inl"

namespace octavo {
namespace {

void attend(const AttendArgs& a, int64_t row0, int rows, SplitRange splits, const Upcoming& next,
            float* state) {
  switch (a.type) {
    case KvType::BF16: return attend_as<Half>(a, row0, rows, splits, next, state);
    case KvType::F32: return attend_as<Full>(a, row0, rows, splits, next, state);
    case KvType::INT8: return attend_as<Bytes>(a, row0, rows, splits, next, state);
  }
}

constexpr AttentionTable ATTENTION{attend, fold, finish};

}  // namespace
}  // namespace octavo
