// The wire with AVX2.
#include "wire_loops.h"

namespace arb {

const WireKernels& wire_kernels_avx2() { return kWire; }

}  // namespace arb
