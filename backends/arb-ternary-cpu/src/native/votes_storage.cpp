#include "votes_storage.h"

#include <algorithm>
#include <cstring>

#include "threads.h"

namespace arb {

namespace {

// Columns that are converted at a time.
constexpr int64_t kStretch = 8 * kVoteBlock;
// Accumulators of a task, about.
constexpr int64_t kTaskVotes = 1 << 16;

// Calls `convert(row)` for every row, some rows to a task.
template <class F>
void each_row(int64_t rows, int64_t columns, int threads, F convert) {
  const int64_t rows_a_task = std::max<int64_t>(1, kTaskVotes / std::max<int64_t>(1, columns));
  auto task = [&](int64_t i, int) {
    const int64_t last = std::min((i + 1) * rows_a_task, rows);
    for (int64_t n = i * rows_a_task; n < last; ++n) convert(n);
  };
  parallel_tasks((rows + rows_a_task - 1) / rows_a_task, threads, task);
}

}  // namespace

void pack_votes(const int8_t* votes, int64_t rows, int64_t columns, int bits, uint8_t* out, int threads) {
  const int64_t width = vote_row_bytes(columns, bits);
  each_row(rows, columns, threads, [=](int64_t n) {
    for (int64_t first = 0; first < columns; first += kStretch) {
      const int64_t count = std::min(kStretch, columns - first);
      int8_t some[kStretch + kVoteBlock];
      std::memcpy(some, votes + n * columns + first, static_cast<size_t>(count));
      close_votes(some, bits, first, count, out + n * width);
    }
  });
}

void unpack_votes(const uint8_t* stored, int64_t rows, int64_t columns, int bits, int8_t* out, int threads) {
  const int64_t width = vote_row_bytes(columns, bits);
  each_row(rows, columns, threads,
           [=](int64_t n) { open_votes(stored + n * width, bits, 0, columns, out + n * columns); });
}

}  // namespace arb
