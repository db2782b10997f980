#include "simd_scalar.h"

namespace arb {
namespace {

constexpr int64_t kVectorBytes = 16;
constexpr int kSums = 1;
// In 32 bits, which compilers turn into vectors of the processor's baseline.
inline int32_t byte_of(int32_t lane, int place) { return static_cast<int32_t>(bits(lane) << (24 - 8 * place)) >> 24; }
inline V add_products(V sum, V w, V x) {
  for (int place = 0; place < 4; ++place) {
    for (int i = 0; i < 16; ++i) sum.v[i] += byte_of(w.v[i], place) * byte_of(x.v[i], place);
  }
  return sum;
}
inline void opaque(V& v) { __asm__ volatile("" : "+m"(v)); }

}  // namespace
}  // namespace arb

// The loops are written in what comes first.
#include "probe_loops.h"

namespace arb {

const ProbeKernels& probes_scalar() { return kProbes; }

}  // namespace arb
