#include "crew.h"

#include <thread>

namespace arb {

namespace {

// Turns of waiting before a thread takes it that another has lost its core.
constexpr int kSpins = 4000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

}  // namespace

void Crew::wait_for(int64_t total) {
  for (int spins = 0; done_.load(std::memory_order_acquire) < total; ++spins) {
    if (spins < kSpins) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace arb
