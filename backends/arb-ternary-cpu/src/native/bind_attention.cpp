// Bindings of attention: addresses and sizes that the Python side has checked, 0 for none.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>

#include "attention.h"
#include "bind.h"

namespace nb = nanobind;

namespace {

// Addresses of queries, keys, values, cosines and sines; batch, length, heads, key heads and features.
using Five = std::array<int64_t, 5>;
using FiveAddresses = std::array<Address, 5>;

arb::Attended attended(const FiveAddresses& from, int dtype, const Five& n, float query_eps, float key_eps) {
  return {at<const void>(from[0]), at<const void>(from[1]),  at<const void>(from[2]),  dtype_of(dtype), n[0], n[1],
          n[2],                    n[3],                     n[4],                     at<const float>(from[3]),
          at<const float>(from[4]), query_eps,               key_eps};
}

}  // namespace

void bind_attention(nb::module_& m) {
  const nb::call_guard<nb::gil_scoped_release> unlocked;
  m.def(
      "attend",
      [](int isa, int threads, const FiveAddresses& from, int dtype, const Five& sizes, float query_eps, float key_eps,
         Address seen, Address logs) {
        const arb::Attended of = attended(from, dtype, sizes, query_eps, key_eps);
        arb::attend({isa, threads}, arb::attention_kernels(isa, of.dtype), of, at<void>(seen), at<float>(logs));
      },
      unlocked);
  m.def(
      "attend_back",
      [](int isa, int threads, const FiveAddresses& from, int dtype, const Five& sizes, float query_eps, float key_eps,
         Address seen, Address logs, Address grad, Address grad_query, Address grad_key, Address grad_value) {
        const arb::Attended of = attended(from, dtype, sizes, query_eps, key_eps);
        arb::attend_back({isa, threads}, arb::attention_kernels(isa, of.dtype), of, at<const void>(seen),
                         at<const float>(logs), at<const void>(grad), at<void>(grad_query), at<void>(grad_key),
                         at<void>(grad_value));
      },
      unlocked);
}
