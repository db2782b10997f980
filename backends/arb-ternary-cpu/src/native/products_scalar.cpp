#include "simd_scalar.h"

// The loops are written in what comes first.
#include "products_loops.h"

namespace arb {

const ProductKernels& products_scalar() { return kProducts; }

}  // namespace arb
