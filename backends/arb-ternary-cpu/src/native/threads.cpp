#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "openmp.h"

namespace arb {

namespace {

struct Job {
  void (*task)(void*, int64_t, int);
  void* context;
  int64_t count;
  int limit;  // threads that may join the caller
  std::atomic<int64_t> next{0};
  std::atomic<int> joined{0};

  void work(int worker) {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) task(context, i, worker);
  }
};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

class Pool {
 public:
  void run(Job& job) {
    std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
    if (!owner.owns_lock() || job.limit < 1 || job.count < 2) {
      job.work(0);
      return;
    }
    start(job.limit);
    job_.store(&job);
    epoch_.fetch_add(1);
    if (sleepers_.load() > 0) {
      std::lock_guard<std::mutex> guard(sleep_);
      wake_.notify_all();
    }
    job.work(0);
    // No helper can join after this; those that did are still counted in active_.
    job_.store(nullptr);
    for (int spins = 0; active_.load() != 0; ++spins) {
      if (spins < kSpins) {
        pause();
      } else {
        std::this_thread::yield();  // the helper may have lost its core
      }
    }
  }

 private:
  // Spins that a helper spends on the look-out for the next job before it sleeps: some 20 microseconds. Waking a
  // sleeper costs more than that; spinning much longer would take the core from others on a busy machine.
  static constexpr int kSpins = 600;

  void start(int wanted) {
    for (; helpers_ < wanted; ++helpers_) {
      try {
        std::thread([this, seen = epoch_.load()]() mutable { help(seen); }).detach();
      } catch (const std::system_error&) {
        return;  // no more threads to be had: fewer helpers
      }
    }
  }

  void help(uint64_t seen) {
    for (;;) {
      wait(seen);
      seen = epoch_.load();
      active_.fetch_add(1);
      Job* job = job_.load();
      if (job != nullptr) {
        const int worker = job->joined.fetch_add(1) + 1;
        if (worker <= job->limit) job->work(worker);
      }
      active_.fetch_sub(1);
    }
  }

  void wait(uint64_t seen) {
    for (int i = 0; i < kSpins; ++i) {
      if (epoch_.load(std::memory_order_relaxed) != seen) return;
      pause();
    }
    std::unique_lock<std::mutex> lock(sleep_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, [&] { return epoch_.load() != seen; });
    sleepers_.fetch_sub(1);
  }

  std::mutex owner_;
  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<uint64_t> epoch_{0};
  std::atomic<Job*> job_{nullptr};
  std::atomic<int> active_{0};
  std::atomic<int> sleepers_{0};
  int helpers_ = 0;
};

// Never destroyed: helpers may still wait in it while the process ends.
std::atomic<Pool*> pool{nullptr};
std::atomic<bool> forked{false};

// A child has none of the threads of its parent, and locks in an unknown state: it starts with a new pool, and leaves
// the old one, and torch's team, alone.
void after_fork() {
  forked.store(true);
  pool.store(new (std::nothrow) Pool());
}

void run_on_team(OpenMp parallel, Job& job) {
  auto work = [](void* given) {
    Job& shared = *static_cast<Job*>(given);
    shared.work(shared.joined.fetch_add(1));
  };
  parallel(work, &job, static_cast<unsigned>(job.limit + 1), 0);
}

}  // namespace

void prepare_threads() {
  pool.store(new Pool());
  pthread_atfork(nullptr, nullptr, after_fork);
}

void parallel_for(int64_t count, int threads, void (*task)(void*, int64_t, int), void* context) {
  Job job;
  job.task = task;
  job.context = context;
  job.count = count;
  job.limit = threads - 1;
  if (threads < 2 || count < 2) {
    job.work(0);
    return;
  }
  const OpenMp parallel = forked.load() ? nullptr : torch_openmp();
  if (parallel != nullptr) {
    run_on_team(parallel, job);
  } else if (Pool* const own = pool.load()) {
    own->run(job);
  } else {
    job.work(0);
  }
}

}  // namespace arb
