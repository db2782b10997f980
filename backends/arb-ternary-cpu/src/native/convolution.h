// Convolutions as products with patches: what unfold and quantisation would make, never written out as floats.
#pragma once

#include <cstdint>

#include "product_driver.h"

namespace arb {

struct Sizes {
  int64_t batch, channels, height, width;
};

// An image [batch][channels][height][width] of any strides, in elements.
struct Image : Sizes {
  const void* values;
  Dtype dtype;
  int64_t batch_stride, channel_stride, row_stride, column_stride;
};

// One dimension of the window that moves over an image.
struct Taps {
  int64_t taps, dilation, padding, step;

  // Places of the window along `size` elements; at least 1.
  int64_t places(int64_t size) const { return (size + 2 * padding - dilation * (taps - 1) - 1) / step + 1; }
};

struct Window {
  Taps down, across;
};

// A patch is a row of [batch * places down * places across][channels * taps down * taps across].
// int8 patches and their scales, as quantize_rows makes them.
void quantize_patches(const ProductKernels& kernels, int threads, const Image& image, const Window& window, int8_t* q,
                      float* scale);

// linear_int8 of the patches. Returns false, and has written nothing, where the sums do not fit in 32 bits.
bool convolve_int8(const ProductKernels& kernels, int threads, const Weight& weight, const Image& image,
                   const Window& window, const float* bias, void* out, Dtype dtype);

// The sums of patches of float32 where they overlap, each over the taps in ascending order, to an image
// [batch][height][width][channels].
void fold_patches(int threads, const float* patches, const Sizes& image, const Window& window, float* out);

}  // namespace arb
