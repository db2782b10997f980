// Products of float operands, summed in float32.
#include <cstring>

#include "product_driver.h"
#include "product_plan.h"
#include "threads.h"

namespace arb {

namespace {

// Blocks whose weights are decoded at a time: 64 KiB.
constexpr int64_t kChunkBlocks = 32;

void float_product(const ProductKernels& kernels, int threads, const Weight& w, const Shape& shape, const void* x,
                   Dtype x_dtype, const float* bias, const Result& result) {
  threads = shape.threads(threads);
  const Panels panels(shape.m, kernels.rows_float);
  const Cut cut(shape, kernels, panels, threads);
  const int64_t chunk = least(shape.blocks, kChunkBlocks);
  const int64_t terms = shape.blocks * kBlockSide;
  const int64_t all_exponents = shape.along_rows ? shape.blocks * exponent_bytes(w.groups) : 0;
  Benches benches(threads, w, chunk * kBlockSide * kMaxLanes * 4, 0);

  Workspace& space = workspace();
  space.reserve(Workspace::padded(shape.m * terms * 4) + Workspace::padded(all_exponents) +
                2 * Workspace::padded(w.groups) + benches.bytes());
  float* const packed_rows = space.take<float>(shape.m * terms);
  const GroupExponents all{space.take<uint8_t>(all_exponents), space.take<int8_t>(w.groups),
                           space.take<int8_t>(w.groups)};
  benches.place(space);
  if (shape.along_rows) gather_all(kernels, threads, w, all);
  auto pack = [&](int64_t p, int) {
    const void* const from = static_cast<const char*>(x) + panels.start(p) * shape.terms * dtype_size(x_dtype);
    kernels.pack_float(from, x_dtype, shape.terms, panels.rows(p), shape.terms, terms,
                       packed_rows + panels.start(p) * terms);
  };
  parallel_tasks(panels.count, threads, pack);

  auto task = [&](int64_t index, int worker) {
    const int64_t first_strip = index / cut.splits * kernels.strips, split = index % cut.splits;
    const Bench bench = benches.of(worker);
    float* const weights = static_cast<float*>(bench.weights);
    float* const sums = static_cast<float*>(bench.sums);
    alignas(64) int32_t floors[kMaxLanes];
    DecodeSource source;
    set_up(kernels, w, shape, all, first_strip, kernels.strips, bench.exponents, floors, source);
    const Columns columns(shape, source, first_strip, bias);
    const int64_t last = least(panels.count, (split + 1) * cut.panels_per_split);
    const int64_t step = kKeptRows / kMaxPanelRows;
    for (int64_t first = split * cut.panels_per_split; first < last; first += step) {
      const int64_t stop = least(last, first + step);
      for (int64_t block = 0; block < shape.blocks; block += chunk) {
        const int64_t count = least(chunk, shape.blocks - block);
        kernels.decode_float(chunk_of(source, block, count), shape.along_rows, weights);
        for (int64_t p = first; p < stop; ++p) {
          const int64_t row = panels.start(p), rows = panels.rows(p);
          float* const acc = sums + (row - panels.start(first)) * columns.lanes;
          if (block == 0) std::memset(acc, 0, static_cast<size_t>(rows * columns.lanes) * sizeof(float));
          kernels.tile_float(rows, count * kBlockSide, packed_rows + row * terms + block * kBlockSide * rows, weights,
                             source.strips, acc);
          if (block + count == shape.blocks) {
            kernels.finish_float(acc, rows, columns.lanes, columns.count, bias == nullptr ? nullptr : columns.bias,
                                 result.at(row, columns.first), result.stride, result.dtype);
          }
        }
      }
    }
  };
  parallel_tasks(cut.tasks(), threads, task);
  space.release();
}

}  // namespace

void linear_float(const ProductKernels& kernels, int threads, const Weight& weight, const void* x, Dtype x_dtype,
                  int64_t m, const float* bias, void* out, Dtype dtype) {
  const Shape shape(weight, false, m);
  float_product(kernels, threads, weight, shape, x, x_dtype, bias, {out, shape.outputs, dtype});
}

void grad_input_float(const ProductKernels& kernels, int threads, const Weight& weight, const void* grad,
                      Dtype grad_dtype, int64_t m, void* out, Dtype dtype) {
  const Shape shape(weight, true, m);
  float_product(kernels, threads, weight, shape, grad, grad_dtype, nullptr, {out, shape.outputs, dtype});
}

}  // namespace arb
