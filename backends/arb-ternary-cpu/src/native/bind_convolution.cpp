// Bindings of convolutions; addresses and sizes as in bind_products.cpp. An image is its address, its dtype, its four
// sizes and its four strides in elements; a window its taps, dilation, padding and step, down and across.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>

#include "bind.h"
#include "convolution.h"

namespace nb = nanobind;

namespace {

using Four = std::array<int64_t, 4>;
using Numbers = std::array<int64_t, 8>;

arb::Image image_of(Address values, int dtype, const Numbers& n) {
  return {{n[0], n[1], n[2], n[3]}, at<const void>(values), static_cast<arb::Dtype>(dtype), n[4], n[5], n[6], n[7]};
}

arb::Window window_of(const Numbers& n) { return {{n[0], n[2], n[4], n[6]}, {n[1], n[3], n[5], n[7]}}; }

}  // namespace

void bind_convolution(nb::module_& m) {
  const nb::call_guard<nb::gil_scoped_release> unlocked;
  m.def(
      "quantize_patches",
      [](int isa, int threads, Address x, int dtype, const Numbers& image, const Numbers& window, Address q,
         Address scale) {
        arb::quantize_patches(arb::product_kernels(isa), threads, image_of(x, dtype, image), window_of(window),
                              at<int8_t>(q), at<float>(scale));
      },
      unlocked);
  m.def(
      "convolve_int8",
      [](int isa, int threads, Address x, int dtype, const Numbers& image, const Numbers& window, Address packed,
         Address exponent, int64_t n, int64_t k, int64_t groups, int64_t group_size, Address bias, Address out,
         int out_dtype) {
        const arb::Weight weight{at<const uint8_t>(packed), at<const int8_t>(exponent), n, k, groups, group_size};
        return arb::convolve_int8(arb::product_kernels(isa), threads, weight, image_of(x, dtype, image),
                                  window_of(window), at<const float>(bias), at<void>(out),
                                  static_cast<arb::Dtype>(out_dtype));
      },
      unlocked);
  m.def(
      "fold_patches",
      [](int threads, Address patches, const Four& image, const Numbers& window, Address out) {
        arb::fold_patches(threads, at<const float>(patches), {image[0], image[1], image[2], image[3]},
                          window_of(window), at<float>(out));
      },
      unlocked);
}
