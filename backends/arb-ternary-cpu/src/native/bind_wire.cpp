// Bindings of what travels between ranks: addresses and sizes that the Python side has checked.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "bind.h"
#include "wire.h"

namespace nb = nanobind;

namespace {

const arb::WireKernels& kernels_of(int isa) { return arb::wire_kernels(static_cast<arb::Isa>(isa)); }

bool pack_digits(int isa, int threads, int base, uintptr_t values, int64_t count, uintptr_t out) {
  nb::gil_scoped_release released;
  return arb::pack_digits(kernels_of(isa), base, at<const int16_t>(values), count, at<uint8_t>(out), threads);
}

void add_digits(int isa, int threads, int base, uintptr_t packed, int64_t count, uintptr_t total, bool wide) {
  nb::gil_scoped_release released;
  if (wide) {
    arb::add_digits(kernels_of(isa), base, at<const uint8_t>(packed), count, at<int32_t>(total), threads);
  } else {
    arb::add_digits(kernels_of(isa), base, at<const uint8_t>(packed), count, at<int16_t>(total), threads);
  }
}

void sums_to_quanta(int isa, int threads, uintptr_t sums, bool wide, int64_t count, int whole, int fraction,
                    uint64_t seed, uint64_t step, uint64_t stream, uint64_t start, uintptr_t out) {
  const arb::VoteUnit unit = {whole, fraction};
  const arb::HashWords words = {seed, step, stream};
  nb::gil_scoped_release released;
  if (wide) {
    arb::sums_to_quanta(kernels_of(isa), at<const int32_t>(sums), count, unit, words, start, at<int32_t>(out), threads);
  } else {
    arb::sums_to_quanta(kernels_of(isa), at<const int16_t>(sums), count, unit, words, start, at<int32_t>(out), threads);
  }
}

void settle_votes(int isa, int threads, uintptr_t whole, bool wide, int64_t rows, int64_t columns, int bits, int low,
                  int high, uintptr_t votes) {
  const arb::VoteRange range = {low, high};
  const arb::WireKernels& kernels = kernels_of(isa);
  nb::gil_scoped_release released;
  if (wide) {
    arb::settle_votes(kernels, at<const int32_t>(whole), rows, columns, bits, range, at<uint8_t>(votes), threads);
  } else {
    arb::settle_votes(kernels, at<const int16_t>(whole), rows, columns, bits, range, at<uint8_t>(votes), threads);
  }
}

void count_flips(int threads, uintptr_t before, uintptr_t after, int64_t strips, int64_t columns, uintptr_t counts) {
  nb::gil_scoped_release released;
  arb::count_flips(at<const uint8_t>(before), at<const uint8_t>(after), strips, columns, at<int64_t>(counts), threads);
}

void list_flips(int threads, uintptr_t before, uintptr_t after, int64_t strips, int64_t columns, uintptr_t first,
                uintptr_t places, uintptr_t directions) {
  nb::gil_scoped_release released;
  arb::list_flips(at<const uint8_t>(before), at<const uint8_t>(after), strips, columns, at<const int64_t>(first),
                  at<int64_t>(places), at<int8_t>(directions), threads);
}

int apply_flips(uintptr_t packed, int64_t rows, int64_t columns, uintptr_t places, uintptr_t directions,
                int64_t count) {
  nb::gil_scoped_release released;
  return static_cast<int>(arb::apply_flips(at<uint8_t>(packed), rows, columns, at<const int64_t>(places),
                                           at<const int8_t>(directions), count));
}

}  // namespace

void bind_wire(nb::module_& m) {
  m.def("pack_digits", &pack_digits);
  m.def("add_digits", &add_digits);
  m.def("sums_to_quanta", &sums_to_quanta);
  m.def("settle_votes", &settle_votes);
  m.def("count_flips", &count_flips);
  m.def("list_flips", &list_flips);
  m.def("apply_flips", &apply_flips);
}
