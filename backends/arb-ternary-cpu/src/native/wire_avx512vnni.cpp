// The wire with AVX-512.
#include "wire_loops.h"

namespace arb {

const WireKernels& wire_kernels_avx512vnni() { return kWire; }

}  // namespace arb
