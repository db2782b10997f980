// The OpenMP that torch runs on.
#pragma once

namespace arb {

// GOMP_parallel of the OpenMP ABI: calls `task(context)` on each of `threads` threads.
using OpenMp = void (*)(void (*task)(void*), void* context, unsigned threads, unsigned flags);

// That of the library that torch is linked against, or null where there was none at the first call.
OpenMp torch_openmp();

}  // namespace arb
