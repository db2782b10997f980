#include <algorithm>
#include <cstring>

#include "threads.h"
#include "votes.h"
#include "wire.h"

namespace arb {

namespace {

// Bytes of packed weights that a task compares, about.
constexpr int64_t kTaskBytes = 1 << 16;

uint32_t dword(const uint8_t* at) {
  uint32_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return bits;
}

// The low bits of the codes in which two dwords differ.
uint32_t differing_codes(uint32_t before, uint32_t after) {
  const uint32_t differing = before ^ after;
  return (differing | differing >> 1) & 0x55555555u;
}

// Calls `one(block, row, codes)` for the rows of blocks of a strip that differ, block by block.
template <class F>
void each_difference(const uint8_t* before, const uint8_t* after, int64_t blocks, F one) {
  for (int64_t b = 0; b < blocks; ++b, before += 4 * kBlock, after += 4 * kBlock) {
    uint32_t old[kBlock], now[kBlock], differing = 0;
    std::memcpy(old, before, sizeof old);
    std::memcpy(now, after, sizeof now);
    // Without a branch for each row, which nobody could foresee.
    for (int r = 0; r < kBlock; ++r) differing |= static_cast<uint32_t>(old[r] != now[r]) << r;
    for (; differing != 0; differing &= differing - 1) {
      const int r = __builtin_ctz(differing);
      one(b, r, differing_codes(old[r], now[r]));
    }
  }
}

// The column of a block whose code is at a bit of the dword of a row, and the other way round.
int64_t column_at(int bit) { return bit % 8 / 2 * 4 + bit / 8; }
int bit_of(int64_t column) { return static_cast<int>(column % 4 * 8 + column / 4 * 2); }

// Calls `one(strip)` for every strip, some to a task.
template <class F>
void each_strip(int64_t strips, int64_t strip_bytes, int threads, F one) {
  const int64_t some = std::max<int64_t>(1, kTaskBytes / std::max<int64_t>(1, strip_bytes));
  auto task = [&](int64_t i, int) {
    for (int64_t s = i * some; s < std::min((i + 1) * some, strips); ++s) one(s);
  };
  parallel_tasks(ceil_div(strips, some), threads, task);
}

}  // namespace

void count_flips(const uint8_t* before, const uint8_t* after, int64_t strips, int64_t columns, int64_t* counts,
                 int threads) {
  const int64_t blocks = ceil_div(columns, kBlock), bytes = blocks * 4 * kBlock;
  each_strip(strips, bytes, threads, [=](int64_t s) {
    int64_t flips = 0;
    each_difference(before + s * bytes, after + s * bytes, blocks,
                    [&](int64_t, int64_t, uint32_t codes) { flips += __builtin_popcount(codes); });
    counts[s] = flips;
  });
}

void list_flips(const uint8_t* before, const uint8_t* after, int64_t strips, int64_t columns, const int64_t* first,
                int64_t* places, int8_t* directions, int threads) {
  const int64_t blocks = ceil_div(columns, kBlock), bytes = blocks * 4 * kBlock;
  each_strip(strips, bytes, threads, [=](int64_t s) {
    if (first[s] == first[s + 1]) return;
    const uint8_t *old = before + s * bytes, *now = after + s * bytes;
    // Where the flips of each row begin: the packed weight goes by blocks of columns, the list by rows.
    int64_t at[kBlock + 1] = {first[s]};
    each_difference(old, now, blocks,
                    [&](int64_t, int64_t r, uint32_t codes) { at[r + 1] += __builtin_popcount(codes); });
    for (int64_t r = 0; r < kBlock; ++r) at[r + 1] += at[r];
    each_difference(old, now, blocks, [&](int64_t b, int64_t r, uint32_t codes) {
      const uint32_t was = dword(old + (b * kBlock + r) * 4), is = dword(now + (b * kBlock + r) * 4);
      const auto list = [&](int bit) {
        places[at[r]] = (s * kBlock + r) * columns + b * kBlock + column_at(bit);
        directions[at[r]++] = static_cast<int8_t>(static_cast<int>(is >> bit & 3) - static_cast<int>(was >> bit & 3));
      };
      if ((codes & (codes - 1)) == 0) return list(__builtin_ctz(codes));
      for (int64_t c = 0; c < kBlock; ++c) {
        if ((codes >> bit_of(c) & 1) != 0) list(bit_of(c));
      }
    });
  });
}

Applied apply_flips(uint8_t* packed, int64_t rows, int64_t columns, const int64_t* places, const int8_t* directions,
                    int64_t count) {
  const auto byte_of = [=](int64_t n, int64_t c) { return packed + code_offset(columns, n, c) + c % 4; };
  for (int64_t i = 0; i < count; ++i) {
    if (places[i] < 0 || places[i] >= rows * columns) return Applied::outside;
    const int64_t n = places[i] / columns, c = places[i] % columns;
    const int wanted = (*byte_of(n, c) >> (c % kBlock / 4 * 2) & 3) + directions[i];
    if (wanted < 0 || wanted > 2) return Applied::beyond_rail;
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t n = places[i] / columns, c = places[i] % columns;
    uint8_t* byte = byte_of(n, c);
    *byte = static_cast<uint8_t>(*byte + directions[i] * (1 << (c % kBlock / 4 * 2)));
  }
  return Applied::all;
}

}  // namespace arb
