// Threads that take tasks one by one.
#pragma once

#include <cstdint>

namespace arb {

// Once a process, before anything else here.
void prepare_threads();

// Calls `task(context, index, worker)` for every index in [0, count), on at most `threads` threads, the caller among
// them. `worker` is in [0, threads), and no two tasks that run at the same time share it: it chooses working memory.
// Which worker runs a task is not determined, so what a task computes must not depend on it.
//
// The threads are those of torch where it runs on OpenMP: while they wait for torch's next operation they spin, and
// would take the cores from threads of ours. Elsewhere, and in a child process after a fork, which a team of OpenMP
// does not survive, there is a pool; of its callers that meet all but one work alone.
void parallel_for(int64_t count, int threads, void (*task)(void*, int64_t, int), void* context);

// The same for a callable `f(int64_t index, int worker)`. The call of `f` is compiled with the flags of whoever
// includes this, hence the internal linkage.
template <class F>
static inline void parallel_tasks(int64_t count, int threads, F& f) {
  parallel_for(
      count, threads, [](void* context, int64_t index, int worker) { (*static_cast<F*>(context))(index, worker); }, &f);
}

}  // namespace arb
