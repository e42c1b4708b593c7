// The body of every isa_*.cpp, after its vec_*.h. Each kernel source opens
// `namespace octavo { namespace { ... } }` itself and ends with one constant-initialised table. They
// share one namespace: names must differ between them.
#include "linear.inl"
#include "sample.inl"
#include "attention_table.inl"
#include "rowops.inl"
#include "naive.inl"

namespace octavo {
constinit const Kernels OCTAVO_KERNELS{OCTAVO_NAME, &LINEAR, &SAMPLE,
                                       &ATTENTION,  &ROWS,   &NAIVE};
}
