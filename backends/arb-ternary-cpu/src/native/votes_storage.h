// Accumulators of 8, 4 and 2 bits, stored as the torch backend stores them.
//
// 8 bits: int8, row-major. 4 bits: column 2 i as the code a + 8 in the low half of byte i of the row, column 2 i + 1 in
// the high half. 2 bits: blocks of 128 columns in 32 bytes, byte j holding the codes a + 1 of columns j, j + 32, j + 64
// and j + 96; the R columns of an incomplete last block take c = ceil(R / 4) bytes in the same way, with c for 32.
// Padding holds a = 0.
#pragma once

#include <cstdint>

namespace arb {

constexpr int64_t kVoteBlock = 128;

static inline int64_t vote_row_bytes(int64_t columns, int bits) {
  return bits == 8 ? columns : bits == 4 ? (columns + 1) / 2 : (columns + 3) / 4;
}

// Bytes of the block of 2-bit accumulators that begins where `left` columns remain.
static inline int64_t vote_block_bytes(int64_t left) { return left < kVoteBlock ? (left + 3) / 4 : kVoteBlock / 4; }

// Columns first .. first + count - 1 of a stored row as int8. `first` is a multiple of 128; `count` is one, too, or
// reaches the end of the row.
static inline void open_votes(const uint8_t* row, int bits, int64_t first, int64_t count, int8_t* out) {
  const uint8_t* from = row + first * bits / 8;
  if (bits == 4) {
    for (int64_t c = 0; c + 1 < count; c += 2) {
      out[c] = static_cast<int8_t>((from[c / 2] & 15) - 8);
      out[c + 1] = static_cast<int8_t>((from[c / 2] >> 4) - 8);
    }
    if (count % 2 != 0) out[count - 1] = static_cast<int8_t>((from[count / 2] & 15) - 8);
    return;
  }
  for (int64_t start = 0; start < count; start += kVoteBlock) {
    const uint8_t* block = from + start / 4;
    const int64_t left = count - start, bytes = vote_block_bytes(left);
    for (int64_t plane = 0; plane < 4; ++plane) {
      const int64_t some = left - plane * bytes < bytes ? left - plane * bytes : bytes;
      int8_t* to = out + start + plane * bytes;
      for (int64_t j = 0; j < some; ++j) to[j] = static_cast<int8_t>(((block[j] >> (2 * plane)) & 3) - 1);
    }
  }
}

// The way back. `votes` has room for 4 more than `count`.
static inline void close_votes(int8_t* votes, int bits, int64_t first, int64_t count, uint8_t* row) {
  uint8_t* to = row + first * bits / 8;
  for (int64_t c = count; c < count + 4; ++c) votes[c] = 0;
  if (bits == 4) {
    for (int64_t i = 0; i < (count + 1) / 2; ++i) {
      to[i] = static_cast<uint8_t>((votes[2 * i] + 8) | ((votes[2 * i + 1] + 8) << 4));
    }
    return;
  }
  for (int64_t start = 0; start < count; start += kVoteBlock) {
    const int8_t* a = votes + start;
    const int64_t bytes = vote_block_bytes(count - start);
    for (int64_t j = 0; j < bytes; ++j) {
      to[start / 4 + j] = static_cast<uint8_t>((a[j] + 1) | ((a[j + bytes] + 1) << 2) | ((a[j + 2 * bytes] + 1) << 4) |
                                               ((a[j + 3 * bytes] + 1) << 6));
    }
  }
}

// Whole matrices of 4 or 2 bits: int8 [rows, columns] to their storage, and back.
void pack_votes(const int8_t* votes, int64_t rows, int64_t columns, int bits, uint8_t* out, int threads);
void unpack_votes(const uint8_t* stored, int64_t rows, int64_t columns, int bits, int8_t* out, int threads);

}  // namespace arb
