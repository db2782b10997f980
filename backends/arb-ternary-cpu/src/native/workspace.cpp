#include "workspace.h"

#include <new>

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

}  // namespace arb
