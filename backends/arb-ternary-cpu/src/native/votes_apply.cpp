#include "votes_apply.h"

#include <algorithm>
#include <atomic>

#include "threads.h"
#include "votes_storage.h"

namespace arb {

namespace {

// Columns that pass for all rows of a block before the next ones: their codes, 64 KiB, stay in the second-level cache,
// and the votes of a row are read in one go.
constexpr int64_t kChunk = 16384;
// Accumulators of a task at least.
constexpr int64_t kLeastVotes = 1 << 16;

// The decay of votes whose indices cross a multiple of 2**32, where the key of the hash changes.
void decay_across_keys(int8_t* votes, int64_t count, uint32_t decay, const HashStream& noise, uint64_t index) {
  for (int64_t c = 0; c < count; ++c) {
    const uint32_t hash = hash_finish(noise.base(index + static_cast<uint64_t>(c)));
    const uint32_t size = static_cast<uint32_t>(votes[c] < 0 ? -votes[c] : votes[c]);
    const int32_t left = static_cast<int32_t>(size - ((size * decay + (hash & 0xFFFFu)) >> 16));
    votes[c] = static_cast<int8_t>(votes[c] < 0 ? -left : left);
  }
}

class Flips {
 public:
  Flips(const FlipState& state, const VoteKernels& kernels, const FlipRule& rule, const HashWords& words)
      : state_(state), kernels_(kernels), rule_(rule), noise_(words.use(kUseDecay)) {}

  int64_t block(int64_t index) const {
    const int64_t first = index * kBlock, last = std::min(first + kBlock, state_.rows);
    int64_t flips = 0;
    for (int64_t start = 0; start < state_.columns; start += kChunk) {
      const int64_t count = std::min(kChunk, state_.columns - start);
      // Crossings ask for codes here and there, in no order that the processor could foresee.
      for (int64_t c = 0; c < count; c += kBlock) __builtin_prefetch(codes(first, start + c), 1);
      for (int64_t n = first; n < last; ++n) flips += stretch(n, start, count);
    }
    return flips;
  }

 private:
  int64_t stretch(int64_t n, int64_t start, int64_t count) const {
    uint8_t* row = state_.votes + n * vote_row_bytes(state_.columns, state_.bits);
    if (state_.bits == 8) return flip(reinterpret_cast<int8_t*>(row) + start, n, start, count);
    alignas(64) int8_t open[kChunk + kVoteBlock];
    open_votes(row, state_.bits, start, count, open);
    const int64_t flips = flip(open, n, start, count);
    close_votes(open, state_.bits, start, count, row);
    return flips;
  }

  uint8_t* codes(int64_t n, int64_t column) const { return state_.packed + code_offset(state_.columns, n, column); }

  int64_t flip(int8_t* votes, int64_t n, int64_t start, int64_t count) const {
    if (rule_.decay == 0) return kernels_.flip(votes, count, codes(n, start), rule_, 0);
    const uint64_t index = static_cast<uint64_t>((state_.first_row + n) * state_.columns + start);
    if (index >> 32 == (index + static_cast<uint64_t>(count) - 1) >> 32) {
      return kernels_.flip(votes, count, codes(n, start), rule_, noise_.base(index));
    }
    FlipRule only = rule_;
    only.decay = 0;
    const int64_t flips = kernels_.flip(votes, count, codes(n, start), only, 0);
    decay_across_keys(votes, count, rule_.decay, noise_, index);
    return flips;
  }

  const FlipState& state_;
  const VoteKernels& kernels_;
  const FlipRule& rule_;
  const HashStream noise_;
};

}  // namespace

int64_t flip_trits(const FlipState& state, const VoteKernels& kernels, const FlipRule& rule, const HashWords& words,
                   int threads) {
  if (state.columns == 0) return 0;
  const Flips flips(state, kernels, rule, words);
  const int64_t blocks = ceil_div(state.rows, kBlock);
  const int64_t blocks_a_task = std::max<int64_t>(1, kLeastVotes / (kBlock * state.columns));
  std::atomic<int64_t> total{0};
  auto task = [&](int64_t i, int) {
    int64_t some = 0;
    const int64_t last = std::min((i + 1) * blocks_a_task, blocks);
    for (int64_t b = i * blocks_a_task; b < last; ++b) some += flips.block(b);
    total.fetch_add(some, std::memory_order_relaxed);
  };
  parallel_tasks(ceil_div(blocks, blocks_a_task), threads, task);
  return total.load();
}

int64_t flip_exponents(int8_t* exponent, int8_t* votes, const int8_t* origin, int64_t row_stride, int64_t group_stride,
                       int64_t rows, int64_t groups, const VoteKernels& kernels, const ExponentRule& rule,
                       int threads) {
  // Where the origin is one number, or laid out as the exponents, all of them make one row.
  if ((row_stride == 0 && group_stride == 0) || (row_stride == groups && group_stride == 1)) {
    groups *= rows;
    rows = 1;
  }
  if (groups == 0) return 0;
  const int64_t pieces = ceil_div(groups, kLeastVotes);
  std::atomic<int64_t> total{0};
  auto task = [&](int64_t i, int) {
    const int64_t n = i / pieces, start = i % pieces * kLeastVotes;
    const int64_t offset = n * groups + start;
    total.fetch_add(
        kernels.move_exponents(exponent + offset, votes + offset, origin + n * row_stride + start * group_stride,
                               group_stride, std::min(kLeastVotes, groups - start), rule),
        std::memory_order_relaxed);
  };
  parallel_tasks(rows * pieces, threads, task);
  return total.load();
}

}  // namespace arb
