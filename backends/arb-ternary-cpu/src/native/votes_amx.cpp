// Products of gradients with the tiles of AMX. All else is as with AVX-512 BF16.
//
// A tile of the gradient is 16 rows of 16 steps; of the activations 16 steps of 16 columns, which lie in a strip as
// they are. Sums take four registers, operands the other four.
#include "amx_tiles.h"
#include "votes.h"

namespace arb {
namespace {

constexpr int64_t kWordsOfTile = kTileSide * kTileSteps;
// Tiles of a step of the gradient, and of a strip.
constexpr int64_t kRowTiles = kTileRows / kTileSide;
constexpr int64_t kStripBytes = kTileSteps * kStepBytes;
// Steps that pass before the next rows, so that the operands of 48 rows and 64 columns and their sums, 40 KiB, stay in
// the first-level cache.
constexpr int64_t kTileDepth = 64;

void transpose_steps(const uint32_t* steps, uint32_t* tiles) {
  for (int64_t t = 0; t < kRowTiles; ++t, steps += kTileSide, tiles += kWordsOfTile) {
    __m512i rows[16], pairs[16];
    for (int i = 0; i < 16; ++i) rows[i] = _mm512_load_si512(steps + i * kStripColumns);
    for (int i = 0; i < 16; i += 2) {
      pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
      pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    // rows[4 i + j], lane l: word j of lane l of four steps.
    for (int i = 0; i < 16; i += 4) {
      rows[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
      rows[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
      rows[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
      rows[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    for (int j = 0; j < 4; ++j) {
      const __m512i low01 = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0x88);
      const __m512i high01 = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0xDD);
      const __m512i low23 = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0x88);
      const __m512i high23 = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0xDD);
      _mm512_store_si512(tiles + kTileSteps * j, _mm512_shuffle_i32x4(low01, low23, 0x88));
      _mm512_store_si512(tiles + kTileSteps * (8 + j), _mm512_shuffle_i32x4(low01, low23, 0xDD));
      _mm512_store_si512(tiles + kTileSteps * (4 + j), _mm512_shuffle_i32x4(high01, high23, 0x88));
      _mm512_store_si512(tiles + kTileSteps * (12 + j), _mm512_shuffle_i32x4(high01, high23, 0xDD));
    }
  }
}

// The sums of registers 0..3: `across` of them side by side, the others 16 rows below.
template <int across>
[[gnu::always_inline]] inline void load_sums(bool fresh, const uint32_t* c) {
  constexpr int64_t pitch = 4 * kTilePitch;
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    return;
  }
  const uint32_t* const second = across == 4 ? c + 2 * kTileSide : c + kTileSide * kTilePitch;
  _tile_loadd(0, c, pitch);
  _tile_loadd(1, c + kTileSide, pitch);
  _tile_loadd(2, second, pitch);
  _tile_loadd(3, second + kTileSide, pitch);
}

template <int across>
[[gnu::always_inline]] inline void store_sums(uint32_t* c) {
  constexpr int64_t pitch = 4 * kTilePitch;
  uint32_t* const second = across == 4 ? c + 2 * kTileSide : c + kTileSide * kTilePitch;
  _tile_stored(0, c, pitch);
  _tile_stored(1, c + kTileSide, pitch);
  _tile_stored(2, second, pitch);
  _tile_stored(3, second + kTileSide, pitch);
}

#define ARB_MULTIPLY(sum, g, x)      \
  do {                               \
    if constexpr (pairs) {           \
      _tile_dpbf16ps(sum, g, x);     \
    } else {                         \
      _tile_dpbssd(sum, g, x);       \
    }                                \
  } while (false)

// 32 rows x 32 columns.
template <bool pairs>
void multiply_square(const uint32_t* g, const uint8_t* x, int64_t steps, bool fresh, uint32_t* c) {
  load_sums<2>(fresh, c);
  for (int64_t s = 0; s < steps; s += kTileSteps, g += kRowTiles * kWordsOfTile, x += kStripBytes) {
    _tile_loadd(6, x, kStepBytes);
    _tile_loadd(4, g, kTileBytes);
    _tile_loadd(7, x + kTileBytes, kStepBytes);
    ARB_MULTIPLY(0, 4, 6);
    _tile_loadd(5, g + kWordsOfTile, kTileBytes);
    ARB_MULTIPLY(1, 4, 7);
    ARB_MULTIPLY(2, 5, 6);
    ARB_MULTIPLY(3, 5, 7);
  }
  store_sums<2>(c);
}

// 16 rows x 64 columns.
template <bool pairs>
void multiply_wide(const uint32_t* g, const uint8_t* x, int64_t steps, bool fresh, uint32_t* c) {
  load_sums<4>(fresh, c);
  for (int64_t s = 0; s < steps; s += kTileSteps, g += kRowTiles * kWordsOfTile, x += kStripBytes) {
    _tile_loadd(4, g, kTileBytes);
    _tile_loadd(5, x, kStepBytes);
    _tile_loadd(6, x + kTileBytes, kStepBytes);
    _tile_loadd(7, x + 2 * kTileBytes, kStepBytes);
    ARB_MULTIPLY(0, 4, 5);
    _tile_loadd(5, x + 3 * kTileBytes, kStepBytes);
    ARB_MULTIPLY(1, 4, 6);
    ARB_MULTIPLY(2, 4, 7);
    ARB_MULTIPLY(3, 4, 5);
  }
  store_sums<4>(c);
}

#undef ARB_MULTIPLY

template <bool pairs>
void multiply_strip(const uint32_t* g, int64_t rows, const uint8_t* x, int64_t steps, bool fresh, uint32_t* c) {
  int64_t r = 0;
  for (; r + kTileSide < rows; r += 2 * kTileSide) {
    const uint32_t* const from = g + r / kTileSide * kWordsOfTile;
    multiply_square<pairs>(from, x, steps, fresh, c + r * kTilePitch);
    multiply_square<pairs>(from, x + 2 * kTileBytes, steps, fresh, c + r * kTilePitch + 2 * kTileSide);
  }
  if (r < rows) multiply_wide<pairs>(g + r / kTileSide * kWordsOfTile, x, steps, fresh, c + r * kTilePitch);
}

template <bool pairs>
void multiply_tile(const uint32_t* g, int64_t rows, const uint8_t* strips, int64_t stride, int64_t columns,
                   int64_t steps, void* c) {
  memory_barrier();
  {
    const Tiles tiles;
    for (int64_t k = 0; k < columns; k += kStripColumns, strips += stride) {
      int64_t step = 0;
      do {
        const int64_t depth = steps - step < kTileDepth ? steps - step : kTileDepth;
        multiply_strip<pairs>(g + step * kTileRows, rows, strips + step * kStepBytes, depth, step == 0,
                              static_cast<uint32_t*>(c) + k);
        step += depth;
      } while (step < steps);
    }
  }
  memory_barrier();
}

VoteKernels with_tiles() {
  VoteKernels kernels = vote_kernels_avx512bf16();
  kernels.flip_x = 0;
  kernels.transpose_steps = transpose_steps;
  kernels.multiply_tile_int8 = multiply_tile<false>;
  kernels.multiply_tile_pairs = multiply_tile<true>;
  return kernels;
}

}  // namespace

const VoteKernels& vote_kernels_amx() {
  static const VoteKernels kernels = with_tiles();
  return kernels;
}

}  // namespace arb
