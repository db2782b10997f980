#include "votes.h"

namespace arb {

const VoteKernels& vote_kernels(Isa isa) {
  switch (isa) {
#if defined(ARB_HAVE_AVX2)
    case Isa::avx2:
      return vote_kernels_avx2();
#endif
#if defined(ARB_HAVE_AVXVNNI)
    case Isa::avxvnni:
      return vote_kernels_avxvnni();
#endif
#if defined(ARB_HAVE_AVX512VNNI)
    case Isa::avx512vnni:
      return vote_kernels_avx512vnni();
#endif
#if defined(ARB_HAVE_AVX512BF16)
    case Isa::avx512bf16:
      return vote_kernels_avx512bf16();
#endif
#if defined(ARB_HAVE_AMX)
    case Isa::amx:
      return vote_kernels_amx();
#endif
#if defined(ARB_HAVE_NEON)
    case Isa::neon:
      return vote_kernels_neon();
#endif
    default:
      return vote_kernels_scalar();
  }
}

}  // namespace arb
