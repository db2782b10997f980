// Random products through the drivers, every instruction set against the scalar one, and that against plain loops.
//
// Needs neither Python nor torch, so that it also runs under an emulator (`make emulate`) and under the sanitizers, and
// as a fuzz target: compiled with -DARB_FUZZ and libFuzzer it takes its sizes from the fuzzer.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "isa.h"
#include "product_driver.h"
#include "rows_driver.h"
#include "threads.h"

namespace {

using namespace arb;

uint64_t state = 1;

uint64_t draw() {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

int64_t draw(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(draw() % static_cast<uint64_t>(high - low + 1));
}

template <class T>
std::vector<T> numbers(int64_t count, int64_t low, int64_t high) {
  std::vector<T> values(static_cast<size_t>(count));
  for (T& value : values) value = static_cast<T>(draw(low, high));
  return values;
}

#define REQUIRE(condition)                                                 \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                        \
    }                                                                      \
  } while (false)

struct Case {
  int64_t m, n, k, group_size;
  int lowest, spread, threads;
};

float power(int exponent) {
  const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

void check(const Case& c, const std::vector<const ProductKernels*>& tables) {
  const int64_t groups = (c.k + c.group_size - 1) / c.group_size;
  const auto trits = numbers<int8_t>(c.n * c.k, -1, 1);
  const auto exponent = numbers<int8_t>(c.n * groups, c.lowest, c.lowest + c.spread);
  const auto x = numbers<int8_t>(c.m * c.k, -128, 127);
  const auto grad = numbers<int8_t>(c.m * c.n, -128, 127);
  std::vector<float> scale, floats, bias;
  for (int64_t i = 0; i < c.m; ++i) scale.push_back(static_cast<float>(draw(1, 1000)) * 0.001f);
  for (int64_t i = 0; i < c.m * c.k; ++i) floats.push_back(static_cast<float>(draw(-1000, 1000)) * 0.01f);
  for (int64_t i = 0; i < c.n; ++i) bias.push_back(static_cast<float>(draw(-1000, 1000)));
  std::vector<uint8_t> packed(static_cast<size_t>(blocks_of(c.n) * blocks_of(c.k) * kBlockBytes));
  REQUIRE(pack_trits(c.threads, trits.data(), c.n, c.k, packed.data()));
  std::vector<int8_t> back(trits.size());
  unpack_trits(c.threads, packed.data(), c.n, c.k, back.data());
  REQUIRE(back == trits);
  const Weight weight{packed.data(), exponent.data(), c.n, c.k, groups, c.group_size};

  // Plain loops, in 64 bits.
  std::vector<float> wanted(static_cast<size_t>(c.m * c.n)), wanted_grad(static_cast<size_t>(c.m * c.k));
  for (int64_t n = 0; n < c.n; ++n) {
    const int8_t* const row = exponent.data() + n * groups;
    int floor = 127;
    for (int64_t g = 0; g < groups; ++g) floor = row[g] < floor ? row[g] : floor;
    for (int64_t m = 0; m < c.m; ++m) {
      int64_t sum = 0;
      for (int64_t k = 0; k < c.k; ++k) {
        sum +=
            static_cast<int64_t>(x[m * c.k + k]) * trits[n * c.k + k] * (int64_t{1} << (row[k / c.group_size] - floor));
      }
      const float y = static_cast<float>(sum) * scale[m] * power(floor);
      wanted[m * c.n + n] = y + bias[n];
    }
  }
  for (int64_t k = 0; k < c.k; ++k) {
    const int64_t g = k / c.group_size;
    int floor = 127;
    for (int64_t n = 0; n < c.n; ++n) floor = exponent[n * groups + g] < floor ? exponent[n * groups + g] : floor;
    for (int64_t m = 0; m < c.m; ++m) {
      int64_t sum = 0;
      for (int64_t n = 0; n < c.n; ++n) {
        sum += static_cast<int64_t>(grad[m * c.n + n]) * trits[n * c.k + k] *
               (int64_t{1} << (exponent[n * groups + g] - floor));
      }
      wanted_grad[m * c.k + k] = static_cast<float>(sum) * 0.125f * power(floor);
    }
  }

  for (const ProductKernels* const table : tables) {
    std::vector<float> y(wanted.size()), grad_x(wanted_grad.size());
    REQUIRE(linear_int8(*table, c.threads, weight, x.data(), scale.data(), c.m, bias.data(), y.data(),
                        Dtype::float32) <= c.spread);
    REQUIRE(std::memcmp(y.data(), wanted.data(), y.size() * 4) == 0);
    grad_input_int8(*table, c.threads, weight, grad.data(), 0.125f, c.m, grad_x.data(), Dtype::float32);
    REQUIRE(std::memcmp(grad_x.data(), wanted_grad.data(), grad_x.size() * 4) == 0);

    // Whole numbers in float32 are summed exactly while they are small.
    if (c.spread == 0 && c.k < 1000) {
      std::vector<float> small(x.begin(), x.end());
      linear_float(*table, c.threads, weight, small.data(), Dtype::float32, c.m, nullptr, y.data(), Dtype::float32);
      for (int64_t i = 0; i < c.m * c.n; ++i) {
        int64_t sum = 0;
        for (int64_t k = 0; k < c.k; ++k) sum += static_cast<int64_t>(x[i / c.n * c.k + k]) * trits[i % c.n * c.k + k];
        REQUIRE(y[i] == static_cast<float>(sum) * power(c.lowest));
      }
    }

    // So are bfloat16, which holds every int8.
    if (c.spread == 0 && c.k < 1000) {
      const auto bfloat16 = [](const std::vector<int8_t>& from) {
        std::vector<uint16_t> words;
        for (const int8_t value : from) {
          const float wide = value;
          uint32_t bits;
          std::memcpy(&bits, &wide, 4);
          words.push_back(static_cast<uint16_t>(bits >> 16));
        }
        return words;
      };
      const std::vector<float> same(static_cast<size_t>(c.m), 1.0f);
      std::vector<float> exact(y.size()), exact_grad(grad_x.size());
      linear_int8(*table, 1, weight, x.data(), same.data(), c.m, nullptr, exact.data(), Dtype::float32);
      linear_float(*table, c.threads, weight, bfloat16(x).data(), Dtype::bfloat16, c.m, nullptr, y.data(),
                   Dtype::float32);
      REQUIRE(y == exact);
      grad_input_int8(*table, 1, weight, grad.data(), 1.0f, c.m, exact_grad.data(), Dtype::float32);
      grad_input_float(*table, c.threads, weight, bfloat16(grad).data(), Dtype::bfloat16, c.m, grad_x.data(),
                       Dtype::float32);
      REQUIRE(grad_x == exact_grad);
    }

    // Rows: the same bits as the scalar loops, in every dtype.
    for (const Dtype dtype : {Dtype::float32, Dtype::bfloat16, Dtype::float16}) {
      const int64_t width = dtype_size(dtype);
      std::vector<uint8_t> row_bytes(static_cast<size_t>(c.m * c.k * width));
      for (size_t i = 0; i < row_bytes.size(); ++i) row_bytes[i] = static_cast<uint8_t>(draw());
      const ProductKernels* const both[2] = {&products_scalar(), table};
      std::vector<int8_t> q[2];
      std::vector<float> scales[2];
      std::vector<uint8_t> rows[2];
      float units[2];
      const auto ids = numbers<int64_t>(5, 0, c.n - 1);
      for (int i = 0; i < 2; ++i) {
        q[i].resize(static_cast<size_t>(2 * c.m * c.k));
        scales[i].resize(static_cast<size_t>(c.m));
        rows[i].resize(static_cast<size_t>(5 * c.k * width));
        quantize_rows(*both[i], c.threads, row_bytes.data(), dtype, c.m, c.k, q[i].data(), scales[i].data());
        for (float& s : scales[i]) s = s == s ? s : -1.0f;
        units[i] = quantize_gradient(*both[i], c.threads, row_bytes.data(), dtype, c.m * c.k, {1, 2, 3},
                                     q[i].data() + c.m * c.k);
        REQUIRE(lookup_rows(*both[i], c.threads, ids.data(), 5, packed.data(), exponent.data(), c.n, c.k, groups,
                            c.group_size, rows[i].data(), dtype) == -1);
      }
      REQUIRE(q[0] == q[1]);
      REQUIRE(scales[0] == scales[1]);
      REQUIRE(units[0] == units[1]);
      REQUIRE(rows[0] == rows[1]);
    }
  }
}

std::vector<const ProductKernels*> usable_tables() {
  std::vector<const ProductKernels*> tables;
  for (const Isa isa : usable_isas()) tables.push_back(&product_kernels(static_cast<int>(isa)));
  return tables;
}

Case drawn() {
  Case c;
  c.m = draw(1, draw(0, 3) == 0 ? 80 : 9);
  c.n = draw(1, 70);
  c.k = draw(1, draw(0, 3) == 0 ? 1200 : 200);
  c.group_size = draw(0, 4) == 0 ? c.k : 16 << draw(0, 4);
  c.spread = static_cast<int>(draw(0, 2) == 0 ? draw(0, 40) : draw(0, 6));
  c.lowest = static_cast<int>(draw(-60, -40));
  c.threads = static_cast<int>(draw(1, 3));
  return c;
}

}  // namespace

#if defined(ARB_FUZZ)
extern "C" int LLVMFuzzerInitialize(int*, char***) {
  arb::prepare_threads();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  state = 0x9E3779B97F4A7C15ull;
  for (size_t i = 0; i < size; ++i) state = (state ^ data[i]) * 0xBF58476D1CE4E5B9ull + 1;
  check(drawn(), usable_tables());
  return 0;
}
#else
int main(int argc, char** argv) {
  arb::prepare_threads();
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 200;
  state = argc > 2 ? std::strtoull(argv[2], nullptr, 10) | 1 : 1;
  const auto tables = usable_tables();
  for (int i = 0; i < rounds; ++i) check(drawn(), tables);
  std::printf("%d rounds on", rounds);
  for (const Isa isa : usable_isas()) std::printf(" %s", isa_name(isa));
  std::printf(": the same bits\n");
}
#endif
