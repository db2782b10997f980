// Attention over bfloat16 with the tiles of AMX. Operands lie as with AVX512-BF16: rows of words are what a tile takes
// on its left, and words along the terms, of sixteen columns each, on its right.
#include <immintrin.h>

#include "amx_tiles.h"
#include "attention.h"

namespace arb {
namespace {

constexpr int64_t kSide = 2 * kTileSide;  // of the sums that live in tiles 0 to 3

// All sizes are multiples of 32, k of 16 words.
void multiply(int64_t m, int64_t n, int64_t k, Words a, Words b, float* sums, int64_t stride, bool adds) {
  const auto below = static_cast<size_t>(4 * stride), of_a = static_cast<size_t>(4 * a.stride),
             of_b = static_cast<size_t>(4 * b.stride);
  memory_barrier();
  for (int64_t j = 0; j < n; j += kSide) {
    for (int64_t i = 0; i < m; i += kSide) {
      float* const high = sums + i * stride + j;
      float* const low = high + kTileSide * stride;
      if (adds) {
        _tile_loadd(0, high, below);
        _tile_loadd(1, high + kTileSide, below);
        _tile_loadd(2, low, below);
        _tile_loadd(3, low + kTileSide, below);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      const uint32_t* left = a.first + i * a.stride;
      const uint32_t* right = b.first + j;
      for (int64_t t = 0; t < k; t += kTileSide) {
        _tile_loadd(4, left, of_a);
        _tile_loadd(6, right, of_b);
        _tile_loadd(7, right + kTileSide, of_b);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, left + kTileSide * a.stride, of_a);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        left += kTileSide;
        right += kTileSide * b.stride;
      }
      _tile_stored(0, high, below);
      _tile_stored(1, high + kTileSide, below);
      _tile_stored(2, low, below);
      _tile_stored(3, low + kTileSide, below);
    }
  }
  memory_barrier();
}

AttentionKernels with_tiles() {
  AttentionKernels kernels = attention_avx512bf16();
  kernels.begin = begin_tiles;
  kernels.end = end_tiles;
  kernels.multiply = multiply;
  return kernels;
}

}  // namespace

const AttentionKernels& attention_amx() {
  static const AttentionKernels kernels = with_tiles();
  return kernels;
}

}  // namespace arb
