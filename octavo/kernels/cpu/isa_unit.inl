// The body of every isa_*.cpp, after its vec_*.h. Each kernel source opens
// `namespace octavo { namespace { ... } }` itself and ends with one constant-initialised table:
//   linear.inl     constexpr LinearTable LINEAR{...};
//   sample.inl     constexpr SampleTable SAMPLE{...};
//   attention.inl  constexpr AttentionTable ATTENTION{...};
//   rowops.inl     constexpr RowTable ROWS{...};
#if __has_include("linear.inl")
#include "linear.inl"
#define OCTAVO_LINEAR &LINEAR
#else
#define OCTAVO_LINEAR nullptr
#endif

#if __has_include("sample.inl")
#include "sample.inl"
#define OCTAVO_SAMPLE &SAMPLE
#else
#define OCTAVO_SAMPLE nullptr
#endif

#if __has_include("attention.inl")
#include "attention.inl"
#define OCTAVO_ATTENTION &ATTENTION
#else
#define OCTAVO_ATTENTION nullptr
#endif

#if __has_include("rowops.inl")
#include "rowops.inl"
#define OCTAVO_ROWS &ROWS
#else
#define OCTAVO_ROWS nullptr
#endif

namespace octavo {
constinit const Kernels OCTAVO_KERNELS{OCTAVO_NAME, OCTAVO_LINEAR, OCTAVO_SAMPLE, OCTAVO_ATTENTION,
                                       OCTAVO_ROWS};
}
