// Working memory of a call, kept by the calling thread for its next one; and the pages that memory is made of.
#pragma once

#include <cstddef>
#include <cstdint>

namespace arb {

// Hands out aligned stretches of one allocation. Sizes are added up first, so that a call allocates at most once.
class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace();

  // Room for `bytes` in all. Throws std::bad_alloc.
  void reserve(size_t bytes);
  // Frees what is too much to keep.
  void release();

  template <class T>
  T* take(int64_t count) {
    T* const found = reinterpret_cast<T*>(next_);
    next_ += padded(count * static_cast<int64_t>(sizeof(T)));
    return found;
  }

  // What take() uses up for so many bytes.
  static size_t padded(int64_t bytes) { return (static_cast<size_t>(bytes) + 63) / 64 * 64; }

 private:
  char* memory_ = nullptr;
  char* next_ = nullptr;
  size_t size_ = 0;
};

// That of the calling thread.
Workspace& workspace();

// Bytes of a core's second-level cache; 1 MiB where the system does not say.
size_t second_level_cache();

// Asks for 2 MiB pages where a tensor has whole ones. Advice only: where the system has none to give, nothing changes.
void advise_huge_pages(void* memory, size_t bytes);

}  // namespace arb
