// The table of a step of decoding for each instruction set.
#include "decode.h"
#include "isa.h"

namespace arb {

const DecodeKernels& decode_kernels(int isa) {
  switch (static_cast<Isa>(isa)) {
#if defined(ARB_HAVE_AVX2)
    case Isa::avx2:
    case Isa::avxvnni:
      return decode_avx2();
#endif
#if defined(ARB_HAVE_AVX512VNNI)
    case Isa::avx512vnni:
    case Isa::avx512bf16:
    case Isa::amx:
      return decode_avx512vnni();
#endif
#if defined(ARB_HAVE_NEON)
    case Isa::neon:
      return decode_neon();
#endif
    default:
      return decode_scalar();
  }
}

}  // namespace arb
