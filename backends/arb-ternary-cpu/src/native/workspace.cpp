#include "workspace.h"

#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace arb {

namespace {

constexpr size_t kKept = size_t{32} << 20;
constexpr std::align_val_t kAlignment{64};

}  // namespace

Workspace::~Workspace() { ::operator delete(memory_, kAlignment); }

void Workspace::reserve(size_t bytes) {
  if (bytes > size_) {
    ::operator delete(memory_, kAlignment);
    memory_ = nullptr;
    size_ = 0;
    memory_ = static_cast<char*>(::operator new(bytes, kAlignment));
    size_ = bytes;
  }
  next_ = memory_;
}

void Workspace::release() {
  if (size_ > kKept) {
    ::operator delete(memory_, kAlignment);
    memory_ = nullptr;
    size_ = 0;
  }
}

Workspace& workspace() {
  thread_local Workspace mine;
  return mine;
}

size_t second_level_cache() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const long found = sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (found > 0) return static_cast<size_t>(found);
#endif
  return size_t{1} << 20;
}

void advise_huge_pages(void* memory, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(memory) + bytes) / kPage * kPage;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)memory;
  (void)bytes;
#endif
}

}  // namespace arb
