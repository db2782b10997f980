// What the bindings have in common: tensors come as addresses and sizes that the Python side has checked.
#pragma once

#include <cstdint>

#include "product_driver.h"

namespace {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

[[maybe_unused]] inline arb::Dtype dtype_of(int dtype) { return static_cast<arb::Dtype>(dtype); }

[[maybe_unused]] inline arb::Weight weight_of(Address packed, Address exponent, int64_t rows, int64_t columns,
                                              int64_t groups, int64_t group_size) {
  return {at<const uint8_t>(packed), at<const int8_t>(exponent), rows, columns, groups, group_size};
}

}  // namespace
