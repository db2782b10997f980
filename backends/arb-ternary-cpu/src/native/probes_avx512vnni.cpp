#include "simd_avx512vnni.h"

namespace arb {
namespace {

constexpr int64_t kVectorBytes = 64;
constexpr int kSums = 12;
inline V add_products(V sum, V w, V x) { return dot_codes(sum, w, x); }
inline void opaque(V& v) { __asm__ volatile("" : "+v"(v)); }

}  // namespace
}  // namespace arb

// The loops are written in what comes first.
#include "probe_loops.h"

namespace arb {

const ProbeKernels& probes_avx512vnni() { return kProbes; }

}  // namespace arb
