// The wire with NEON.
#include "wire_loops.h"

namespace arb {

const WireKernels& wire_kernels_neon() { return kWire; }

}  // namespace arb
