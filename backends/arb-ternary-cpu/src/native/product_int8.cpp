// Products of int8 operands, exact.
#include <atomic>
#include <cstring>

#include "product_driver.h"
#include "product_plan.h"

namespace arb {

namespace {

// Rows, as a multiple of those that few_int8 takes, up to which decoding the weight again is faster than to store it.
constexpr int64_t kFewPanels = 2;
// For a matrix unit a tile of few rows costs as much as one of sixteen, but so much less than a second pass that with
// weights of at least so many trits, where setting up its operands is no longer what counts, one pass is the limit.
constexpr int64_t kUnitTrits = int64_t{1} << 19;
// Rows whose sums are kept while bands of exponents pass.
constexpr int64_t kWideRows = 64;

// Everything that the tasks of an integer product share.
struct IntegerProduct {
  const ProductKernels& kernels;
  const Int8Loops& loops;
  const Shape& shape;
  const Panels& panels;
  const PackedRows& packed;
  const float* row_scale;
  const float* bias;
  Result result;
  bool past;  // the caches, when the result is written
  int64_t chunk_blocks;

  void tile(int64_t p, int64_t block, int64_t count, const int8_t* weights, int64_t strips, int spread,
            bool fresh, int32_t* acc) const {
    const auto* const rows = reinterpret_cast<const uint8_t*>(packed.at(p, block, count));
    loops.tile(panels.rows(p), count * kStepsPerBlock, rows, 4 * panels.rows(p), weights, strips, spread, fresh, acc);
  }

  bool in_32_bits(const StripGroup& group) const {
    return group.spread < kBandBits && fits_in_32_bits(group.spread, shape.terms);
  }

  // Sums in 32 bits.
  void narrow(const Task& task, const Bench& bench) const {
    alignas(64) int32_t offsets[kKeptGroups][kMaxLanes];
    int8_t* const weights = static_cast<int8_t*>(bench.weights);
    // What a single chunk sums up becomes results before it leaves the registers.
    const bool at_once = loops.tile_finish != nullptr && chunk_blocks == shape.blocks;
    task.sweep(
        shape, panels, chunk_blocks, static_cast<int32_t*>(bench.sums),
        [&](const StripGroup& group) { return in_32_bits(group); },
        [&](int64_t i, const StripGroup& group, int64_t block, int64_t count) {
          if (block == 0) std::memset(offsets[i], 0, sizeof offsets[i]);
          loops.decode(chunk_of(group.source, block, count), shape.along_rows, 0, weights, offsets[i]);
        },
        [&](int64_t i, const StripGroup& group, int64_t p, int64_t block, int64_t count, int32_t* acc) {
          if (at_once) {
            const auto* const rows = reinterpret_cast<const uint8_t*>(packed.at(p, block, count));
            const int64_t row = panels.start(p);
            loops.tile_finish(panels.rows(p), count * kStepsPerBlock, rows, 4 * panels.rows(p), weights,
                              group.source.strips, group.spread, acc,
                              group.columns.finish(result, row, offsets[i], row_scale + row, bias != nullptr, past));
            return;
          }
          tile(p, block, count, weights, group.source.strips, group.spread, block == 0, acc);
        },
        [&](int64_t i, const StripGroup& group, int64_t p, const int32_t* acc) {
          if (at_once) return;
          const Columns& columns = group.columns;
          const int64_t row = panels.start(p);
          kernels.finish_int8(acc, offsets[i], panels.rows(p), columns.lanes, columns.count, row_scale + row,
                              columns.scale, bias == nullptr ? nullptr : columns.bias, result.at(row, columns.first),
                              result.stride, result.dtype, past);
        });
  }

  // Sums in 64 bits, one band of exponents after another; the panels have at most kWideRows rows.
  void wide(const StripGroup& group, int64_t first, int64_t stop, const Bench& bench) const {
    const DecodeSource& source = group.source;
    const Columns& columns = group.columns;
    int8_t* const weights = static_cast<int8_t*>(bench.weights);
    const int64_t start = panels.start(first);
    const int64_t all = (panels.start(stop - 1) + panels.rows(stop - 1) - start) * columns.lanes;
    std::memset(bench.wide, 0, static_cast<size_t>(all) * sizeof(int64_t));
    alignas(64) int32_t acc[kMaxPanelRows * kMaxLanes];
    for (int64_t block = 0; block < shape.blocks; block += chunk_blocks) {
      const int64_t count = least(chunk_blocks, shape.blocks - block);
      for (int band = 0; band * kBandBits <= group.spread; ++band) {
        alignas(64) int32_t offset[kMaxLanes] = {};
        loops.decode(chunk_of(source, block, count), shape.along_rows, band, weights, offset);
        for (int64_t p = first; p < stop; ++p) {
          const int64_t rows = panels.rows(p);
          tile(p, block, count, weights, source.strips, kBandBits - 1, true, acc);
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
                           result.at(row, columns.first), result.stride, result.dtype, past);
    }
  }

  void run(const Task& task, const Bench& bench) const {
    narrow(task, bench);
    const int64_t stretch = panels.among(kWideRows);
    for (int64_t i = 0; i < task.count(); ++i) {
      if (in_32_bits(task.group(i))) continue;
      for (int64_t p = task.first_panel(); p < task.stop_panel(); p += stretch) {
        wide(task.group(i), p, least(task.stop_panel(), p + stretch), bench);
      }
    }
  }
};

int integer_product(const ProductKernels& kernels, int threads, const Weight& w, const Shape& shape, const int8_t* x,
                    const float* row_scale, float scale, const float* bias, const Result& result) {
  threads = shape.threads(threads);
  const bool past = result.prepare(shape.m);
  const Int8Loops& loops = kernels.int8_unit.rows != 0 ? kernels.int8_unit : kernels.int8;
  const MatrixUnit& unit = loops.unit;
  const Panels panels(shape.m, loops.rows, unit);
  const Cut cut(shape, kernels, panels, 1, threads);
  const int64_t block_bytes = kBlockSide * kBlockSide * kernels.strips;
  const int64_t chunk = least(shape.blocks, kChunkBytes / block_bytes);
  const int64_t panel_bytes = PackedRows::bytes(shape, unit, 1);
  const int64_t all_exponents = shape.along_rows ? shape.blocks * exponent_bytes(w.groups) : 0;
  Benches benches(threads, w, cut.groups_per_task, round_up(chunk, unit.blocks) * block_bytes, kWideRows);

  Workspace& space = workspace();
  space.reserve(Workspace::padded(panel_bytes) + Workspace::padded(all_exponents) + 2 * Workspace::padded(w.groups) +
                Workspace::padded(shape.m * 4) + benches.bytes());
  const PackedRows packed{space.take<char>(panel_bytes), panels, unit, 1};
  const GroupExponents all{space.take<uint8_t>(all_exponents), space.take<int8_t>(w.groups),
                           space.take<int8_t>(w.groups)};
  float* const same_scale = space.take<float>(shape.m);
  benches.place(space);

  std::atomic<int> largest{0};
  if (row_scale == nullptr) {
    for (int64_t i = 0; i < shape.m; ++i) same_scale[i] = scale;
    row_scale = same_scale;
  }
  const IntegerProduct product{kernels, loops, shape, panels, packed, row_scale, bias, result, past, chunk};
  const auto pack = [&](int64_t p, int64_t block, int64_t count) {
    const int64_t first = block * kBlockSide, some = least(count * kBlockSide, shape.terms - first);
    loops.pack(x + panels.start(p) * shape.terms + first, shape.terms, panels.rows(p), some, count * kStepsPerBlock,
               loops.flip, reinterpret_cast<uint8_t*>(packed.at(p, block, count)));
  };
  const auto run = [&](int64_t index, int worker) {
    const InUse in_use(unit);
    const Bench bench = benches.of(worker);
    const Task task(kernels, w, shape, all, cut, panels, index, bench, bias);
    int spread = 0;
    for (int64_t i = 0; i < task.count(); ++i) spread = task.group(i).spread > spread ? task.group(i).spread : spread;
    raise_to(largest, spread);
    if (spread <= kLargestSpread) product.run(task, bench);
  };
  Crew crew(threads);
  crew.work([&](Crew::Member& member, int worker) {
    if (shape.along_rows) {
      gather_all(kernels, member, w, all);
      // Everybody finds the same, and goes on or not.
      for (int64_t g = 0; g < w.groups; ++g) raise_to(largest, all.highest[g] - all.lowest[g]);
      if (largest.load() > kLargestSpread) return;
    }
    packed.fill(shape, chunk, member, pack);
    member.each(cut.tasks(), [&](int64_t index) { run(index, worker); });
  });
  space.release();
  return largest.load();
}

}  // namespace

int linear_int8(const ProductKernels& kernels, int threads, const Weight& weight, const int8_t* x, const float* scale,
                int64_t m, const float* bias, void* out, Dtype dtype) {
  const Shape shape(weight, false, m);
  const bool by_unit = kernels.int8_unit.rows != 0 && shape.outputs * shape.terms >= kUnitTrits;
  if (m <= (by_unit ? 1 : kFewPanels) * kernels.few_rows) {
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
