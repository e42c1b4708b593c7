// What isa_amx.cpp gives to the table that isa_avx512.cpp puts together.
#pragma once
#include "attention.h"
#include "linear.h"

namespace octavo {

extern const LinearTable LINEAR_AMX;
extern const AttentionTable ATTENTION_AMX;
int64_t peak_amx(int kind, int64_t iterations, float* sink);  // RowTable::peak

}  // namespace octavo
