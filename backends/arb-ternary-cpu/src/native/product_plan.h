// How a product is cut into tasks, what each task needs to know, and where it works.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>

#include "crew.h"
#include "product_driver.h"
#include "products.h"
#include "workspace.h"

namespace arb {

constexpr int64_t kMaxLanes = kMaxStrips * kBlockSide;
// Panels are counted as if they were at least so high.
constexpr int64_t kMinPanelRows = 8;
// Sums that are kept while chunks of the weight pass: those of so many rows and groups of strips. A chunk of the rows
// is read once for all groups, and then lies in the second-level cache; the weight is decoded once for all rows.
constexpr int64_t kKeptRows = 512;
constexpr int64_t kKeptGroups = 16;
constexpr int64_t kKeptSums = kKeptRows * kMaxLanes;  // of a group
// Bytes of weights that are decoded at a time: they stay in the first-level cache while the panels pass.
constexpr int64_t kChunkBytes = 16 << 10;

static inline int64_t ceil_of(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t round_up(int64_t a, int64_t unit) { return ceil_of(a, unit) * unit; }

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

// Rows of the other operand in panels of nearly equal height; for a matrix unit, all but the last as high as can be.
struct Panels {
  int64_t m, height, count, base, taller;

  Panels(int64_t all, int64_t rows, const MatrixUnit& unit = {})
      : m(all),
        height(rows),
        count(ceil_of(m, rows)),
        base(unit.rows > 1 ? rows : m / count),
        taller(unit.rows > 1 ? 0 : m % count) {}

  int64_t start(int64_t panel) const { return panel * base + least(panel, taller); }
  int64_t rows(int64_t panel) const { return least(base + (panel < taller ? 1 : 0), m - start(panel)); }
  // Panels that so many rows are enough for.
  int64_t among(int64_t rows) const { return rows / most(height, kMinPanelRows); }
};

// Where panels lie: chunk after chunk, so that those of a chunk are one stretch of memory. A stride that is a large
// power of two would have them compete for the same lines of the caches.
struct PackedRows {
  char* memory;
  const Panels& panels;
  MatrixUnit unit;
  int64_t term_bytes;

  static int64_t bytes(const Shape& shape, const MatrixUnit& unit, int64_t term_bytes) {
    return round_up(shape.m, unit.rows) * round_up(shape.blocks, unit.blocks) * kBlockSide * term_bytes;
  }

  // `count` blocks of a panel from `block` on, which are a chunk; all chunks but the last are of whole units.
  char* at(int64_t panel, int64_t block, int64_t count) const {
    const int64_t before = block * round_up(panels.m, unit.rows), width = round_up(count, unit.blocks);
    return memory + (before + width * panels.start(panel)) * kBlockSide * term_bytes;
  }

  // A stage: calls `pack(panel, block, count)` for all of them.
  template <class Pack>
  void fill(const Shape& shape, int64_t chunk, Crew::Member& member, Pack pack) const {
    member.each(panels.count, [&](int64_t panel) {
      for (int64_t block = 0; block < shape.blocks; block += chunk) {
        pack(panel, block, least(chunk, shape.blocks - block));
      }
    });
  }
};

// Tasks: a few groups of strips, those that a tile takes at once; times stretches of panels where there are few groups.
struct Cut {
  int64_t group_strips, groups, groups_per_task, splits, panels_per_split;

  // `term_bytes` are those of a term in a panel.
  Cut(const Shape& shape, const ProductKernels& kernels, const Panels& panels, int64_t term_bytes, int threads);

  int64_t tasks() const { return ceil_of(groups, groups_per_task) * splits; }
};

// The exponents of the whole weight, for sums along its rows.
struct GroupExponents {
  uint8_t* gathered;
  int8_t* lowest;
  int8_t* highest;
};

// Two stages.
void gather_all(const ProductKernels& kernels, Crew::Member& member, const Weight& w, const GroupExponents& into);

// Finds the exponents of `strips` strips (fewer at the end) and the floors of their rows (or groups). Returns the
// largest spread. `exponents` has room for kMaxStrips strips, `floors` for kMaxLanes lanes.
int set_up(const ProductKernels& kernels, const Weight& w, const Shape& shape, const GroupExponents& all,
           int64_t first_strip, int64_t strips, uint8_t* exponents, int32_t* floors, DecodeSource& source);

// `source` cut down to a stretch of its blocks.
DecodeSource chunk_of(const DecodeSource& source, int64_t first, int64_t count);

struct Result {
  void* out;
  int64_t stride;
  Dtype dtype;

  void* at(int64_t row, int64_t column) const {
    return static_cast<char*>(out) + (row * stride + column) * dtype_size(dtype);
  }

  // Before `rows` of it are written. Returns whether to write past the caches.
  bool prepare(int64_t rows) const;
};

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

  // How the sums of rows from `row` on become results.
  Finish finish(const Result& to, int64_t row, const int32_t* offset, const float* row_scale, bool has_bias,
                bool past) const {
    return {offset, row_scale, scale, has_bias ? bias : nullptr, count, to.at(row, first), to.stride, to.dtype, past};
  }
};

// A group of strips: what is decoded, and what its sums are multiplied with.
struct StripGroup {
  alignas(64) int32_t floors[kMaxLanes];
  DecodeSource source;
  int spread;  // largest difference of exponents
  Columns columns;

  StripGroup(const ProductKernels& kernels, const Weight& w, const Shape& shape, const GroupExponents& all,
             int64_t first_strip, int64_t strips, uint8_t* exponents, const float* bias)
      : spread(set_up(kernels, w, shape, all, first_strip, strips, exponents, floors, source)),
        columns(shape, source, first_strip, bias) {}
  StripGroup(const StripGroup&) = delete;
  StripGroup& operator=(const StripGroup&) = delete;
};

// While it is there, the thread may use a matrix unit.
class InUse {
 public:
  explicit InUse(const MatrixUnit& unit) : end_(unit.end) {
    if (unit.begin != nullptr) unit.begin();
  }
  ~InUse() {
    if (end_ != nullptr) end_();
  }
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;

 private:
  void (*end_)();
};

// The memory of one worker.
struct Bench {
  uint8_t* exponents;     // kMaxStrips strips of each group
  int64_t exponent_size;  // bytes of a group
  void* weights;          // a decoded chunk
  void* sums;             // 32 bits each, kKeptSums a group
  int64_t* wide;          // of some rows
};

class Benches {
 public:
  Benches(int threads, const Weight& w, int64_t groups, int64_t weight_bytes, int64_t wide_rows);

  size_t bytes() const { return static_cast<size_t>(threads_) * bytes_each_; }
  void place(Workspace& space) { memory_ = space.take<char>(static_cast<int64_t>(bytes())); }
  Bench of(int worker) const;

 private:
  int threads_;
  int64_t exponent_size_;
  size_t exponents_, weights_, sums_, wide_, bytes_each_;
  char* memory_ = nullptr;
};

// The groups of strips of a task, and its panels.
class Task {
 public:
  Task(const ProductKernels& kernels, const Weight& w, const Shape& shape, const GroupExponents& all, const Cut& cut,
       const Panels& panels, int64_t index, const Bench& bench, const float* bias)
      : first_(index % cut.splits * cut.panels_per_split), stop_(least(panels.count, first_ + cut.panels_per_split)) {
    const int64_t start = index / cut.splits * cut.groups_per_task;
    count_ = least(cut.groups_per_task, cut.groups - start);
    for (int64_t i = 0; i < count_; ++i) {
      groups_[i].emplace(kernels, w, shape, all, (start + i) * cut.group_strips, cut.group_strips,
                         bench.exponents + i * bench.exponent_size, bias);
    }
  }

  int64_t count() const { return count_; }
  int64_t first_panel() const { return first_; }
  int64_t stop_panel() const { return stop_; }
  const StripGroup& group(int64_t i) const { return *groups_[i]; }

  // Sums over all blocks, a chunk at a time: for every chunk and each group `decode(group index, group, first block,
  // count)`, then for every panel `tile(group index, group, panel, first block, count, sums)`, which overwrites the sums
  // from block 0 on, and `finish(group index, group, panel, sums)` after the last chunk. Leaves out groups for which
  // `takes(group)` is false.
  template <class T, class Takes, class Decode, class Tile, class Finish>
  void sweep(const Shape& shape, const Panels& panels, int64_t chunk, T* all_sums, Takes takes, Decode decode,
             Tile tile, Finish finish) const {
    const int64_t stretch = panels.among(kKeptRows);
    // Sums of a single chunk are finished before the next begin, and all lie in the same place.
    const bool kept = chunk < shape.blocks;
    for (int64_t first = first_; first < stop_; first += stretch) {
      const int64_t stop = least(stop_, first + stretch);
      for (int64_t block = 0; block < shape.blocks; block += chunk) {
        const int64_t count = least(chunk, shape.blocks - block);
        for (int64_t i = 0; i < count_; ++i) {
          const StripGroup& strips = group(i);
          if (!takes(strips)) continue;
          decode(i, strips, block, count);
          for (int64_t p = first; p < stop; ++p) {
            const int64_t row = panels.start(p) - panels.start(first);
            T* const sums = kept ? all_sums + i * kKeptSums + row * strips.columns.lanes : all_sums;
            tile(i, strips, p, block, count, sums);
            if (block + count == shape.blocks) finish(i, strips, p, sums);
          }
        }
      }
    }
  }

 private:
  int64_t first_, stop_, count_;
  std::optional<StripGroup> groups_[kKeptGroups];
};

// linear_int8 for a few rows: every block of the weight is read once, in the order in which they lie. Returns the
// largest spread; unless the sums of such exponents fit in 32 bits, the result is undefined.
int few_rows_product(const ProductKernels& kernels, int threads, const Weight& w, const Shape& shape, const int8_t* x,
                     const float* row_scale, const float* bias, const Result& result);

}  // namespace arb
