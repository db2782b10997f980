// Random convolutions: every instruction set against patches that plain loops cut out, with the scalar loops for rows.
//
// All buffers have exactly the size that the kernels are told, so that an address sanitizer sees a step beyond them.
// Arguments: rounds, first seed; compiled with -DARB_FUZZ and libFuzzer it takes its seeds from the fuzzer.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "convolution.h"
#include "rounds.h"
#include "rows_driver.h"

namespace {

using namespace arb;

void require(bool holds, Isa isa, const char* what, uint64_t seed) {
  if (holds) return;
  std::printf("%s: %s, seed %llu\n", isa_name(isa), what, static_cast<unsigned long long>(seed));
  std::exit(1);
}

Taps drawn(Random& random, int64_t size) {
  for (;;) {
    const Taps taps{random.within(1, 4), random.within(1, 3), random.within(0, 3), random.within(1, 3)};
    if (size + 2 * taps.padding > taps.dilation * (taps.taps - 1)) return taps;
  }
}

void round(uint64_t seed) {
  Random random(seed);
  const int64_t batch = random.within(1, 3), channels = random.within(0, 2) == 0 ? random.within(1, 40) : 3;
  const int64_t height = random.within(1, 12), width = random.within(1, 30);
  const Window window{drawn(random, height), drawn(random, width)};
  const int64_t high = window.down.places(height), wide = window.across.places(width);
  const int64_t taps = window.down.taps * window.across.taps, terms = channels * taps, rows = batch * high * wide;
  const int threads = static_cast<int>(random.within(1, 2));

  // Now and then bits at random, whatever numbers they are.
  const bool any = random.within(0, 4) == 0;
  std::vector<float> x;
  for (int64_t i = 0; i < batch * channels * height * width; ++i) {
    float value = static_cast<float>(random.within(-1000, 1000)) * 0.01f;
    if (any) {
      const uint32_t bits = static_cast<uint32_t>(random.within(0, 0xFFFFFFFF));
      std::memcpy(&value, &bits, 4);
    }
    x.push_back(value);
  }
  const bool last = random.within(0, 1) == 0;  // channels, in memory
  const Image image{{batch, channels, height, width},
                    x.data(),
                    Dtype::float32,
                    channels * height * width,
                    last ? 1 : height * width,
                    last ? width * channels : width,
                    last ? channels : 1};

  std::vector<float> patches(static_cast<size_t>(rows * terms)), folded(x.size());
  std::vector<float> grad;
  for (size_t i = 0; i < patches.size(); ++i) grad.push_back(static_cast<float>(random.within(-1000, 1000)) * 0.1f);
  for (int64_t t = 0; t < taps; ++t) {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t place = row % (high * wide), b = row / (high * wide);
      const int64_t across = t % window.across.taps, down = t / window.across.taps;
      const int64_t h = place / wide * window.down.step + down * window.down.dilation - window.down.padding;
      const int64_t w = place % wide * window.across.step + across * window.across.dilation - window.across.padding;
      if (h < 0 || h >= height || w < 0 || w >= width) continue;
      for (int64_t c = 0; c < channels; ++c) {
        const int64_t from = b * image.batch_stride + c * image.channel_stride + h * image.row_stride +
                             w * image.column_stride;
        const size_t to = static_cast<size_t>(row * terms + c * taps + t);
        patches[to] = x[static_cast<size_t>(from)];
        folded[static_cast<size_t>(((b * height + h) * width + w) * channels + c)] += grad[to];
      }
    }
  }
  std::vector<int8_t> wanted_q(patches.size());
  std::vector<float> wanted_scale(static_cast<size_t>(rows));
  quantize_rows(products_scalar(), 1, patches.data(), Dtype::float32, rows, terms, wanted_q.data(),
                wanted_scale.data());

  const int64_t outputs = random.within(1, 40), group = 16 * random.within(1, 4), groups = (terms + group - 1) / group;
  const auto trits = random.numbers<int8_t>(outputs * terms, -1, 1);
  const auto exponent = random.numbers<int8_t>(outputs * groups, -9, -9 + random.within(0, 8));
  std::vector<uint8_t> packed(static_cast<size_t>(blocks_of(outputs) * blocks_of(terms) * kBlockBytes));
  pack_trits(1, trits.data(), outputs, terms, packed.data());
  const Weight weight{packed.data(), exponent.data(), outputs, terms, groups, group};
  std::vector<float> wanted(static_cast<size_t>(rows * outputs));
  linear_int8(products_scalar(), 1, weight, wanted_q.data(), wanted_scale.data(), rows, nullptr, wanted.data(),
              Dtype::float32);

  for (const Isa isa : usable_isas()) {
    const ProductKernels& kernels = product_kernels(static_cast<int>(isa));
    std::vector<int8_t> q(wanted_q.size());
    std::vector<float> scale(wanted_scale.size()), y(wanted.size()), sums(folded.size());
    quantize_patches(kernels, threads, image, window, q.data(), scale.data());
    require(q == wanted_q, isa, "a patch differs", seed);
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      for (size_t i = 0; i < a.size(); ++i) {
        if (a[i] != b[i] && (a[i] == a[i] || b[i] == b[i])) return false;
      }
      return true;
    };
    require(same(scale, wanted_scale), isa, "a scale differs", seed);
    if (convolve_int8(kernels, threads, weight, image, window, nullptr, y.data(), Dtype::float32)) {
      require(same(y, wanted), isa, "a product differs", seed);
    }
    fold_patches(threads, grad.data(), image, window, sums.data());
    require(sums == folded, isa, "a sum of patches differs", seed);
  }
}

}  // namespace

#include "check_main.h"
