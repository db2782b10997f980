// Bindings of attention: addresses and sizes that the Python side has checked, 0 for none.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>

#include "attention.h"
#include "bind.h"

namespace nb = nanobind;

namespace {

// Addresses of queries, keys, values, cosines, sines, and gains of queries and of keys; batch, length, heads, key heads
// and features.
using Five = std::array<int64_t, 5>;
using Seven = std::array<Address, 7>;

arb::Attended attended(const Seven& from, int dtype, const Five& n, float query_eps, float key_eps) {
  const auto floats = [&](size_t i) { return at<const float>(from[i]); };
  return {at<const void>(from[0]), at<const void>(from[1]), at<const void>(from[2]), dtype_of(dtype), n[0],
          n[1], n[2], n[3], n[4], floats(3), floats(4), query_eps, key_eps, floats(5), floats(6)};
}

}  // namespace

void bind_attention(nb::module_& m) {
  const nb::call_guard<nb::gil_scoped_release> unlocked;
  m.def(
      "attend",
      [](int isa, int threads, const Seven& from, int dtype, const Five& sizes, float query_eps, float key_eps,
         Address seen, Address logs) {
        const arb::Attended of = attended(from, dtype, sizes, query_eps, key_eps);
        arb::attend({isa, threads}, arb::attention_kernels(isa, of.dtype), of, at<void>(seen), at<float>(logs));
      },
      unlocked);
  m.def(
      "attend_back",
      [](int isa, int threads, const Seven& from, int dtype, const Five& sizes, float query_eps, float key_eps,
         Address seen, Address logs, Address grad, const std::array<Address, 5>& grads) {
        const arb::Attended of = attended(from, dtype, sizes, query_eps, key_eps);
        arb::attend_back({isa, threads}, arb::attention_kernels(isa, of.dtype), of, at<const void>(seen),
                         at<const float>(logs), at<const void>(grad), at<void>(grads[0]), at<void>(grads[1]),
                         at<void>(grads[2]), at<float>(grads[3]), at<float>(grads[4]));
      },
      unlocked);
}
