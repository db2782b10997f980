#include "simd_neon.h"

namespace arb {
namespace {

constexpr int64_t kVectorBytes = 16;
constexpr int kSums = 6;
inline V add_products(V sum, V w, V x) { return dot(sum, w, x); }
inline void opaque(V& v) { __asm__ volatile("" : "+w"(v.q[0]), "+w"(v.q[1]), "+w"(v.q[2]), "+w"(v.q[3])); }

}  // namespace
}  // namespace arb

// The loops are written in what comes first.
#include "probe_loops.h"

namespace arb {

const ProbeKernels& probes_neon() { return kProbes; }

}  // namespace arb
