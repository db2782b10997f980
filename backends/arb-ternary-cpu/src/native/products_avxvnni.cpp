#include "simd_avx2.h"

// The loops are written in what comes first.
#include "products_loops.h"

namespace arb {

const ProductKernels& products_avxvnni() { return kProducts; }

}  // namespace arb
