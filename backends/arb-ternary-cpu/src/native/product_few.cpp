// Products with so few rows that reading the weight is what takes the time.
#include <atomic>

#include "product_plan.h"
#include "threads.h"

namespace arb {

namespace {

// Strips of a task: enough that the next ones are being fetched while it works, few enough to share them out evenly.
constexpr int64_t kMostStrips = 32;
constexpr int64_t kTasksPerThread = 8;

}  // namespace

int few_rows_product(const ProductKernels& kernels, int threads, const Weight& w, const Shape& shape, const int8_t* x,
                     const float* row_scale, const float* bias, const Result& result) {
  threads = shape.threads(threads);
  const Panels panels(shape.m, kernels.few_rows);
  const int64_t steps = shape.blocks * kStepsPerBlock;
  const int64_t strips_per_task = most(1, least(kMostStrips, shape.strips / (kTasksPerThread * threads)));
  Benches benches(threads, w, 1, 0, 0);

  Workspace& space = workspace();
  space.reserve(Workspace::padded(shape.m * steps * 4) + Workspace::padded(shape.m * w.groups * 4) + benches.bytes());
  uint8_t* const rows = space.take<uint8_t>(shape.m * steps * 4);
  int32_t* const sums = space.take<int32_t>(shape.m * w.groups);
  benches.place(space);
  for (int64_t p = 0; p < panels.count; ++p) {
    kernels.int8.pack(x + panels.start(p) * shape.terms, shape.terms, panels.rows(p), shape.terms, steps, 0,
                      rows + panels.start(p) * steps * 4);
  }
  for (int64_t i = 0; i < shape.m; ++i) {
    kernels.sum_groups(x + i * shape.terms, shape.terms, shape.blocks_per_group * kBlockSide, sums + i * w.groups);
  }

  std::atomic<int> largest{0};
  auto task = [&](int64_t index, int worker) {
    const Bench bench = benches.of(worker);
    alignas(64) int32_t floors[kMaxLanes];
    alignas(64) int32_t acc[kMaxPanelRows * kBlockSide];
    alignas(64) const int32_t none[kBlockSide] = {};
    for (int64_t strip = index * strips_per_task; strip < least(shape.strips, (index + 1) * strips_per_task); ++strip) {
      DecodeSource source;
      raise_to(largest, set_up(kernels, w, shape, {}, strip, 1, bench.exponents, floors, source));
      const Columns columns(shape, source, strip, bias);
      for (int64_t p = 0; p < panels.count; ++p) {
        const int64_t row = panels.start(p);
        kernels.few_int8(panels.rows(p), source, rows + row * steps * 4, sums + row * w.groups, acc);
        kernels.finish_int8(acc, none, panels.rows(p), kBlockSide, columns.count, row_scale + row, columns.scale,
                            bias == nullptr ? nullptr : columns.bias, result.at(row, columns.first), result.stride,
                            result.dtype, false);
      }
    }
  };
  parallel_tasks(ceil_of(shape.strips, strips_per_task), threads, task);
  space.release();
  return largest.load();
}

}  // namespace arb
