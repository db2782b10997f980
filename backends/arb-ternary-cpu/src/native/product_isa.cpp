// The table of products for each instruction set.
#include "isa.h"
#include "products.h"

namespace arb {

const ProductKernels& product_kernels(int isa) {
  switch (static_cast<Isa>(isa)) {
#if defined(ARB_HAVE_AVX2)
    case Isa::avx2:
      return products_avx2();
#endif
#if defined(ARB_HAVE_AVXVNNI)
    case Isa::avxvnni:
      return products_avxvnni();
#endif
#if defined(ARB_HAVE_AVX512VNNI)
    case Isa::avx512vnni:
      return products_avx512vnni();
#endif
#if defined(ARB_HAVE_AVX512BF16)
    case Isa::avx512bf16:
      return products_avx512bf16();
#endif
#if defined(ARB_HAVE_AMX)
    case Isa::amx:
      return products_amx();
#endif
#if defined(ARB_HAVE_NEON)
    case Isa::neon:
      return products_neon();
#endif
    default:
      return products_scalar();
  }
}

}  // namespace arb
