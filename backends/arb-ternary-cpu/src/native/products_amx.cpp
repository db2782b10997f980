// Products with the tiles of AMX. All else is as with AVX512-BF16.
//
// A decoded weight, step by step for 16 lanes of 4 bytes, is the right operand of a tile's multiplication as it stands:
// 16 steps, each a row of 64 bytes. The left operand is 16 rows of a panel x the 64 bytes of the same steps; a panel of
// up to 32 rows is one such tile or two, side by side, step after step. Both operands are signed, so that nothing is
// flipped.
//
// Tiles of bfloat16 sum the even and the odd terms of 32 apart, then both, each addition rounded to nearest.
#include "simd_avx512vnni.h"

// The loops are written in what comes first.
#include "amx_tiles.h"
#include "loops_decode.h"

namespace arb {
namespace {

constexpr int64_t kUnitRows = 2 * kTileSide;
constexpr int64_t kTile = kTileSide * kTileBytes;
constexpr int64_t kStepsPerTile = 16;
// How far ahead a panel is fetched from the second-level cache: the weights are in the first.
constexpr int64_t kAhead = 4 << 10;

// A panel's rows of `bytes` bytes, `stride` bytes apart, padded with zeros to `padded` bytes, a multiple of 64. Rows
// beyond `rows` keep what was there: their sums are not read.
void pack(const char* x, int64_t stride, int64_t rows, int64_t bytes, int64_t padded, char* panel) {
  const int64_t room = (rows + kTileSide - 1) / kTileSide * kTile;
  for (int64_t r = 0; r < rows; ++r) {
    const char* const from = x + r * stride;
    char* to = panel + r * kTileBytes;
    int64_t i = 0;
    for (; i + kTileBytes <= bytes; i += kTileBytes, to += room) store(to, load(from + i));
    for (; i < padded; i += kTileBytes, to += room) {
      store(to, zero());
      if (i < bytes) std::memcpy(to, from + i, static_cast<size_t>(bytes - i));
    }
  }
}

void pack_int8(const int8_t* x, int64_t stride, int64_t rows, int64_t terms, int64_t steps, uint8_t, uint8_t* panel) {
  const int64_t tiles = (steps + kStepsPerTile - 1) / kStepsPerTile;
  pack(reinterpret_cast<const char*>(x), stride, rows, terms, tiles * kTileBytes, reinterpret_cast<char*>(panel));
}

void pack_bfloat16(const void* x, Dtype, int64_t stride, int64_t rows, int64_t terms, int64_t padded, void* panel) {
  const int64_t tiles = (2 * padded + kTileBytes - 1) / kTileBytes;
  pack(static_cast<const char*>(x), 2 * stride, rows, 2 * terms, tiles * kTileBytes, static_cast<char*>(panel));
}

// The last tile's steps beyond those that were decoded.
void clear_rest(int64_t steps, int64_t strips, void* weights) {
  const int64_t width = strips * kBlockBytes, rest = (kStepsPerTile - steps % kStepsPerTile) % kStepsPerTile;
  std::memset(static_cast<char*>(weights) + steps * width, 0, static_cast<size_t>(rest * width));
}

void decode_unflipped(const DecodeSource& source, bool along_rows, int band, int8_t* weights, int32_t* offset) {
  decode_int8<0>(source, along_rows, band, weights, offset);
  clear_rest(source.count * kStepsPerBlock, source.strips, weights);
}

void decode_bfloat16(const DecodeSource& source, bool along_rows, void* weights) {
  products_avx512bf16().bfloat16.decode(source, along_rows, weights);
  clear_rest(source.count * kBlockSide / 2, source.strips, weights);
}

// Sums are tiles 0 to 3, those of the second strip one after those of the first; rows are tiles 4 and 5, weights 6 and
// 7. The numbers of tiles are part of an instruction: gcc 12 takes them by their letters.
struct Int8Terms {
  static void multiply_0() { _tile_dpbssd(0, 4, 6); }
  static void multiply_1() { _tile_dpbssd(1, 4, 7); }
  static void multiply_2() { _tile_dpbssd(2, 5, 6); }
  static void multiply_3() { _tile_dpbssd(3, 5, 7); }
};

struct Bfloat16Terms {
  static void multiply_0() { _tile_dpbf16ps(0, 4, 6); }
  static void multiply_1() { _tile_dpbf16ps(1, 4, 7); }
  static void multiply_2() { _tile_dpbf16ps(2, 5, 6); }
  static void multiply_3() { _tile_dpbf16ps(3, 5, 7); }
};

// Loading a tile takes longer than multiplying one, hence as many sums a tile as there are registers for.
template <class Terms, int R, int S>
inline void tile_of(int64_t tiles, const char* panel, const char* weights, bool fresh, char* acc) {
  constexpr int64_t kWidth = S * kTileBytes, kBelow = kTileSide * kWidth;
  memory_barrier();
  if (fresh) {
    _tile_zero(0);
    if constexpr (S == 2) _tile_zero(1);
    if constexpr (R == 2) _tile_zero(2);
    if constexpr (R == 2 && S == 2) _tile_zero(3);
  } else {
    _tile_loadd(0, acc, kWidth);
    if constexpr (S == 2) _tile_loadd(1, acc + kTileBytes, kWidth);
    if constexpr (R == 2) _tile_loadd(2, acc + kBelow, kWidth);
    if constexpr (R == 2 && S == 2) _tile_loadd(3, acc + kBelow + kTileBytes, kWidth);
  }
  for (int64_t i = 0; i < tiles; ++i) {
    unroll<R * kTileSide>(ARB_UNROLLED(line) { prefetch(panel + kAhead + line.value * kTileBytes); });
    _tile_loadd(6, weights, kWidth);
    if constexpr (S == 2) _tile_loadd(7, weights + kTileBytes, kWidth);
    _tile_loadd(4, panel, kTileBytes);
    Terms::multiply_0();
    if constexpr (S == 2) Terms::multiply_1();
    if constexpr (R == 2) {
      _tile_loadd(5, panel + kTile, kTileBytes);
      Terms::multiply_2();
      if constexpr (S == 2) Terms::multiply_3();
    }
    weights += S * kTile;
    panel += R * kTile;
  }
  _tile_stored(0, acc, kWidth);
  if constexpr (S == 2) _tile_stored(1, acc + kTileBytes, kWidth);
  if constexpr (R == 2) _tile_stored(2, acc + kBelow, kWidth);
  if constexpr (R == 2 && S == 2) _tile_stored(3, acc + kBelow + kTileBytes, kWidth);
  memory_barrier();
}

template <class Terms>
void tile(int64_t rows, int64_t steps, const void* from, const void* decoded, int64_t strips, bool fresh, void* sums) {
  const int64_t tiles = (steps + kStepsPerTile - 1) / kStepsPerTile;
  const auto* const panel = static_cast<const char*>(from);
  const auto* const weights = static_cast<const char*>(decoded);
  auto* const acc = static_cast<char*>(sums);
  if (rows > kTileSide) {
    if (strips == 2) {
      tile_of<Terms, 2, 2>(tiles, panel, weights, fresh, acc);
    } else {
      tile_of<Terms, 2, 1>(tiles, panel, weights, fresh, acc);
    }
  } else if (strips == 2) {
    tile_of<Terms, 1, 2>(tiles, panel, weights, fresh, acc);
  } else {
    tile_of<Terms, 1, 1>(tiles, panel, weights, fresh, acc);
  }
}

void tile_int8(int64_t rows, int64_t steps, const uint8_t* panel, int64_t, const int8_t* weights, int64_t strips, int,
               bool fresh, int32_t* acc) {
  tile<Int8Terms>(rows, steps, panel, weights, strips, fresh, acc);
}

void tile_bfloat16(int64_t rows, int64_t terms, const void* panel, const void* weights, int64_t strips, bool fresh,
                   float* acc) {
  tile<Bfloat16Terms>(rows, terms / 2, panel, weights, strips, fresh, acc);
}

ProductKernels with_tiles() {
  ProductKernels kernels = products_avx512bf16();
  // A tile is 64 terms of int8, four blocks; or 32 of bfloat16, two.
  kernels.int8_unit = {kUnitRows, 0, pack_int8, decode_unflipped, tile_int8, {kTileSide, 4, begin_tiles, end_tiles}};
  kernels.bfloat16 = {kUnitRows, 2, pack_bfloat16, decode_bfloat16, tile_bfloat16,
                      {kTileSide, 2, begin_tiles, end_tiles}};
  return kernels;
}

}  // namespace

const ProductKernels& products_amx() {
  static const ProductKernels kernels = with_tiles();
  return kernels;
}

}  // namespace arb
