// Random weights, operands and rules: every instruction set against `scalar`, byte for byte.
//
// Floats are small whole numbers, so that sums of products are exact in any order. All buffers have exactly the size
// that the kernels are told, so that an address sanitizer sees a step beyond them. Arguments: rounds, first seed;
// compiled with -DARB_FUZZ and libFuzzer it takes its seeds from the fuzzer.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "rounds.h"
#include "threads.h"
#include "votes_apply.h"
#include "votes_linear.h"
#include "votes_lookup.h"
#include "votes_storage.h"

namespace {

// A weight and everything that a kernel changes.
struct Layer {
  int64_t rows, columns, group_size;
  int bits;
  std::vector<uint8_t> packed, votes;
  std::vector<int8_t> exponent_votes;
  std::vector<float> stats, magnitudes;

  Layer(Random& random, int64_t n, int64_t k, int64_t group, int vote_bits)
      : rows(n), columns(k), group_size(group), bits(vote_bits) {
    const int64_t across = arb::ceil_div(k, arb::kBlock);
    packed.assign(static_cast<size_t>(arb::ceil_div(n, arb::kBlock) * across * 4 * arb::kBlock), 0x55);
    for (int64_t i = 0; i < n * k; ++i) {
      const int64_t row = i / k, column = i % k;
      const int64_t block = row / arb::kBlock * across + column / arb::kBlock;
      uint8_t& byte = packed[static_cast<size_t>(block * 64 + row % arb::kBlock * 4 + column % 4)];
      const int shift = static_cast<int>(column % arb::kBlock / 4 * 2);
      byte = static_cast<uint8_t>((byte & ~(3 << shift)) | (static_cast<int>(random.within(0, 2)) << shift));
    }
    const int largest = bits == 8 ? 127 : bits == 4 ? 7 : 1;
    const std::vector<int8_t> open = random.numbers<int8_t>(n * k, bits == 8 ? -128 : -largest, largest);
    votes.resize(static_cast<size_t>(n * arb::vote_row_bytes(k, bits)));
    if (bits == 8) {
      votes.assign(open.begin(), open.end());
    } else {
      arb::pack_votes(open.data(), n, k, bits, votes.data(), 1);
    }
    exponent_votes = random.numbers<int8_t>(n * arb::ceil_div(k, group), -127, 127);
    stats.assign(static_cast<size_t>(1 + n + k), 0.0f);
    magnitudes.assign(static_cast<size_t>(n + k), 0.0f);
  }

  arb::CastState state(const arb::CastState& rule) {
    arb::CastState state = rule;
    state.rows = rows;
    state.columns = columns;
    state.group_size = group_size;
    state.bits = bits;
    state.packed = packed.data();
    state.votes = votes.data();
    state.exponent_votes = exponent_votes.data();
    state.stats = stats.data();
    if (rule.rule != arb::VoteRule::sign) state.magnitudes = magnitudes.data();
    return state;
  }

  bool operator==(const Layer& other) const {
    return packed == other.packed && votes == other.votes && exponent_votes == other.exponent_votes &&
           stats == other.stats && magnitudes == other.magnitudes;
  }
};

// A layer twice: for the instruction set under test and for `scalar`.
class Pair {
 public:
  Pair(const Layer& layer, arb::Isa isa)
      : layers_{layer, layer}, kernels_{&arb::vote_kernels(isa), &arb::vote_kernels(arb::Isa::scalar)}, isa_(isa) {}

  template <class F>
  void check(const char* what, F f) {
    for (size_t i = 0; i < 2; ++i) f(layers_[i], *kernels_[i], i == 0 ? 2 : 1);
    if (layers_[0] == layers_[1]) return;
    std::printf("%s: %s differs for N %lld, K %lld, G %lld, %d bits\n", arb::isa_name(isa_), what,
                static_cast<long long>(layers_[0].rows), static_cast<long long>(layers_[0].columns),
                static_cast<long long>(layers_[0].group_size), layers_[0].bits);
    std::exit(1);
  }

 private:
  Layer layers_[2];
  const arb::VoteKernels* kernels_[2];
  arb::Isa isa_;
};

void round(uint64_t seed) {
  Random random(seed);
  const int64_t tokens = random.within(0, 40), rows = random.within(1, 60), columns = random.within(1, 1200);
  const int64_t groups[] = {32, 64, 128, 256, 16, columns};
  const int bits[] = {8, 8, 4, 2};
  const Layer layer(random, rows, columns, groups[random.within(0, 5)], bits[random.within(0, 3)]);

  const auto grad = random.numbers<int8_t>(tokens * rows, -128, 127);
  const auto x = random.numbers<int8_t>(tokens * columns, -128, 127);
  const auto float_grad = random.numbers<float>(tokens * rows, -3, 3);
  const auto float_x = random.numbers<float>(tokens * columns, -3, 3);
  // The upper halves of floats that hold nothing in the lower.
  std::vector<uint16_t> pair_grad(float_grad.size());
  for (size_t i = 0; i < pair_grad.size(); ++i) {
    uint32_t word;
    std::memcpy(&word, &float_grad[i], sizeof word);
    pair_grad[i] = static_cast<uint16_t>(word >> 16);
  }
  const auto repeated = random.numbers<float>(rows, -3, 3);
  const auto ids = random.numbers<int64_t>(tokens, 0, rows - 1);
  const auto shifts = random.numbers<int32_t>(rows + columns, random.within(-10, 4), random.within(4, 17));
  auto factors = random.numbers<float>(rows + columns, 1, 1000);
  for (float& factor : factors) factor *= 1e-4f;
  const float scale = 0.25f;

  arb::CastState rule;
  rule.rule = static_cast<arb::VoteRule>(random.within(0, 2));
  const bool integer_only = rule.rule == arb::VoteRule::shifts;
  if (rule.rule != arb::VoteRule::sign) {
    rule.vote_scale = integer_only ? static_cast<const void*>(shifts.data()) : factors.data();
    rule.limit = static_cast<int32_t>(random.within(1, 127 * 256));
    rule.exponent_shift = static_cast<int32_t>(random.within(0, 31));
    if (!integer_only && random.within(0, 1) == 1) rule.noise_shift = static_cast<int32_t>(random.within(1, 16));
    rule.words = {seed, seed + 1, 8 * seed};
  }
  arb::FlipRule flip;
  flip.threshold = static_cast<int32_t>(random.within(1, layer.bits == 8 ? 127 : layer.bits == 4 ? 7 : 1));
  flip.leak = static_cast<int32_t>(random.within(0, 2));
  flip.decay = random.within(0, 1) == 0 ? 0 : static_cast<uint32_t>(random.within(0, 65536));
  flip.carry = random.within(0, 1) == 1;

  for (const arb::Isa isa : arb::usable_isas()) {
    Pair pair(layer, isa);
    pair.check("a cast of int8", [&](Layer& held, const arb::VoteKernels& kernels, int threads) {
      arb::CastState state = held.state(rule);
      state.scale = &scale;
      arb::cast_linear(state, kernels, arb::Element::int8, grad.data(), arb::Element::int8, x.data(), tokens, threads);
    });
    pair.check("a lookup of int8", [&](Layer& held, const arb::VoteKernels& kernels, int threads) {
      arb::CastState state = held.state(rule);
      state.scale = &scale;
      arb::cast_lookup(state, kernels, ids.data(), arb::Element::int8, x.data(), tokens, threads);
    });
    if (!integer_only) {
      pair.check("a cast of floats", [&](Layer& held, const arb::VoteKernels& kernels, int threads) {
        arb::cast_linear(held.state(rule), kernels, arb::Element::float32, float_grad.data(), arb::Element::float32,
                         float_x.data(), tokens, threads);
      });
      pair.check("a cast of bfloat16", [&](Layer& held, const arb::VoteKernels& kernels, int threads) {
        arb::cast_linear(held.state(rule), kernels, arb::Element::bfloat16, pair_grad.data(), arb::Element::int8,
                         x.data(), tokens, threads);
      });
      pair.check("a lookup of floats", [&](Layer& held, const arb::VoteKernels& kernels, int threads) {
        arb::cast_lookup(held.state(rule), kernels, ids.data(), arb::Element::float32, float_x.data(), tokens, threads);
      });
      pair.check("a repeated gradient", [&](Layer& held, const arb::VoteKernels& kernels, int) {
        arb::cast_repeated(held.state(rule), kernels, repeated.data());
      });
    }
    pair.check("a flip", [&](Layer& held, const arb::VoteKernels& kernels, int threads) {
      const arb::FlipState state = {held.rows, held.columns, held.bits, held.packed.data(), held.votes.data()};
      // The count of flips is compared, too.
      held.stats[0] += static_cast<float>(arb::flip_trits(state, kernels, flip, {seed, 1, 2}, threads));
    });
  }
}

}  // namespace

#include "check_main.h"
