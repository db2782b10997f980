// Products of int8 operands, exact.
#include <atomic>
#include <cstring>

#include "product_driver.h"
#include "product_plan.h"
#include "threads.h"

namespace arb {

namespace {

// Blocks whose weights are decoded at a time: 512 KiB at most, which a second-level cache holds. Where few rows use
// them, they are few enough to stay in the first-level cache.
constexpr int64_t kChunkBlocks = 1024;
constexpr int64_t kSmallChunkBlocks = 32;
constexpr int64_t kSmallRows = 32;
// Rows, as a multiple of those that few_int8 takes, up to which decoding the weight again is faster than to store it.
constexpr int64_t kFewPanels = 2;
// Rows whose sums are kept while bands of exponents pass.
constexpr int64_t kWideRows = 64;

// Everything that the tasks of an integer product share.
struct IntegerProduct {
  const ProductKernels& kernels;
  const Shape& shape;
  const Panels& panels;
  const uint8_t* packed_rows;
  const float* row_scale;
  const float* bias;
  Result result;
  int64_t chunk_blocks;

  int64_t steps() const { return shape.blocks * kStepsPerBlock; }

  const uint8_t* panel(int64_t index, int64_t first_block) const {
    return packed_rows + panels.start(index) * steps() * 4 + first_block * kStepsPerBlock * panels.rows(index) * 4;
  }

  // Sums in 32 bits. Panels from `first` to `stop` have at most kKeptRows rows, unless one chunk holds all blocks.
  void narrow(const DecodeSource& source, const Columns& columns, int64_t first, int64_t stop,
              const Bench& bench) const {
    alignas(64) int32_t offset[kMaxLanes] = {};
    int8_t* const weights = static_cast<int8_t*>(bench.weights);
    int32_t* const sums = static_cast<int32_t*>(bench.sums);
    const bool single = shape.blocks <= chunk_blocks;
    for (int64_t block = 0; block < shape.blocks; block += chunk_blocks) {
      const int64_t count = least(chunk_blocks, shape.blocks - block);
      kernels.decode_int8(chunk_of(source, block, count), shape.along_rows, 0, weights, offset);
      for (int64_t p = first; p < stop; ++p) {
        const int64_t rows = panels.rows(p);
        int32_t* const acc = single ? sums : sums + (panels.start(p) - panels.start(first)) * columns.lanes;
        if (block == 0) std::memset(acc, 0, static_cast<size_t>(rows * columns.lanes) * sizeof(int32_t));
        kernels.tile_int8(rows, count * kStepsPerBlock, panel(p, block), weights, source.strips, acc);
        if (block + count == shape.blocks) {
          const int64_t row = panels.start(p);
          kernels.finish_int8(acc, offset, rows, columns.lanes, columns.count, row_scale + row, columns.scale,
                              bias == nullptr ? nullptr : columns.bias, result.at(row, columns.first), result.stride,
                              result.dtype);
        }
      }
    }
  }

  // Sums in 64 bits, one band of exponents after another; the panels have at most kWideRows rows.
  void wide(const DecodeSource& source, const Columns& columns, int spread, int64_t first, int64_t stop,
            const Bench& bench) const {
    int8_t* const weights = static_cast<int8_t*>(bench.weights);
    const int64_t start = panels.start(first);
    const int64_t all = (panels.start(stop - 1) + panels.rows(stop - 1) - start) * columns.lanes;
    std::memset(bench.wide, 0, static_cast<size_t>(all) * sizeof(int64_t));
    alignas(64) int32_t acc[kMaxPanelRows * kMaxLanes];
    for (int64_t block = 0; block < shape.blocks; block += chunk_blocks) {
      const int64_t count = least(chunk_blocks, shape.blocks - block);
      for (int band = 0; band * kBandBits <= spread; ++band) {
        alignas(64) int32_t offset[kMaxLanes] = {};
        kernels.decode_int8(chunk_of(source, block, count), shape.along_rows, band, weights, offset);
        for (int64_t p = first; p < stop; ++p) {
          const int64_t rows = panels.rows(p);
          std::memset(acc, 0, static_cast<size_t>(rows * columns.lanes) * sizeof(int32_t));
          kernels.tile_int8(rows, count * kStepsPerBlock, panel(p, block), weights, source.strips, acc);
          int64_t* const total = bench.wide + (panels.start(p) - start) * columns.lanes;
          for (int64_t i = 0; i < rows * columns.lanes; ++i) {
            const uint32_t sum = static_cast<uint32_t>(acc[i]) - static_cast<uint32_t>(offset[i % columns.lanes]);
            total[i] += static_cast<int64_t>(static_cast<int32_t>(sum)) * (int64_t{1} << band * kBandBits);
          }
        }
      }
    }
    for (int64_t p = first; p < stop; ++p) {
      const int64_t row = panels.start(p);
      const int64_t* const total = bench.wide + (row - start) * columns.lanes;
      alignas(64) float y[kMaxPanelRows * kMaxLanes];
      for (int64_t i = 0; i < panels.rows(p) * columns.lanes; ++i) {
        y[i] = static_cast<float>(total[i]) * row_scale[row + i / columns.lanes] * columns.scale[i % columns.lanes];
      }
      kernels.finish_float(y, panels.rows(p), columns.lanes, columns.count, bias == nullptr ? nullptr : columns.bias,
                           result.at(row, columns.first), result.stride, result.dtype);
    }
  }

  void task(const DecodeSource& source, const Columns& columns, int spread, int64_t first, int64_t stop,
            const Bench& bench) const {
    const bool in_32_bits = spread < kBandBits && fits_in_32_bits(spread, shape.terms);
    int64_t stretch = kWideRows / kMaxPanelRows;
    if (in_32_bits) stretch = shape.blocks <= chunk_blocks ? stop - first : kKeptRows / kMaxPanelRows;
    for (int64_t p = first; p < stop; p += stretch) {
      const int64_t end = least(stop, p + stretch);
      if (in_32_bits) {
        narrow(source, columns, p, end, bench);
      } else {
        wide(source, columns, spread, p, end, bench);
      }
    }
  }
};

int integer_product(const ProductKernels& kernels, int threads, const Weight& w, const Shape& shape, const int8_t* x,
                    const float* row_scale, float scale, const float* bias, const Result& result) {
  threads = shape.threads(threads);
  const Panels panels(shape.m, kernels.rows);
  const Cut cut(shape, kernels, panels, threads);
  const int64_t chunk = least(shape.blocks, shape.m <= kSmallRows ? kSmallChunkBlocks : kChunkBlocks);
  const int64_t steps = shape.blocks * kStepsPerBlock;
  const int64_t panel_bytes = shape.m * steps * 4;
  const int64_t all_exponents = shape.along_rows ? shape.blocks * exponent_bytes(w.groups) : 0;
  Benches benches(threads, w, chunk * kBlockSide * kBlockSide * kernels.strips, kWideRows);

  Workspace& space = workspace();
  space.reserve(Workspace::padded(panel_bytes) + Workspace::padded(all_exponents) + 2 * Workspace::padded(w.groups) +
                Workspace::padded(shape.m * 4) + benches.bytes());
  uint8_t* const packed_rows = space.take<uint8_t>(panel_bytes);
  const GroupExponents all{space.take<uint8_t>(all_exponents), space.take<int8_t>(w.groups),
                           space.take<int8_t>(w.groups)};
  float* const same_scale = space.take<float>(shape.m);
  benches.place(space);

  std::atomic<int> largest{0};
  if (shape.along_rows) {
    gather_all(kernels, threads, w, all);
    for (int64_t g = 0; g < w.groups; ++g) raise_to(largest, all.highest[g] - all.lowest[g]);
    if (largest.load() > kLargestSpread) return largest.load();
  }
  if (row_scale == nullptr) {
    for (int64_t i = 0; i < shape.m; ++i) same_scale[i] = scale;
    row_scale = same_scale;
  }
  auto pack = [&](int64_t p, int) {
    kernels.pack_int8(x + panels.start(p) * shape.terms, shape.terms, panels.rows(p), shape.terms, steps, kernels.flip,
                      packed_rows + panels.start(p) * steps * 4);
  };
  parallel_tasks(panels.count, threads, pack);

  const IntegerProduct product{kernels, shape, panels, packed_rows, row_scale, bias, result, chunk};
  auto task = [&](int64_t index, int worker) {
    const int64_t first_strip = index / cut.splits * kernels.strips, split = index % cut.splits;
    const Bench bench = benches.of(worker);
    alignas(64) int32_t floors[kMaxLanes];
    DecodeSource source;
    const int spread = set_up(kernels, w, shape, all, first_strip, kernels.strips, bench.exponents, floors, source);
    raise_to(largest, spread);
    if (spread > kLargestSpread) return;
    const Columns columns(shape, source, first_strip, bias);
    const int64_t first = split * cut.panels_per_split;
    product.task(source, columns, spread, first, least(panels.count, first + cut.panels_per_split), bench);
  };
  parallel_tasks(cut.tasks(), threads, task);
  space.release();
  return largest.load();
}

}  // namespace

int linear_int8(const ProductKernels& kernels, int threads, const Weight& weight, const int8_t* x, const float* scale,
                int64_t m, const float* bias, void* out, Dtype dtype) {
  const Shape shape(weight, false, m);
  if (m <= kFewPanels * kernels.few_rows) {
    const int spread = few_rows_product(kernels, threads, weight, shape, x, scale, bias, {out, shape.outputs, dtype});
    if (fits_in_32_bits(spread, shape.terms)) return spread;
  }
  return integer_product(kernels, threads, weight, shape, x, scale, 0.0f, bias, {out, shape.outputs, dtype});
}

int grad_input_int8(const ProductKernels& kernels, int threads, const Weight& weight, const int8_t* grad, float scale,
                    int64_t m, void* out, Dtype dtype) {
  const Shape shape(weight, true, m);
  return integer_product(kernels, threads, weight, shape, grad, nullptr, scale, nullptr, {out, shape.outputs, dtype});
}

}  // namespace arb
