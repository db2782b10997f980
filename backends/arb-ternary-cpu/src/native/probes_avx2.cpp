#include "simd_avx2.h"

namespace arb {
namespace {

constexpr int64_t kVectorBytes = 32;
constexpr int kSums = 4;
inline V add_products(V sum, V w, V x) { return dot(sum, w, x); }
inline void opaque(V& v) { __asm__ volatile("" : "+x"(v.a), "+x"(v.b)); }

}  // namespace
}  // namespace arb

// The loops are written in what comes first.
#include "probe_loops.h"

namespace arb {

const ProbeKernels& probes_avx2() { return kProbes; }

}  // namespace arb
