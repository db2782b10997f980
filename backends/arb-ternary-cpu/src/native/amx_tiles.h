// The eight tile registers of AMX, all of 16 rows x 64 bytes. For translation units of that instruction set.
//
// The threads are torch's too, which sets up tiles of its own: whoever multiplies with tiles does so between
// begin_tiles() and end_tiles(), on one thread, in one task.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace arb {
namespace {

constexpr int64_t kTileSide = 16;   // rows of a tile
constexpr int64_t kTileBytes = 64;  // of a row

struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// gcc 12 takes loads and stores of tiles for no access to memory: what is loaded has to be written by then, and what is
// stored is read only afterwards.
[[gnu::always_inline]] inline void memory_barrier() { __asm__ volatile("" ::: "memory"); }

// Gives the calling thread its tiles, and takes them back: tiles in use make every change of threads dearer.
inline void begin_tiles() {
  TileShapes shapes;
  for (int i = 0; i < 8; ++i) {
    shapes.row_bytes[i] = kTileBytes;
    shapes.rows[i] = kTileSide;
  }
  __asm__ volatile("ldtilecfg %0" : : "m"(shapes));
}
inline void end_tiles() { _tile_release(); }

// The same for a block of code.
class Tiles {
 public:
  Tiles() { begin_tiles(); }
  ~Tiles() { end_tiles(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

}  // namespace
}  // namespace arb
