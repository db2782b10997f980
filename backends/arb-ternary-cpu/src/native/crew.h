// Threads that go through the stages of one job together.
#pragma once

#include <atomic>
#include <cstdint>

#include "threads.h"

namespace arb {

// A stage is a number of items, which threads take in stretches; the next stage begins when all of them are done,
// whoever did them. So a thread that comes late, or not at all, holds nobody up: its share is taken by others. Waiting
// threads spin, and give their core away when it takes long; after the job they sleep, or do what the pool or team
// that they are from does.
class Crew {
 public:
  explicit Crew(int threads) : threads_(threads) {}
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  int threads() const { return threads_; }

  // One thread's way through the stages: all threads call `run` with the same counts, in the same order.
  class Member {
   public:
    explicit Member(Crew& crew) : crew_(crew) {}

    // Calls f(first, last) for stretches of [0, count), and returns once all are done.
    template <class F>
    void run(int64_t count, F f) {
      const uint64_t open = stage_ << kItemBits, end = open + static_cast<uint64_t>(count);
      ++stage_;
      total_ += count;
      uint64_t ticket = crew_.ticket_.load(std::memory_order_acquire);
      while (ticket < end) {
        const int64_t left = static_cast<int64_t>(end - ticket);
        const int64_t some = crew_.threads_ == 1 ? left : (left + kShares * crew_.threads_ - 1) / (kShares * crew_.threads_);
        const uint64_t taken = ticket + static_cast<uint64_t>(some);
        if (!crew_.ticket_.compare_exchange_weak(ticket, taken, std::memory_order_acq_rel)) continue;
        const int64_t first = static_cast<int64_t>(ticket - open);
        f(first, first + some);
        crew_.done_.fetch_add(some, std::memory_order_acq_rel);
        ticket = crew_.ticket_.load(std::memory_order_acquire);
      }
      crew_.wait_for(total_);
      // Opens the next stage, unless somebody did.
      ticket = end;
      crew_.ticket_.compare_exchange_strong(ticket, stage_ << kItemBits, std::memory_order_acq_rel);
    }

    // The same with f(index) for every index in [0, count).
    template <class F>
    void each(int64_t count, F f) {
      run(count, [&](int64_t first, int64_t last) {
        for (int64_t index = first; index < last; ++index) f(index);
      });
    }

   private:
    Crew& crew_;
    uint64_t stage_ = 0;
    int64_t total_ = 0;  // items of the stages so far
  };

  // Calls `work(member, worker)` on the threads of the crew.
  template <class F>
  void work(F f) {
    auto task = [&](int64_t, int worker) {
      Member member(*this);
      f(member, worker);
    };
    parallel_tasks(threads_, threads_, task);
  }

 private:
  static constexpr int kItemBits = 32;
  // A thread takes its share of half of what is left.
  static constexpr int64_t kShares = 2;

  void wait_for(int64_t total);

  const int threads_;
  // The stage, and how many of its items are taken. Lines of their own: everybody writes to them.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> done_{0};
};

}  // namespace arb
