// Bindings of layout, quantisation, products and lookup. Tensors come as addresses and sizes: a call costs a fraction
// of what exchanging DLPack capsules does, which matters for small layers. The Python side has checked them.
#include <nanobind/nanobind.h>

#include "bind.h"
#include "product_driver.h"
#include "rows_driver.h"

namespace nb = nanobind;

void bind_products(nb::module_& m) {
  using arb::product_kernels;
  const nb::call_guard<nb::gil_scoped_release> unlocked;
  m.attr("largest_spread") = arb::kLargestSpread;

  m.def(
      "pack",
      [](int threads, Address trits, int64_t rows, int64_t columns, Address packed) {
        return arb::pack_trits(threads, at<const int8_t>(trits), rows, columns, at<uint8_t>(packed));
      },
      unlocked);
  m.def(
      "unpack",
      [](int threads, Address packed, int64_t rows, int64_t columns, Address trits) {
        arb::unpack_trits(threads, at<const uint8_t>(packed), rows, columns, at<int8_t>(trits));
      },
      unlocked);
  m.def(
      "quantize_rows",
      [](int isa, int threads, Address x, int dtype, int64_t rows, int64_t columns, Address q, Address scale) {
        arb::quantize_rows(product_kernels(isa), threads, at<const void>(x), dtype_of(dtype), rows, columns,
                           at<int8_t>(q), at<float>(scale));
      },
      unlocked);
  m.def(
      "norm_quantize_rows",
      [](int isa, int threads, Address x, int dtype, int64_t rows, int64_t columns, float eps, Address q,
         Address scale) {
        arb::norm_quantize_rows(product_kernels(isa), threads, at<const void>(x), dtype_of(dtype), rows, columns, eps,
                                at<int8_t>(q), at<float>(scale));
      },
      unlocked);
  m.def(
      "quantize_gradient",
      [](int isa, int threads, Address grad, int dtype, int64_t count, uint64_t seed, uint64_t step, uint64_t stream,
         Address q, Address scale) {
        *at<float>(scale) = arb::quantize_gradient(product_kernels(isa), threads, at<const void>(grad), dtype_of(dtype),
                                                   count, {seed, step, stream}, at<int8_t>(q));
      },
      unlocked);
  m.def(
      "linear_int8",
      [](int isa, int threads, Address x, Address scale, int64_t rows, Address packed, Address exponent, int64_t n,
         int64_t k, int64_t groups, int64_t group_size, Address bias, Address out, int dtype) {
        return arb::linear_int8(product_kernels(isa), threads, weight_of(packed, exponent, n, k, groups, group_size),
                                at<const int8_t>(x), at<const float>(scale), rows, at<const float>(bias), at<void>(out),
                                dtype_of(dtype));
      },
      unlocked);
  m.def(
      "linear_float",
      [](int isa, int threads, Address x, int x_dtype, int64_t rows, Address packed, Address exponent, int64_t n,
         int64_t k, int64_t groups, int64_t group_size, Address bias, Address out, int dtype) {
        arb::linear_float(product_kernels(isa), threads, weight_of(packed, exponent, n, k, groups, group_size),
                          at<const void>(x), dtype_of(x_dtype), rows, at<const float>(bias), at<void>(out),
                          dtype_of(dtype));
      },
      unlocked);
  m.def(
      "grad_input_int8",
      [](int isa, int threads, Address grad, Address scale, int64_t rows, Address packed, Address exponent, int64_t n,
         int64_t k, int64_t groups, int64_t group_size, Address out, int dtype) {
        return arb::grad_input_int8(product_kernels(isa), threads,
                                    weight_of(packed, exponent, n, k, groups, group_size), at<const int8_t>(grad),
                                    *at<const float>(scale), rows, at<void>(out), dtype_of(dtype));
      },
      unlocked);
  m.def(
      "grad_input_float",
      [](int isa, int threads, Address grad, int grad_dtype, int64_t rows, Address packed, Address exponent, int64_t n,
         int64_t k, int64_t groups, int64_t group_size, Address out, int dtype) {
        arb::grad_input_float(product_kernels(isa), threads, weight_of(packed, exponent, n, k, groups, group_size),
                              at<const void>(grad), dtype_of(grad_dtype), rows, at<void>(out), dtype_of(dtype));
      },
      unlocked);
  m.def(
      "lookup_rows",
      [](int isa, int threads, Address ids, int64_t count, Address packed, Address exponent, int64_t n, int64_t k,
         int64_t groups, int64_t group_size, Address out, int dtype) {
        return arb::lookup_rows(product_kernels(isa), threads, at<const int64_t>(ids), count, at<const uint8_t>(packed),
                                at<const int8_t>(exponent), n, k, groups, group_size, at<void>(out), dtype_of(dtype));
      },
      unlocked);
}
