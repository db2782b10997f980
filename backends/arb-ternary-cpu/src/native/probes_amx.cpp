// The peak of int8 tiles; memory is read as with AVX-512.
#include "amx_tiles.h"
#include "probes.h"

namespace arb {
namespace {

// As many as a tile's multiplication takes to be done before its sums are needed again.
constexpr int64_t kSums = 4;

void multiply(int64_t rounds) {
  const Tiles tiles;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  for (int64_t i = 0; i < rounds; ++i) {
    _tile_dpbssd(0, 4, 5);
    _tile_dpbssd(1, 4, 5);
    _tile_dpbssd(2, 4, 5);
    _tile_dpbssd(3, 4, 5);
  }
}

}  // namespace

const ProbeKernels& probes_amx() {
  static const ProbeKernels kernels{probes_avx512vnni().sum_words, multiply,
                                    2 * kSums * kTileSide * kTileSide * kTileBytes};
  return kernels;
}

}  // namespace arb
