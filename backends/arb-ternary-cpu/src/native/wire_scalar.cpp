// The wire without the instructions of a particular processor.
#include "wire_loops.h"

namespace arb {

const WireKernels& wire_kernels_scalar() { return kWire; }

}  // namespace arb
