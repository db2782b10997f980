// How a product is cut into tasks, what each task needs to know, and where it works.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "product_driver.h"
#include "products.h"
#include "workspace.h"

namespace arb {

constexpr int64_t kMaxLanes = kMaxStrips * kBlockSide;
// Rows whose sums are kept while chunks of the weight pass.
constexpr int64_t kKeptRows = 256;

static inline int64_t ceil_of(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static inline float power_of_two(int32_t exponent) {
  const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Whether all sums of `terms` products of an int8 and a trit << spread fit in 32 bits.
static inline bool fits_in_32_bits(int spread, int64_t terms) {
  return spread < 24 && terms < (int64_t{1} << 24 >> spread);
}

static inline void raise_to(std::atomic<int>& largest, int value) {
  int seen = largest.load(std::memory_order_relaxed);
  while (value > seen && !largest.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

// One product, seen from its lanes: the 16-wide strips of the result, and the sum over blocks.
struct Shape {
  bool along_rows;  // grad_y @ W
  int64_t m;
  int64_t outputs;  // columns of the result
  int64_t terms;    // of a sum
  int64_t strips;   // blocks_of(outputs)
  int64_t blocks;   // blocks_of(terms)
  int64_t blocks_per_group;

  Shape(const Weight& w, bool along, int64_t rows);

  // Threads that are worth waking.
  int threads(int wanted) const;
};

// Rows of the other operand in panels of nearly equal height.
struct Panels {
  int64_t count, base, taller;

  Panels(int64_t m, int64_t rows) : count(ceil_of(m, rows)), base(m / count), taller(m % count) {}

  int64_t start(int64_t panel) const { return panel * base + least(panel, taller); }
  int64_t rows(int64_t panel) const { return base + (panel < taller ? 1 : 0); }
};

// Tasks: groups of strips, times stretches of panels where there are few groups.
struct Cut {
  int64_t strip_groups, splits, panels_per_split;

  Cut(const Shape& shape, const ProductKernels& kernels, const Panels& panels, int threads);

  int64_t tasks() const { return strip_groups * splits; }
};

// The exponents of the whole weight, for sums along its rows.
struct GroupExponents {
  uint8_t* gathered;
  int8_t* lowest;
  int8_t* highest;
};

void gather_all(const ProductKernels& kernels, int threads, const Weight& w, const GroupExponents& into);

// Finds the exponents of `strips` strips (fewer at the end) and the floors of their rows (or groups). Returns the
// largest spread. `exponents` has room for kMaxStrips strips, `floors` for kMaxLanes lanes.
int set_up(const ProductKernels& kernels, const Weight& w, const Shape& shape, const GroupExponents& all,
           int64_t first_strip, int64_t strips, uint8_t* exponents, int32_t* floors, DecodeSource& source);

// `source` cut down to a stretch of its blocks.
DecodeSource chunk_of(const DecodeSource& source, int64_t first, int64_t count);

// Lanes of a group of strips: what they are multiplied with, and where they end.
struct Columns {
  alignas(64) float scale[kMaxLanes] = {};  // 2**floor
  alignas(64) float bias[kMaxLanes] = {};
  int64_t first, lanes, count;

  Columns(const Shape& shape, const DecodeSource& source, int64_t first_strip, const float* all_bias)
      : first(first_strip * kBlockSide), lanes(source.strips * kBlockSide), count(least(lanes, shape.outputs - first)) {
    for (int64_t i = 0; i < lanes; ++i) scale[i] = power_of_two(source.floors[i]);
    if (all_bias != nullptr) std::memcpy(bias, all_bias + first, static_cast<size_t>(count) * sizeof(float));
  }
};

struct Result {
  void* out;
  int64_t stride;
  Dtype dtype;

  void* at(int64_t row, int64_t column) const {
    return static_cast<char*>(out) + (row * stride + column) * dtype_size(dtype);
  }
};

// The memory of one worker.
struct Bench {
  uint8_t* exponents;  // kMaxStrips strips
  void* weights;       // a decoded chunk
  void* sums;          // 32 bits each, of kKeptRows rows
  int64_t* wide;       // of some rows
};

class Benches {
 public:
  Benches(int threads, const Weight& w, int64_t weight_bytes, int64_t wide_rows);

  size_t bytes() const { return static_cast<size_t>(threads_) * bytes_each_; }
  void place(Workspace& space) { memory_ = space.take<char>(static_cast<int64_t>(bytes())); }
  Bench of(int worker) const;

 private:
  int threads_;
  size_t exponents_, weights_, sums_, wide_, bytes_each_;
  char* memory_ = nullptr;
};

// linear_int8 for a few rows: every block of the weight is read once, in the order in which they lie. Returns the
// largest spread; unless the sums of such exponents fit in 32 bits, the result is undefined.
int few_rows_product(const ProductKernels& kernels, int threads, const Weight& w, const Shape& shape, const int8_t* x,
                     const float* row_scale, const float* bias, const Result& result);

}  // namespace arb
