// The extension module: what the processor can run, the kernels, and probes of the machine's limits.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "isa.h"
#include "sources_digest.h"
#include "threads.h"

namespace nb = nanobind;

void bind_attention(nb::module_& m);
void bind_blocks(nb::module_& m);
void bind_convolution(nb::module_& m);
void bind_decode(nb::module_& m);
void bind_probes(nb::module_& m);
void bind_products(nb::module_& m);
void bind_votes(nb::module_& m);
void bind_wire(nb::module_& m);

NB_MODULE(_native, m) {
  m.doc() = "Kernels of the cpu backend. Arguments are addresses and sizes that the Python side has checked.";
  m.attr("sources") = ARB_SOURCES;
  static const bool ready = (arb::prepare_threads(), true);  // an interpreter more imports the module again
  (void)ready;
  m.def("usable_isas", [] {
    std::vector<std::string> names;
    for (const arb::Isa isa : arb::usable_isas()) names.emplace_back(arb::isa_name(isa));
    return names;
  });
  m.def("isa_index", [](const std::string& name) {
    for (int i = 0; i < arb::kIsaCount; ++i) {
      if (name == arb::isa_name(static_cast<arb::Isa>(i))) return i;
    }
    return -1;
  });
  bind_attention(m);
  bind_blocks(m);
  bind_convolution(m);
  bind_decode(m);
  bind_probes(m);
  bind_products(m);
  bind_votes(m);
  bind_wire(m);
}
