// Products of float operands, summed in float32.
#include "product_driver.h"
#include "product_plan.h"

namespace arb {

namespace {

void float_product(const ProductKernels& kernels, int threads, const Weight& w, const Shape& shape, const void* x,
                   Dtype x_dtype, const float* bias, const Result& result) {
  // Products of two bfloat16 are exact in float32, so that there is nothing to be gained by widening them first.
  const bool as_is = x_dtype == Dtype::bfloat16 && kernels.bfloat16.rows != 0;
  const FloatLoops& loops = as_is ? kernels.bfloat16 : kernels.float32;
  threads = shape.threads(threads);
  const bool past = result.prepare(shape.m);
  const MatrixUnit& unit = loops.unit;
  const Panels panels(shape.m, loops.rows, unit);
  const Cut cut(shape, kernels, panels, loops.term_bytes, threads);
  const int64_t block_bytes = kBlockSide * kMaxLanes * loops.term_bytes;
  const int64_t chunk = least(shape.blocks, kChunkBytes / block_bytes);
  const int64_t panel_bytes = PackedRows::bytes(shape, unit, loops.term_bytes);
  const int64_t all_exponents = shape.along_rows ? shape.blocks * exponent_bytes(w.groups) : 0;
  Benches benches(threads, w, cut.groups_per_task, round_up(chunk, unit.blocks) * block_bytes, 0);

  Workspace& space = workspace();
  space.reserve(Workspace::padded(panel_bytes) + Workspace::padded(all_exponents) +
                2 * Workspace::padded(w.groups) + benches.bytes());
  const PackedRows packed{space.take<char>(panel_bytes), panels, unit, loops.term_bytes};
  const GroupExponents all{space.take<uint8_t>(all_exponents), space.take<int8_t>(w.groups),
                           space.take<int8_t>(w.groups)};
  benches.place(space);
  const auto run = [&](int64_t index, int worker) {
    const InUse in_use(unit);
    const Bench bench = benches.of(worker);
    const Task task(kernels, w, shape, all, cut, panels, index, bench, bias);
    // What a single chunk sums up becomes results before it leaves the registers.
    const bool at_once = loops.tile_finish != nullptr && chunk == shape.blocks;
    task.sweep(
        shape, panels, chunk, static_cast<float*>(bench.sums), [](const StripGroup&) { return true; },
        [&](int64_t, const StripGroup& group, int64_t block, int64_t count) {
          loops.decode(chunk_of(group.source, block, count), shape.along_rows, bench.weights);
        },
        [&](int64_t, const StripGroup& group, int64_t p, int64_t block, int64_t count, float* acc) {
          if (at_once) {
            loops.tile_finish(panels.rows(p), count * kBlockSide, packed.at(p, block, count), bench.weights,
                              group.source.strips,
                              group.columns.finish(result, panels.start(p), nullptr, nullptr, bias != nullptr, past));
            return;
          }
          loops.tile(panels.rows(p), count * kBlockSide, packed.at(p, block, count), bench.weights, group.source.strips,
                     block == 0, acc);
        },
        [&](int64_t, const StripGroup& group, int64_t p, const float* acc) {
          if (at_once) return;
          const Columns& columns = group.columns;
          kernels.finish_float(acc, panels.rows(p), columns.lanes, columns.count,
                               bias == nullptr ? nullptr : columns.bias, result.at(panels.start(p), columns.first),
                               result.stride, result.dtype, past);
        });
  };
  const auto pack = [&](int64_t p, int64_t block, int64_t count) {
    const int64_t first = block * kBlockSide, some = least(count * kBlockSide, shape.terms - first);
    const char* const from =
        static_cast<const char*>(x) + (panels.start(p) * shape.terms + first) * dtype_size(x_dtype);
    loops.pack(from, x_dtype, shape.terms, panels.rows(p), some, count * kBlockSide, packed.at(p, block, count));
  };
  Crew crew(threads);
  crew.work([&](Crew::Member& member, int worker) {
    if (shape.along_rows) gather_all(kernels, member, w, all);
    packed.fill(shape, chunk, member, pack);
    member.each(cut.tasks(), [&](int64_t index) { run(index, worker); });
  });
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
