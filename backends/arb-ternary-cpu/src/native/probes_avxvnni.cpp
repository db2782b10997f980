#include "simd_avx2.h"

namespace arb {
namespace {

constexpr int64_t kVectorBytes = 32;
constexpr int kSums = 5;
// Written out, because gcc 12 copies every accumulator in every turn of a loop around the intrinsic.
inline V add_products(V sum, V w, V x) {
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.a) : "x"(w.a), "x"(x.a));
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.b) : "x"(w.b), "x"(x.b));
  return sum;
}
inline void opaque(V& v) { __asm__ volatile("" : "+x"(v.a), "+x"(v.b)); }

}  // namespace
}  // namespace arb

// The loops are written in what comes first.
#include "probe_loops.h"

namespace arb {

const ProbeKernels& probes_avxvnni() { return kProbes; }

}  // namespace arb
