// Bindings of the kernels for votes: addresses and sizes that the Python side has checked; an address of 0 is "none".
#include <nanobind/nanobind.h>

#include <cstdint>

#include "bind.h"
#include "votes_apply.h"
#include "votes_linear.h"
#include "votes_lookup.h"
#include "votes_storage.h"

namespace nb = nanobind;

namespace {

const arb::VoteKernels& kernels_of(int isa) { return arb::vote_kernels(static_cast<arb::Isa>(isa)); }

// What every cast kernel is told about a weight and its accumulators.
struct Weight {
  Weight(int64_t n, int64_t k, int64_t group, int vote_bits, uintptr_t weight, uintptr_t accumulators,
         uintptr_t exponents, uintptr_t statistics, uintptr_t unit)
      : rows(n),
        columns(k),
        group_size(group),
        bits(vote_bits),
        packed(weight),
        votes(accumulators),
        exponent_votes(exponents),
        stats(statistics),
        scale(unit) {}

  int64_t rows, columns, group_size;
  int bits;
  uintptr_t packed, votes, exponent_votes, stats, scale;

  arb::CastState state() const {
    arb::CastState state;
    state.rows = rows;
    state.columns = columns;
    state.group_size = group_size;
    state.bits = bits;
    state.packed = at<const uint8_t>(packed);
    state.votes = at<uint8_t>(votes);
    state.exponent_votes = at<int8_t>(exponent_votes);
    state.stats = at<float>(stats);
    state.scale = at<const float>(scale);
    return state;
  }
};

// And about scaled votes.
struct Scaled {
  Scaled(uintptr_t sizes, uintptr_t factors, bool by_shifts, int largest, int shift, int narrower,
         uint64_t seed_word, uint64_t step_word, uint64_t stream_word)
      : magnitudes(sizes),
        vote_scale(factors),
        shifts(by_shifts),
        limit(largest),
        exponent_shift(shift),
        noise_shift(narrower),
        seed(seed_word),
        step(step_word),
        stream(stream_word) {}

  uintptr_t magnitudes, vote_scale;
  bool shifts;
  int limit, exponent_shift, noise_shift;
  uint64_t seed, step, stream;

  void add_to(arb::CastState& state) const {
    state.magnitudes = at<float>(magnitudes);
    state.vote_scale = at<const void>(vote_scale);
    state.rule = shifts ? arb::VoteRule::shifts : arb::VoteRule::factors;
    state.limit = limit;
    state.exponent_shift = exponent_shift;
    state.noise_shift = noise_shift;
    state.words = {seed, step, stream};
  }
};

void cast_linear(int isa, int threads, const Weight& weight, const Scaled* scaled, int grad_type, uintptr_t grad,
                 int x_type, uintptr_t x, int64_t tokens) {
  arb::CastState state = weight.state();
  if (scaled != nullptr) scaled->add_to(state);
  nb::gil_scoped_release released;
  arb::cast_linear(state, kernels_of(isa), static_cast<arb::Element>(grad_type), at<const void>(grad),
                   static_cast<arb::Element>(x_type), at<const void>(x), tokens, threads);
}

bool cast_lookup(int isa, int threads, const Weight& weight, const Scaled* scaled, uintptr_t correlation,
                 uintptr_t steps, uintptr_t ids, int grad_type, uintptr_t grad, int64_t tokens) {
  arb::CastState state = weight.state();
  state.correlation = at<int16_t>(correlation);
  state.steps = at<int32_t>(steps);
  if (scaled != nullptr) scaled->add_to(state);
  nb::gil_scoped_release released;
  return arb::cast_lookup(state, kernels_of(isa), at<const int64_t>(ids), static_cast<arb::Element>(grad_type),
                          at<const void>(grad), tokens, threads);
}

// Vectors, each a tuple: weight, rule of scaled votes or None, gradient, control words, whose last counts the casts.
void cast_vectors(int isa, const nb::list& vectors) {
  for (nb::handle each : vectors) {
    const nb::tuple vector = nb::cast<nb::tuple>(each);
    arb::CastState state = nb::cast<const Weight&>(vector[0]).state();
    if (!vector[1].is_none()) nb::cast<const Scaled&>(vector[1]).add_to(state);
    arb::cast_repeated(state, kernels_of(isa), at<const float>(nb::cast<uintptr_t>(vector[2])));
    at<int64_t>(nb::cast<uintptr_t>(vector[3]))[3] += 1;
  }
}

// Vectors, each a tuple: packed weight, exponents, rows, columns, values.
void sum_vectors(const nb::list& vectors) {
  for (nb::handle each : vectors) {
    const nb::tuple vector = nb::cast<nb::tuple>(each);
    const auto number = [&](size_t i) { return nb::cast<int64_t>(vector[i]); };
    const auto address = [&](size_t i) { return nb::cast<uintptr_t>(vector[i]); };
    arb::sum_rows(at<const uint8_t>(address(0)), at<const int8_t>(address(1)), number(2), number(3),
                  at<float>(address(4)));
  }
}

int64_t flip_trits(int isa, int threads, int64_t rows, int64_t columns, int bits, uintptr_t packed, uintptr_t votes,
                   int threshold, int leak, uint32_t decay, bool carry, uint64_t seed, uint64_t step, uint64_t stream,
                   int64_t first_row) {
  arb::FlipRule rule;
  rule.threshold = threshold;
  rule.leak = leak;
  rule.decay = decay;
  rule.carry = carry;
  const arb::FlipState state = {rows, columns, bits, at<uint8_t>(packed), at<uint8_t>(votes), first_row};
  nb::gil_scoped_release released;
  return arb::flip_trits(state, kernels_of(isa), rule, {seed, step, stream}, threads);
}

int64_t flip_exponents(int isa, int threads, uintptr_t exponent, uintptr_t votes, uintptr_t origin, int64_t row_stride,
                       int64_t group_stride, int64_t rows, int64_t groups, int threshold, int band, int leak) {
  arb::ExponentRule rule;
  rule.threshold = threshold;
  rule.band = band;
  rule.leak = leak;
  nb::gil_scoped_release released;
  return arb::flip_exponents(at<int8_t>(exponent), at<int8_t>(votes), at<const int8_t>(origin), row_stride,
                             group_stride, rows, groups, kernels_of(isa), rule, threads);
}

void pack_votes(uintptr_t votes, int64_t rows, int64_t columns, int bits, uintptr_t out, int threads) {
  nb::gil_scoped_release released;
  arb::pack_votes(at<const int8_t>(votes), rows, columns, bits, at<uint8_t>(out), threads);
}

void unpack_votes(uintptr_t stored, int64_t rows, int64_t columns, int bits, uintptr_t out, int threads) {
  nb::gil_scoped_release released;
  arb::unpack_votes(at<const uint8_t>(stored), rows, columns, bits, at<int8_t>(out), threads);
}

}  // namespace

void bind_votes(nb::module_& m) {
  nb::class_<Weight>(m, "Weight")
      .def(nb::init<int64_t, int64_t, int64_t, int, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t>());
  nb::class_<Scaled>(m, "Scaled").def(nb::init<uintptr_t, uintptr_t, bool, int, int, int, uint64_t, uint64_t, uint64_t>());
  m.def("cast_linear", &cast_linear, nb::arg("isa"), nb::arg("threads"), nb::arg("weight"), nb::arg("scaled").none(),
        nb::arg("grad_type"), nb::arg("grad"), nb::arg("x_type"), nb::arg("x"), nb::arg("tokens"));
  m.def("cast_lookup", &cast_lookup, nb::arg("isa"), nb::arg("threads"), nb::arg("weight"), nb::arg("scaled").none(),
        nb::arg("correlation"), nb::arg("steps"), nb::arg("ids"), nb::arg("grad_type"), nb::arg("grad"),
        nb::arg("tokens"));
  m.def("cast_vectors", &cast_vectors);
  m.def("sum_vectors", &sum_vectors);
  m.def("flip_trits", &flip_trits);
  m.def("flip_exponents", &flip_exponents);
  m.def("pack_votes", &pack_votes);
  m.def("unpack_votes", &unpack_votes);
}
