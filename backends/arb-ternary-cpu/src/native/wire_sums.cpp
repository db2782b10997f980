#include <algorithm>

#include "threads.h"
#include "votes_storage.h"
#include "wire.h"

namespace arb {

namespace {

// Votes of a task, and of a stretch of narrow ones that is opened at a time, a multiple of 128.
constexpr int64_t kTaskVotes = 1 << 16;
constexpr int64_t kChunk = 16384;

void quanta(const WireKernels& kernels, const int16_t* sums, int64_t count, const VoteUnit& unit, uint32_t hash,
            int32_t* out) {
  kernels.quanta_short(sums, count, unit, hash, out);
}
void quanta(const WireKernels& kernels, const int32_t* sums, int64_t count, const VoteUnit& unit, uint32_t hash,
            int32_t* out) {
  kernels.quanta_long(sums, count, unit, hash, out);
}
void settle(const WireKernels& kernels, const int16_t* whole, int64_t count, VoteRange range, int8_t* votes) {
  kernels.settle_short(whole, count, range, votes);
}
void settle(const WireKernels& kernels, const int32_t* whole, int64_t count, VoteRange range, int8_t* votes) {
  kernels.settle_long(whole, count, range, votes);
}

}  // namespace

template <class Sum>
void sums_to_quanta(const WireKernels& kernels, const Sum* sums, int64_t count, const VoteUnit& unit,
                    const HashWords& words, uint64_t start, int32_t* out, int threads) {
  const HashStream noise(words);
  auto task = [&](int64_t t, int) {
    const int64_t end = std::min((t + 1) * kTaskVotes, count);
    for (int64_t i = t * kTaskVotes; i < end;) {
      // The key of the hash changes at multiples of 2**32.
      const uint64_t index = start + static_cast<uint64_t>(i);
      const uint64_t left = (uint64_t{1} << 32) - (index & 0xFFFFFFFFu);
      const int64_t some = static_cast<int64_t>(std::min(static_cast<uint64_t>(end - i), left));
      quanta(kernels, sums + i, some, unit, noise.base(index), out + i);
      i += some;
    }
  };
  parallel_tasks(ceil_div(count, kTaskVotes), threads, task);
}

template <class Sum>
void settle_votes(const WireKernels& kernels, const Sum* whole, int64_t rows, int64_t columns, int bits,
                  VoteRange range, uint8_t* votes, int threads) {
  if (bits == 8) {  // rows follow one another
    columns *= rows;
    rows = columns == 0 ? 0 : 1;
  }
  const int64_t pieces = bits == 8 ? ceil_div(columns, kTaskVotes) : 1;
  auto task = [&](int64_t t, int) {
    if (bits == 8) {
      const int64_t start = t * kTaskVotes;
      settle(kernels, whole + start, std::min(kTaskVotes, columns - start), range,
             reinterpret_cast<int8_t*>(votes) + start);
      return;
    }
    uint8_t* row = votes + t * vote_row_bytes(columns, bits);
    alignas(64) int8_t open[kChunk + kVoteBlock];
    for (int64_t start = 0; start < columns; start += kChunk) {
      const int64_t count = std::min(kChunk, columns - start);
      open_votes(row, bits, start, count, open);
      settle(kernels, whole + t * columns + start, count, range, open);
      close_votes(open, bits, start, count, row);
    }
  };
  parallel_tasks(rows * pieces, threads, task);
}

template void sums_to_quanta(const WireKernels&, const int16_t*, int64_t, const VoteUnit&, const HashWords&, uint64_t,
                             int32_t*, int);
template void sums_to_quanta(const WireKernels&, const int32_t*, int64_t, const VoteUnit&, const HashWords&, uint64_t,
                             int32_t*, int);
template void settle_votes(const WireKernels&, const int16_t*, int64_t, int64_t, int, VoteRange, uint8_t*, int);
template void settle_votes(const WireKernels&, const int32_t*, int64_t, int64_t, int, VoteRange, uint8_t*, int);

}  // namespace arb
