#include "blocks.h"

#include <atomic>
#include <cmath>
#include <cstring>

#include "crew.h"
#include "workspace.h"

namespace arb {

namespace {

// Elements that are worth a task.
constexpr int64_t kTaskElements = 1 << 15;

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

const void* at(const void* x, Dtype dtype, int64_t index) {
  return static_cast<const char*>(x) + index * dtype_size(dtype);
}
void* at(void* x, Dtype dtype, int64_t index) { return static_cast<char*>(x) + index * dtype_size(dtype); }

const BlockKernels& block_kernels(int isa) {
  switch (static_cast<Isa>(isa)) {
#if defined(ARB_HAVE_AVX512BF16)
    case Isa::avx512bf16:
    case Isa::amx:
      return block_kernels_avx512bf16();
#endif
#if defined(ARB_HAVE_AVX512VNNI)
    case Isa::avx512vnni:
      return block_kernels_avx512vnni();
#endif
#if defined(ARB_HAVE_AVX2)
    case Isa::avx2:
    case Isa::avxvnni:
      return block_kernels_avx2();
#endif
#if defined(ARB_HAVE_NEON)
    case Isa::neon:
      return block_kernels_neon();
#endif
    default:
      return block_kernels_scalar();
  }
}

// Sums over rows that are added up apart, at most.
constexpr int64_t kMostSums = 64;

// Calls f(row, work, width, gain) for every row, with `count` rows of floats to work in, `width` apart. Rows of a task
// add to sums of their own, `features` floats, which are then added up in the order of the rows to those of `gain`.
template <class F>
void for_rows(const BlockCall& call, int64_t rows, int64_t columns, int64_t count, Gain gain, int64_t features, F f) {
  const int64_t width = blocks_of(columns) * kBlockSide + kRowSlack;
  const bool sums = gain.sums != nullptr;
  int64_t step = columns >= kTaskElements ? 1 : kTaskElements / (columns < 1 ? 1 : columns);
  const int64_t fewest = (rows + kMostSums - 1) / kMostSums;
  if (sums && step < fewest) step = fewest;
  const int64_t tasks = (rows + step - 1) / step;
  const int threads = static_cast<int>(least(call.threads, tasks));
  const size_t each = Workspace::padded(count * width * 4), apart = sums ? Workspace::padded(features * 4) : 0;
  Workspace& space = workspace();
  space.reserve(static_cast<size_t>(threads) * each + static_cast<size_t>(tasks) * apart);
  char* const work = space.take<char>(threads * static_cast<int64_t>(each));
  char* const parts = space.take<char>(tasks * static_cast<int64_t>(apart));
  if (sums) std::memset(parts, 0, static_cast<size_t>(tasks) * apart);
  const auto part = [&](int64_t index) {
    return reinterpret_cast<float*>(parts + index * static_cast<int64_t>(apart));
  };
  auto task = [&](int64_t index, int worker) {
    float* const own = reinterpret_cast<float*>(work + worker * static_cast<int64_t>(each));
    const Gain of{gain.values, sums ? part(index) : nullptr};
    const int64_t last = least(rows, (index + 1) * step);
    for (int64_t row = index * step; row < last; ++row) f(row, own, width, of);
  };
  parallel_tasks(tasks, threads, task);
  for (int64_t index = 0; sums && index < tasks; ++index) {
    call.block.add(part(index), Dtype::float32, features, gain.sums);
  }
  space.release();
}

template <class F>
void for_rows(const BlockCall& call, int64_t rows, int64_t columns, int64_t count, F f) {
  for_rows(call, rows, columns, count, Gain{}, 0, [&](int64_t row, float* work, int64_t width, Gain) {
    f(row, work, width);
  });
}

void gather(const BlockKernels& block, const HeadRows& x, Dtype dtype, int64_t row, float* out) {
  for (int64_t h = 0; h < x.heads; ++h) {
    block.widen(at(x.memory, dtype, x.place(row, h)), dtype, x.features, out + h * x.features);
  }
}

void scatter(const BlockKernels& block, const float* values, const HeadRows& out, Dtype dtype, int64_t row) {
  for (int64_t h = 0; h < out.heads; ++h) {
    block.narrow(values + h * out.features, out.features, dtype, at(out.memory, dtype, out.place(row, h)));
  }
}

// That of all heads of a position, whose angles begin at `first`.
Rotation rotation(const float* cos, const float* sin, int64_t first) {
  if (cos == nullptr) return {};
  return {cos + first, sin + first, 0};
}

// The power of two of an int8 gradient whose largest magnitude has these bits; 0 where it becomes zeros.
float power_above(uint32_t bits) {
  float largest;
  std::memcpy(&largest, &bits, 4);
  if (bits == 0 || !std::isfinite(largest)) return 0.0f;
  int exponent = 0;
  const double mantissa = std::frexp(static_cast<double>(largest) / 127.0, &exponent);
  if (mantissa == 0.5) --exponent;
  return std::ldexp(1.0f, exponent < -126 ? -126 : exponent);
}

void raise_to(std::atomic<uint32_t>& most, uint32_t bits) {
  uint32_t seen = most.load(std::memory_order_relaxed);
  while (bits > seen && !most.compare_exchange_weak(seen, bits, std::memory_order_relaxed)) {
  }
}

}  // namespace

BlockCall::BlockCall(int isa, int wanted) : block(block_kernels(isa)), rows(product_kernels(isa)), threads(wanted) {}

void normalise_quantize(const BlockCall& call, const HeadRows& x, Dtype dtype, int64_t rows, float eps,
                        const float* gain, int8_t* q, float* scale, float* r) {
  const int64_t columns = x.columns();
  for_rows(call, rows, columns, 1, [&](int64_t row, float* work, int64_t) {
    const bool whole = x.heads == 1;
    if (!whole) gather(call.block, x, dtype, row, work);
    const void* const own = whole ? at(x.memory, dtype, x.place(row, 0)) : work;
    scale[row] = call.block.normalise_quantize(own, whole ? dtype : Dtype::float32, columns, eps, gain,
                                               q + row * columns, eps < 0.0f ? nullptr : r + row);
  });
}

void normalise_back(const BlockCall& call, const void* const grads[3], const HeadRows& x, const float* r, Gain gain,
                    Dtype dtype, int64_t rows, const HeadRows& out) {
  const int64_t columns = out.columns();
  const bool whole = (r == nullptr || x.heads == 1) && out.heads == 1;
  for_rows(call, rows, columns, 2, gain, columns, [&](int64_t row, float* work, int64_t width, Gain of) {
    const void* own[3] = {};
    for (int i = 0; i < 3 && grads[i] != nullptr; ++i) own[i] = at(grads[i], dtype, row * columns);
    const float* const factor = r == nullptr ? nullptr : r + row;
    if (whole) {
      const void* const from = r == nullptr ? nullptr : at(x.memory, dtype, x.place(row, 0));
      call.block.normalise_back(own, dtype, from, false, factor, columns, of, at(out.memory, dtype, out.place(row, 0)));
      return;
    }
    if (r != nullptr) gather(call.block, x, dtype, row, work + width);
    call.block.normalise_back(own, dtype, work + width, true, factor, columns, of, work);
    scatter(call.block, work, out, dtype, row);
  });
}

void activate_quantize(const BlockCall& call, Activation kind, const void* gate, const void* up, Dtype dtype,
                       int64_t rows, int64_t columns, float eps, const float* gain, int8_t* q, float* scale, float* r) {
  for_rows(call, rows, columns, 1, [&](int64_t row, float* work, int64_t) {
    const int64_t first = row * columns;
    scale[row] = call.block.activate_quantize(kind, at(gate, dtype, first), at(up, dtype, first), dtype, columns, eps,
                                              gain, work, q + first, eps < 0.0f ? nullptr : r + row);
  });
}

void activate_back(const BlockCall& call, Activation kind, const void* grad, const void* gate, const void* up,
                   const float* r, Gain gain, Dtype dtype, int64_t rows, int64_t columns, void* grad_gate,
                   void* grad_up) {
  for_rows(call, rows, columns, 1, gain, columns, [&](int64_t row, float* work, int64_t, Gain of) {
    const int64_t first = row * columns;
    call.block.activate_back(kind, at(grad, dtype, first), at(gate, dtype, first), at(up, dtype, first),
                             r == nullptr ? nullptr : r + row, of, dtype, columns, work, at(grad_gate, dtype, first),
                             at(grad_up, dtype, first));
  });
}

void scale_columns_back(const BlockCall& call, const void* grad, const void* x, Gain factor, Dtype dtype, int64_t rows,
                        int64_t columns, void* out) {
  for_rows(call, rows, columns, 2, factor, columns, [&](int64_t row, float* work, int64_t width, Gain of) {
    const int64_t first = row * columns;
    call.block.widen(at(grad, dtype, first), dtype, columns, work);
    call.block.widen(at(x, dtype, first), dtype, columns, work + width);
    call.block.gain_back(work + width, 1.0f, columns, of, work);
    call.block.narrow(work, columns, dtype, at(out, dtype, first));
  });
}

void turn_heads(const BlockCall& call, const void* x, Dtype dtype, int64_t rows, const HeadRows& y, const float* cos,
                const float* sin, float eps, const float* gain, float* r) {
  const int64_t columns = y.columns(), planes = y.features / 2;
  for_rows(call, rows, columns, 0, [&](int64_t row, float*, int64_t) {
    call.block.turn(y.heads, at(x, dtype, row * columns), y.features, dtype, planes,
                    rotation(cos, sin, row % y.length * planes), eps, gain, at(y.memory, dtype, y.place(row, 0)),
                    y.head_stride, eps < 0.0f ? nullptr : r + row * y.heads);
  });
}

void turn_heads_back(const BlockCall& call, const HeadRows& grad_y, const void* x, Dtype dtype, int64_t rows,
                     const float* cos, const float* sin, const float* r, Gain gain, void* grad_x) {
  const int64_t columns = grad_y.columns(), planes = grad_y.features / 2;
  for_rows(call, rows, columns, 2, gain, grad_y.features, [&](int64_t row, float* work, int64_t width, Gain of) {
    gather(call.block, grad_y, dtype, row, work);
    call.block.turn_back(grad_y.heads, work, grad_y.features, 1.0f, at(x, dtype, row * columns), grad_y.features, dtype,
                         planes, rotation(cos, sin, row % grad_y.length * planes),
                         r == nullptr ? nullptr : r + row * grad_y.heads, of, work + width,
                         at(grad_x, dtype, row * columns));
  });
}

void quantize_both(const BlockCall& call, const void* grad, Dtype dtype, int64_t rows, int64_t columns,
                   const float* row_scale, const HashWords& words, const HashWords& folded_words, int8_t* q,
                   int8_t* folded, float scales[2]) {
  std::atomic<uint32_t> most{0}, most_folded{0};
  float power = 1.0f, folded_power = 1.0f;
  const HashStream noise(words), folded_noise(folded_words);
  const auto find = [&](int64_t row) {
    const uint32_t bits = call.rows.largest_bits(at(grad, dtype, row * columns), dtype, columns);
    raise_to(most, bits);
    // Products with one factor, and their rounding, keep the order of magnitudes: the largest is that of the largest.
    float largest;
    std::memcpy(&largest, &bits, 4);
    alignas(64) char element[64];
    call.block.narrow(&largest, 1, dtype, element);
    call.block.scale(element, dtype, 1, row_scale[row], element);
    raise_to(most_folded, call.rows.largest_bits(element, dtype, 1));
  };
  // Products with 0 become zeros, be they finite or not.
  const auto inverse = [](float of) { return of == 0.0f ? 0.0f : 1.0f / of; };
  const auto round = [&](int64_t row) {
    const int64_t first = row * columns;
    const uint64_t place = static_cast<uint64_t>(first);
    const BothRoundings by{inverse(power), inverse(folded_power), noise.base(place), folded_noise.base(place)};
    call.rows.round_both(at(grad, dtype, first), dtype, columns, row_scale[row], by, q + first, folded + first);
  };
  Crew crew(rows * columns < kTaskElements ? 1 : call.threads);
  crew.work([&](Crew::Member& member, int) {
    member.each(rows, find);
    member.each(1, [&](int64_t) {
      power = power_above(most.load());
      folded_power = power_above(most_folded.load());
    });
    member.each(rows, round);
  });
  scales[0] = power == 0.0f ? 1.0f : power;
  scales[1] = folded_power == 0.0f ? 1.0f : folded_power;
}

}  // namespace arb
