#include "rows_driver.h"

#include <atomic>
#include <cmath>
#include <cstring>

#include "threads.h"
#include "workspace.h"

namespace arb {

namespace {

// Elements that are worth a task.
constexpr int64_t kTaskElements = 1 << 15;

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

const void* at(const void* x, Dtype dtype, int64_t index) {
  return static_cast<const char*>(x) + index * dtype_size(dtype);
}

// Calls f(first, last, worker) for stretches of rows that make tasks of a good size.
template <class F>
void for_rows(int64_t rows, int64_t columns, int threads, F f) {
  const int64_t step = columns >= kTaskElements ? 1 : kTaskElements / (columns < 1 ? 1 : columns);
  auto task = [&](int64_t index, int worker) { f(index * step, least(rows, (index + 1) * step), worker); };
  parallel_tasks((rows + step - 1) / step, threads, task);
}

}  // namespace

bool pack_trits(int threads, const int8_t* trits, int64_t rows, int64_t columns, uint8_t* packed) {
  const int64_t blocks = blocks_of(columns);
  // Reading a weight that is in no cache is up to a third faster then.
  advise_huge_pages(packed, static_cast<size_t>(blocks_of(rows) * blocks * kBlockBytes));
  std::atomic<bool> valid{true};
  auto task = [&](int64_t strip, int) {
    const int64_t first = strip * kBlockSide;
    uint8_t* const to = packed + strip * blocks * kBlockBytes;
    std::memset(to, 0x55, static_cast<size_t>(blocks * kBlockBytes));
    bool all_valid = true;
    for (int64_t r = 0; r < least(kBlockSide, rows - first); ++r) {
      const int8_t* const row = trits + (first + r) * columns;
      for (int64_t k = 0; k < columns; ++k) {
        const int code = row[k] + 1;
        all_valid = all_valid && code >= 0 && code <= 2;
        // The padding's code 1 is already there.
        const int64_t column = k % kBlockSide;
        uint8_t& byte = to[k / kBlockSide * kBlockBytes + 4 * r + column % 4];
        byte = static_cast<uint8_t>(byte ^ (((code & 3) ^ 1) << 2 * (column / 4)));
      }
    }
    if (!all_valid) valid.store(false);
  };
  parallel_tasks(blocks_of(rows), threads, task);
  return valid.load();
}

void unpack_trits(int threads, const uint8_t* packed, int64_t rows, int64_t columns, int8_t* trits) {
  const int64_t blocks = blocks_of(columns);
  auto task = [&](int64_t strip, int) {
    const int64_t first = strip * kBlockSide;
    const uint8_t* const from = packed + strip * blocks * kBlockBytes;
    for (int64_t r = 0; r < least(kBlockSide, rows - first); ++r) {
      int8_t* const row = trits + (first + r) * columns;
      for (int64_t k = 0; k < columns; ++k) {
        const int64_t column = k % kBlockSide;
        const int byte = from[k / kBlockSide * kBlockBytes + 4 * r + column % 4];
        row[k] = static_cast<int8_t>((byte >> 2 * (column / 4) & 3) - 1);
      }
    }
  };
  parallel_tasks(blocks_of(rows), threads, task);
}

void quantize_rows(const ProductKernels& kernels, int threads, const void* x, Dtype dtype, int64_t rows,
                   int64_t columns, int8_t* q, float* scale) {
  for_rows(rows, columns, threads, [&](int64_t first, int64_t last, int) {
    for (int64_t r = first; r < last; ++r) {
      scale[r] = kernels.quantize_row(at(x, dtype, r * columns), dtype, columns, q + r * columns);
    }
  });
}

void norm_quantize_rows(const ProductKernels& kernels, int threads, const void* x, Dtype dtype, int64_t rows,
                        int64_t columns, float eps, int8_t* q, float* scale) {
  const int64_t width = blocks_of(columns) * kBlockSide;
  Workspace& space = workspace();
  space.reserve(static_cast<size_t>(threads) * Workspace::padded(width * 4));
  float* const work = space.take<float>(threads * width);
  for_rows(rows, columns, threads, [&](int64_t first, int64_t last, int worker) {
    for (int64_t r = first; r < last; ++r) {
      scale[r] = kernels.norm_quantize_row(at(x, dtype, r * columns), dtype, columns, eps, work + worker * width,
                                           q + r * columns);
    }
  });
  space.release();
}

float quantize_gradient(const ProductKernels& kernels, int threads, const void* grad, Dtype dtype, int64_t count,
                        const HashWords& words, int8_t* q) {
  // A power of two, so that no task straddles a multiple of 2**32, where the key of the hash changes.
  const int64_t tasks = (count + kTaskElements - 1) / kTaskElements;
  std::atomic<uint32_t> most{0};
  auto find = [&](int64_t index, int) {
    const int64_t first = index * kTaskElements;
    const uint32_t bits = kernels.largest_bits(at(grad, dtype, first), dtype, least(kTaskElements, count - first));
    uint32_t seen = most.load(std::memory_order_relaxed);
    while (bits > seen && !most.compare_exchange_weak(seen, bits, std::memory_order_relaxed)) {
    }
  };
  parallel_tasks(tasks, threads, find);
  const uint32_t bits = most.load();
  float largest;
  std::memcpy(&largest, &bits, 4);
  if (bits == 0 || !std::isfinite(largest)) {
    std::memset(q, 0, static_cast<size_t>(count));
    return 1.0f;
  }
  int exponent = 0;
  const double mantissa = std::frexp(static_cast<double>(largest) / 127.0, &exponent);
  if (mantissa == 0.5) --exponent;
  exponent = exponent < -126 ? -126 : exponent;
  // The quotient by a power of two is the product with its inverse: both round the same real number.
  const float scale = std::ldexp(1.0f, exponent), inverse = std::ldexp(1.0f, -exponent);
  auto round = [&](int64_t index, int) {
    const int64_t first = index * kTaskElements;
    const uint64_t place = static_cast<uint64_t>(first);
    const uint32_t hash = static_cast<uint32_t>(place) * kHashStep + hash_key(words, place >> 32);
    kernels.round_stochastic(at(grad, dtype, first), dtype, least(kTaskElements, count - first), inverse, hash,
                             q + first);
  };
  parallel_tasks(tasks, threads, round);
  return scale;
}

int64_t lookup_rows(const ProductKernels& kernels, int threads, const int64_t* ids, int64_t m, const uint8_t* packed,
                    const int8_t* exponent, int64_t rows, int64_t columns, int64_t groups, int64_t group_size,
                    void* out, Dtype dtype) {
  for (int64_t i = 0; i < m; ++i) {
    if (ids[i] < 0 || ids[i] >= rows) return i;
  }
  const int64_t strip_bytes = blocks_of(columns) * kBlockBytes;
  for_rows(m, columns, threads, [&](int64_t first, int64_t last, int) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t n = ids[i];
      kernels.lookup_row(packed + n / kBlockSide * strip_bytes, n % kBlockSide, exponent + n * groups, columns,
                         groups == 1 ? columns : group_size, static_cast<char*>(out) + i * columns * dtype_size(dtype),
                         dtype);
    }
  });
  return -1;
}

}  // namespace arb
