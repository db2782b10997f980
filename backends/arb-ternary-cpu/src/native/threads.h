// A pool of threads that takes tasks one by one.
#pragma once

#include <cstdint>

namespace arb {

// Calls `task(context, index, worker)` for every index in [0, count), on at most `threads` threads, the caller among
// them. `worker` is in [0, threads), and no two tasks that run at the same time share it: it chooses working memory.
// Which worker runs a task is not determined, so what a task computes must not depend on it. Calls that meet while
// another runs (from several Python threads, or from within a task) run on their caller alone. In a child process after
// a fork, threads are started anew.
void parallel_for(int64_t count, int threads, void (*task)(void*, int64_t, int), void* context);

// The same for a callable `f(int64_t index, int worker)`. The call of `f` is compiled with the flags of whoever
// includes this, hence the internal linkage.
template <class F>
static inline void parallel_tasks(int64_t count, int threads, F& f) {
  parallel_for(
      count, threads, [](void* context, int64_t index, int worker) { (*static_cast<F*>(context))(index, worker); }, &f);
}

}  // namespace arb
