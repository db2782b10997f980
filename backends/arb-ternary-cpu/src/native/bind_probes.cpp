// Bindings of the machine's limits. Addresses and sizes are what the Python side has checked.
#include <nanobind/nanobind.h>

#include "probes.h"

namespace nb = nanobind;

void bind_probes(nb::module_& m) {
  const nb::call_guard<nb::gil_scoped_release> unlocked;
  m.def(
      "read_words",
      [](int isa, int threads, uintptr_t bytes, int64_t words) {
        return arb::read_words(arb::probe_kernels(isa), threads, reinterpret_cast<const uint8_t*>(bytes), words);
      },
      unlocked);
  m.def(
      "int8_peak",
      [](int isa, int threads, double seconds) { return arb::int8_peak(arb::probe_kernels(isa), threads, seconds); },
      unlocked);
}
