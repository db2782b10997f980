#include "simd_avx512vnni.h"

// The loops are written in what comes first.
#include "products_loops.h"

namespace arb {

const ProductKernels& products_avx512vnni() { return kProducts; }

}  // namespace arb
