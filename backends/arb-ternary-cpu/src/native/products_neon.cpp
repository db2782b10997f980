#include "simd_neon.h"

// The loops are written in what comes first.
#include "products_loops.h"

namespace arb {

const ProductKernels& products_neon() { return kProducts; }

}  // namespace arb
