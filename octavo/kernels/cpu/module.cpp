// The extension module octavo.kernels._cpu: assembles what each source binds.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "isa.h"

namespace nb = nanobind;

namespace octavo {

void bind_linear(nb::module_& m);
void bind_sample(nb::module_& m);
void bind_executor(nb::module_& m);
void bind_lab(nb::module_& m);
void bind_attend(nb::module_& m);

namespace {

std::vector<std::string> isa_names() {
  const Kernels* usable[MAX_ISAS];
  const int n = usable_isas(usable);
  std::vector<std::string> names;
  for (int i = 0; i < n; ++i) names.emplace_back(usable[i]->name);
  return names;
}

}  // namespace
}  // namespace octavo

NB_MODULE(_cpu, m) {
  m.doc() = "CPU kernels and the program executor; see octavo.kernels.";
  m.def("isas", &octavo::isa_names, "Names of the instruction sets usable here, best first.");
  octavo::bind_linear(m);
  octavo::bind_sample(m);
  octavo::bind_executor(m);
  octavo::bind_lab(m);
  octavo::bind_attend(m);
}
