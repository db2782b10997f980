#include "convolution.h"

#include <algorithm>
#include <deque>
#include <vector>

#include "product_plan.h"
#include "threads.h"
#include "workspace.h"

namespace arb {

namespace {

// Floats of an image that lie in the second-level cache while their patches are made and multiplied.
constexpr int64_t kBandFloats = 48 << 10;
// Sixteens of patches that a strip of the weight passes while it is in the first-level cache.
constexpr int64_t kStretch = 4;
constexpr int64_t kTasksPerThread = 4;
// Elements of patches, each counted once for every 8 outputs, below which one thread is done before another wakes up.
constexpr int64_t kShortWork = 1 << 19;

int64_t round_up(int64_t value, int64_t unit) { return ceil_of(value, unit) * unit; }

// One dimension of the planes: their lines, or the elements of a line.
struct Axis {
  const Taps& window;
  int64_t size, places, halo;
  int64_t phases = 0;
  std::vector<int64_t> residues;  // of each phase

  Axis(const Taps& taps, int64_t length)
      : window(taps), size(length), places(taps.places(length)), halo((taps.taps - 1) * taps.dilation / taps.step) {
    for (int64_t i = 0; i < taps.taps; ++i) {
      const int64_t residue = i * taps.dilation % taps.step;
      if (phase(residue) == phases) {
        residues.push_back(residue);
        ++phases;
      }
    }
  }

  int64_t phase(int64_t residue) const {
    return std::find(residues.begin(), residues.end(), residue) - residues.begin();
  }
  int64_t phase_of_tap(int64_t tap) const { return phase(tap * window.dilation % window.step); }
  int64_t shift_of_tap(int64_t tap) const { return tap * window.dilation / window.step; }

  // Where place `place` of a phase lies in the image, and the first of `count` places from `first` on that does not lie
  // before its place `index`.
  int64_t source(int64_t phase, int64_t place) const {
    return place * window.step + residues[static_cast<size_t>(phase)] - window.padding;
  }
  int64_t first_from(int64_t phase, int64_t first, int64_t count, int64_t index) const {
    const int64_t ahead = index - source(phase, first);
    return ahead <= 0 ? 0 : least(count, ceil_of(ahead, window.step));
  }
};

// Sixteen patches of a band: quarters of a line of places, with fewer than four at its end.
struct Quarters {
  int64_t start[4];    // in a plane
  int64_t patch[4];    // in the band
  int64_t patches[4];  // 0 to 4
};

// How the patches of some lines of places, a band, are laid out as floats, so that those of term k which are neighbours
// in the result are neighbours in memory. An image with its padding is cut into phases, every `step`th line and column;
// a phase is a plane. The last channel holds the largest magnitudes of the others.
class Planes {
 public:
  Planes(const Image& image, const Window& window, int threads)
      : image_(image), down_(window.down, image.height), across_(window.across, image.width) {
    pitch_ = across_.places + across_.halo;
    phases_ = down_.phases * across_.phases;
    lines_ = most(1, least(down_.places, kBandFloats / ((image.channels + 1) * phases_ * pitch_) - down_.halo));
    const int64_t wanted = threads > 1 ? ceil_of(kTasksPerThread * threads, most(1, image.batch)) : 1;
    lines_ = least(lines_, ceil_of(down_.places, wanted));
    bands_ = ceil_of(down_.places, lines_);
    plane_ = (lines_ + down_.halo) * pitch_ + kLineSlack;
    rows_ = least(image.height, (lines_ + down_.halo) * window.down.step);
    stride_ = round_up(rows_ * image.width, kLineSlack) + kLineSlack;
    // Pairs of quarters are neighbours, which are faster to load, unless half of the last would be empty.
    quarters_ = across_.places % 8 == 0 || across_.places % 8 > 4 ? round_up(across_.places, 8) / 4
                                                                  : across_.places / 8 * 2 + 1;
    offsets_.resize(static_cast<size_t>(round_up(terms(), kBlockSide)), 0);
    int64_t* next = offsets_.data();
    for (int64_t c = 0; c < image.channels; ++c) {
      for (int64_t i = 0; i < window.down.taps; ++i) {
        for (int64_t j = 0; j < window.across.taps; ++j) {
          const int64_t phase = down_.phase_of_tap(i) * across_.phases + across_.phase_of_tap(j);
          *next++ = (c * phases_ + phase) * plane_ + down_.shift_of_tap(i) * pitch_ + across_.shift_of_tap(j);
        }
      }
    }
  }

  int64_t taps() const { return down_.window.taps * across_.window.taps; }
  int64_t terms() const { return image_.channels * taps(); }
  int64_t steps() const { return static_cast<int64_t>(offsets_.size()) / kStepsPerBlock; }
  const int64_t* offsets() const { return offsets_.data(); }
  int64_t patches() const { return image_.batch * down_.places * across_.places; }
  int64_t bands() const { return bands_ * image_.batch; }
  int64_t first_patch(int64_t band) const {
    return (band / bands_ * down_.places + band % bands_ * lines_) * across_.places;
  }
  // Sixteens of a band.
  int64_t groups(int64_t band) const { return ceil_of(lines(band) * quarters_, 4); }

  Quarters group(int64_t band, int64_t index) const {
    Quarters found;
    const int64_t count = lines(band);
    int64_t line = 4 * index / quarters_, place = 4 * index % quarters_ * 4;
    for (int64_t i = 0; i < 4; ++i) {
      const bool inside = line < count;
      found.start[i] = inside ? line * pitch_ + place : 0;
      found.patch[i] = line * across_.places + place;
      found.patches[i] = inside ? least(4, across_.places - place) : 0;
      place += 4;
      if (place == 4 * quarters_) {
        place = 0;
        ++line;
      }
    }
    return found;
  }

  // Floats that a band takes: the planes, the largest magnitudes, and lines of the image.
  int64_t floats() const { return (image_.channels + 1) * (phases_ * plane_ + stride_); }
  int64_t largest() const { return image_.channels * phases_ * plane_; }

  // Fills the planes of a band.
  void fill(const ProductKernels& kernels, int64_t band, float* planes) const {
    const int64_t first = band % bands_ * lines_, count = lines(band) + down_.halo;
    const int64_t top = least(image_.height, most(0, first * down_.window.step - down_.window.padding));
    const int64_t rows = least(image_.height - top, rows_);
    float* const lines = planes + (image_.channels + 1) * phases_ * plane_;
    gather(kernels, band / bands_, top, rows, lines);
    for (int64_t c = 0; c <= image_.channels; ++c) {
      for (int64_t phase = 0; phase < phases_; ++phase) {
        const int64_t down = phase / across_.phases, across = phase % across_.phases;
        const int64_t above = down_.first_from(down, first, count, 0);
        const int64_t below = most(above, down_.first_from(down, first, count, image_.height));
        const int64_t low = across_.first_from(across, 0, pitch_, 0);
        const int64_t high = most(low, across_.first_from(across, 0, pitch_, image_.width));
        float* const to = planes + (c * phases_ + phase) * plane_;
        std::memset(to, 0, static_cast<size_t>(above * pitch_) * sizeof(float));
        if (above < below) {
          const float* const from = lines + c * stride_ +
                                    (down_.source(down, first + above) - top) * image_.width +
                                    (low < high ? across_.source(across, low) : 0);
          kernels.place_lines(from, down_.window.step * image_.width, across_.window.step, low, high, below - above,
                              to + above * pitch_, pitch_);
        }
        // What is read beyond the last place decides about nothing, but should be no NaN that takes the slow path.
        std::memset(to + below * pitch_, 0,
                    static_cast<size_t>((count - below) * pitch_ + kLineSlack) * sizeof(float));
      }
    }
  }

 private:
  int64_t lines(int64_t band) const { return least(lines_, down_.places - band % bands_ * lines_); }

  void gather(const ProductKernels& kernels, int64_t batch, int64_t top, int64_t rows, float* lines) const {
    const bool one = image_.row_stride == image_.width * image_.column_stride;  // line, as far as columns go
    const int64_t columns = one ? rows * image_.width : image_.width;
    for (int64_t row = 0; row < (one ? 1 : rows); ++row) {
      const int64_t first = batch * image_.batch_stride + (top + row) * image_.row_stride;
      kernels.gather_columns(static_cast<const char*>(image_.values) + first * dtype_size(image_.dtype), image_.dtype,
                             image_.channel_stride, image_.column_stride, image_.channels, columns, stride_,
                             lines + row * image_.width);
    }
  }

  const Image& image_;
  Axis down_, across_;
  int64_t pitch_ = 0, phases_ = 0, lines_ = 0, bands_ = 0, plane_ = 0, rows_ = 0, stride_ = 0, quarters_ = 0;
  std::vector<int64_t> offsets_;
};

// The memory of each worker: planes, and panels of sixteen patches.
struct Rooms {
  std::vector<float*> planes;
  std::vector<uint8_t*> panels;

  static size_t bytes(const Planes& planes, int threads, int64_t sixteens) {
    return static_cast<size_t>(threads) *
           (Workspace::padded(planes.floats() * 4) + Workspace::padded(sixteens * planes.steps() * kBlockBytes));
  }

  Rooms(Workspace& space, const Planes& all, int threads, int64_t sixteens) {
    for (int i = 0; i < threads; ++i) {
      planes.push_back(space.take<float>(all.floats()));
      panels.push_back(space.take<uint8_t>(sixteens * all.steps() * kBlockBytes));
    }
  }
};

int worthwhile(int threads, int64_t work) { return work < kShortWork ? 1 : threads; }

}  // namespace

void quantize_patches(const ProductKernels& kernels, int threads, const Image& image, const Window& window, int8_t* q,
                      float* scale) {
  const Planes planes(image, window, threads);
  const int64_t terms = planes.terms();
  threads = worthwhile(threads, planes.patches() * terms);
  Workspace& space = workspace();
  space.reserve(Rooms::bytes(planes, threads, 1));
  const Rooms rooms(space, planes, threads, 1);
  auto task = [&](int64_t band, int worker) {
    float* const mine = rooms.planes[static_cast<size_t>(worker)];
    uint8_t* const panel = rooms.panels[static_cast<size_t>(worker)];
    planes.fill(kernels, band, mine);
    for (int64_t g = 0; g < planes.groups(band); ++g) {
      const Quarters group = planes.group(band, g);
      float scales[kPatches];
      kernels.quantize_patches(mine, group.start, planes.offsets(), planes.steps(), mine + planes.largest(),
                               planes.taps(), 0, panel, scales);
      for (int64_t i = 0; i < kPatches; ++i) {
        if (i % 4 >= group.patches[i / 4]) continue;
        const int64_t patch = planes.first_patch(band) + group.patch[i / 4] + i % 4;
        scale[patch] = scales[i];
        int8_t* const row = q + patch * terms;
        const uint8_t* const from = panel + 4 * i;
        for (int64_t step = 0; step < terms / 4; ++step) std::memcpy(row + 4 * step, from + step * kBlockBytes, 4);
        for (int64_t k = terms / 4 * 4; k < terms; ++k) {
          row[k] = static_cast<int8_t>(from[k / 4 * kBlockBytes + k % 4]);
        }
      }
    }
  };
  parallel_tasks(planes.bands(), threads, task);
  space.release();
}

bool convolve_int8(const ProductKernels& kernels, int threads, const Weight& weight, const Image& image,
                   const Window& window, const float* bias, void* out, Dtype dtype) {
  const Planes planes(image, window, threads);
  const Shape shape(weight, false, planes.patches());
  threads = worthwhile(threads, planes.patches() * shape.terms * (1 + shape.outputs / 16));
  const int64_t groups = ceil_of(shape.strips, kernels.strips), lanes = kernels.strips * kBlockSide;
  const int64_t exponents = kernels.strips * exponent_bytes(weight.groups);
  const int64_t weight_bytes = planes.steps() * kBlockBytes * kernels.strips;
  const int64_t panel_bytes = planes.steps() * kBlockBytes;
  // Rows of a tile: whole quarters, unless it takes one row only.
  const int64_t height = kernels.int8.rows >= 8 ? 8 : kernels.int8.rows >= 4 ? 4 : 1;

  Workspace& space = workspace();
  space.reserve(Workspace::padded(groups * exponents) + Workspace::padded(groups * weight_bytes) +
                Workspace::padded(groups * lanes * 4) + Rooms::bytes(planes, threads, kStretch));
  uint8_t* const all_exponents = space.take<uint8_t>(groups * exponents);
  int8_t* const weights = space.take<int8_t>(groups * weight_bytes);
  int32_t* const offsets = space.take<int32_t>(groups * lanes);
  const Rooms rooms(space, planes, threads, kStretch);
  std::deque<StripGroup> strips;
  for (int64_t i = 0; i < groups; ++i) {
    strips.emplace_back(kernels, weight, shape, GroupExponents{}, i * kernels.strips, kernels.strips,
                        all_exponents + i * exponents, bias);
    const int spread = strips.back().spread;
    if (spread >= kBandBits || !fits_in_32_bits(spread, shape.terms)) {
      space.release();
      return false;
    }
  }
  auto decode = [&](int64_t i, int) {
    std::memset(offsets + i * lanes, 0, static_cast<size_t>(lanes) * sizeof(int32_t));
    kernels.int8.decode(strips[static_cast<size_t>(i)].source, false, 0, weights + i * weight_bytes,
                        offsets + i * lanes);
  };
  parallel_tasks(groups, threads, decode);

  const Result result{out, shape.outputs, dtype};
  result.prepare(shape.m);

  // Sixteen patches times the weights of some strips.
  const auto multiply = [&](const uint8_t* panel, const Quarters& patches, const float* scales, int64_t first,
                            int64_t i) {
    const StripGroup& group = strips[static_cast<size_t>(i)];
    const Columns& columns = group.columns;
    alignas(64) int32_t acc[kPatches * kMaxLanes];
    for (int64_t r = 0; r < kPatches; r += height) {
      if (patches.patches[r / 4] <= r % 4) continue;
      kernels.int8.tile(height, planes.steps(), panel + 4 * r, kBlockBytes, weights + i * weight_bytes,
                        group.source.strips, group.spread, true, acc + r * columns.lanes);
    }
    for (int64_t quarter = 0; quarter < 4;) {
      // Full quarters whose patches follow each other, and what follows them.
      int64_t end = quarter + 1, rows = patches.patches[quarter];
      while (end < 4 && rows == 4 * (end - quarter) && patches.patch[end] == patches.patch[quarter] + rows) {
        rows += patches.patches[end++];
      }
      kernels.finish_int8(acc + 4 * quarter * columns.lanes, offsets + i * lanes, rows, columns.lanes, columns.count,
                          scales + 4 * quarter, columns.scale, bias == nullptr ? nullptr : columns.bias,
                          result.at(first + patches.patch[quarter], columns.first), result.stride, result.dtype, false);
      quarter = end;
    }
  };

  auto task = [&](int64_t band, int worker) {
    float* const mine = rooms.planes[static_cast<size_t>(worker)];
    uint8_t* const panels = rooms.panels[static_cast<size_t>(worker)];
    Quarters patches[kStretch];
    alignas(64) float scales[kStretch * kPatches];
    planes.fill(kernels, band, mine);
    for (int64_t start = 0; start < planes.groups(band); start += kStretch) {
      const int64_t count = least(kStretch, planes.groups(band) - start);
      for (int64_t g = 0; g < count; ++g) {
        patches[g] = planes.group(band, start + g);
        kernels.quantize_patches(mine, patches[g].start, planes.offsets(), planes.steps(), mine + planes.largest(),
                                 planes.taps(), kernels.int8.flip, panels + g * panel_bytes, scales + g * kPatches);
      }
      for (int64_t i = 0; i < groups; ++i) {
        for (int64_t g = 0; g < count; ++g) {
          multiply(panels + g * panel_bytes, patches[g], scales + g * kPatches, planes.first_patch(band), i);
        }
      }
    }
  };
  parallel_tasks(planes.bands(), threads, task);
  space.release();
  return true;
}

void fold_patches(int threads, const float* patches, const Sizes& image, const Window& window, float* out) {
  const Taps &down = window.down, &across = window.across;
  const int64_t high = down.places(image.height), wide = across.places(image.width);
  const int64_t taps = down.taps * across.taps, terms = image.channels * taps;
  threads = worthwhile(threads, image.batch * high * wide * terms);
  auto task = [&](int64_t b, int) {
    float* const sums = out + b * image.height * image.width * image.channels;
    std::memset(sums, 0, static_cast<size_t>(image.height * image.width * image.channels) * sizeof(float));
    // From the last patch to the first, an element meets its taps in ascending order.
    for (int64_t place = high * wide - 1; place >= 0; --place) {
      const float* const patch = patches + (b * high * wide + place) * terms;
      for (int64_t t = 0; t < taps; ++t) {
        const int64_t y = place / wide * down.step + t / across.taps * down.dilation - down.padding;
        const int64_t x = place % wide * across.step + t % across.taps * across.dilation - across.padding;
        if (y < 0 || y >= image.height || x < 0 || x >= image.width) continue;
        float* const to = sums + (y * image.width + x) * image.channels;
        for (int64_t c = 0; c < image.channels; ++c) to[c] += patch[c * taps + t];
      }
    }
  };
  parallel_tasks(image.batch, threads, task);
}

}  // namespace arb
