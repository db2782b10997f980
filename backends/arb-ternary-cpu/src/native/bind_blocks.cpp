// Bindings of what lies between the products of a block: addresses and sizes that the Python side has checked, 0 for
// none. Rows in pieces are their address, their heads, features and length, and three strides in elements.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>

#include "bind.h"
#include "blocks.h"

namespace nb = nanobind;

namespace {

using Six = std::array<int64_t, 6>;
using Two = std::array<Address, 2>;

// Gains, and where their gradients go.
arb::Gain gain_of(const Two& gain) { return {at<const float>(gain[0]), at<float>(gain[1])}; }

arb::HeadRows rows_of(Address memory, const Six& n) { return {at<void>(memory), n[0], n[1], n[2], n[3], n[4], n[5]}; }

}  // namespace

void bind_blocks(nb::module_& m) {
  const nb::call_guard<nb::gil_scoped_release> unlocked;
  m.def(
      "normalise_quantize",
      [](int isa, int threads, Address x, const Six& sizes, int dtype, int64_t rows, float eps, Address gain, Address q,
         Address scale, Address r) {
        arb::normalise_quantize({isa, threads}, rows_of(x, sizes), dtype_of(dtype), rows, eps, at<const float>(gain),
                                at<int8_t>(q), at<float>(scale), at<float>(r));
      },
      unlocked);
  m.def(
      "normalise_back",
      [](int isa, int threads, Address first, Address second, Address third, Address x, const Six& sizes, Address r,
         const Two& gain, int dtype, int64_t rows, Address out, const Six& out_sizes) {
        const void* const grads[3] = {at<const void>(first), at<const void>(second), at<const void>(third)};
        arb::normalise_back({isa, threads}, grads, rows_of(x, sizes), at<const float>(r), gain_of(gain),
                            dtype_of(dtype), rows, rows_of(out, out_sizes));
      },
      unlocked);
  m.def(
      "activate_quantize",
      [](int isa, int threads, int kind, Address gate, Address up, int dtype, int64_t rows, int64_t columns, float eps,
         Address gain, Address q, Address scale, Address r) {
        arb::activate_quantize({isa, threads}, static_cast<arb::Activation>(kind), at<const void>(gate),
                               at<const void>(up), dtype_of(dtype), rows, columns, eps, at<const float>(gain),
                               at<int8_t>(q), at<float>(scale), at<float>(r));
      },
      unlocked);
  m.def(
      "activate_back",
      [](int isa, int threads, int kind, Address grad, Address gate, Address up, Address r, const Two& gain, int dtype,
         int64_t rows, int64_t columns, Address grad_gate, Address grad_up) {
        arb::activate_back({isa, threads}, static_cast<arb::Activation>(kind), at<const void>(grad),
                           at<const void>(gate), at<const void>(up), at<const float>(r), gain_of(gain),
                           dtype_of(dtype), rows, columns, at<void>(grad_gate), at<void>(grad_up));
      },
      unlocked);
  m.def(
      "scale_columns_back",
      [](int isa, int threads, Address grad, Address x, const Two& factor, int dtype, int64_t rows, int64_t columns,
         Address out) {
        arb::scale_columns_back({isa, threads}, at<const void>(grad), at<const void>(x), gain_of(factor),
                                dtype_of(dtype), rows, columns, at<void>(out));
      },
      unlocked);
  m.def(
      "turn_heads",
      [](int isa, int threads, Address x, int dtype, int64_t rows, Address y, const Six& sizes, Address cos,
         Address sin, float eps, Address gain, Address r) {
        arb::turn_heads({isa, threads}, at<const void>(x), dtype_of(dtype), rows, rows_of(y, sizes),
                        at<const float>(cos), at<const float>(sin), eps, at<const float>(gain), at<float>(r));
      },
      unlocked);
  m.def(
      "turn_heads_back",
      [](int isa, int threads, Address grad, const Six& sizes, Address x, int dtype, int64_t rows, Address cos,
         Address sin, Address r, const Two& gain, Address out) {
        arb::turn_heads_back({isa, threads}, rows_of(grad, sizes), at<const void>(x), dtype_of(dtype), rows,
                             at<const float>(cos), at<const float>(sin), at<const float>(r), gain_of(gain),
                             at<void>(out));
      },
      unlocked);
  m.def(
      "quantize_both",
      [](int isa, int threads, Address grad, int dtype, int64_t rows, int64_t columns, Address row_scale, uint64_t seed,
         uint64_t step, uint64_t stream, uint64_t folded_stream, Address q, Address folded, Address scales) {
        arb::quantize_both({isa, threads}, at<const void>(grad), dtype_of(dtype), rows, columns,
                           at<const float>(row_scale), {seed, step, stream}, {seed, step, folded_stream},
                           at<int8_t>(q), at<int8_t>(folded), at<float>(scales));
      },
      unlocked);
}
