// Products: panels of rows, tiles of a decoded weight, a few rows times a packed one, and results.
#pragma once

#include "loops_weights.h"

namespace arb {
namespace {

template <int R>
inline void pack_int8_rows(const int8_t* x, int64_t stride, int64_t terms, int64_t steps, uint8_t flip,
                           uint8_t* panel) {
  const uint32_t flips = 0x01010101u * flip;
  const int64_t whole = terms / 4;
  for (int64_t step = 0; step < whole; ++step) {
    for (int r = 0; r < R; ++r) {
      const uint32_t four = static_cast<uint32_t>(load_dword(x + r * stride + 4 * step)) ^ flips;
      std::memcpy(panel + (step * R + r) * 4, &four, 4);
    }
  }
  for (int64_t step = whole; step < steps; ++step) {
    for (int r = 0; r < R; ++r) {
      for (int64_t i = 0; i < 4; ++i) {
        const int64_t term = 4 * step + i;
        const uint8_t value = term < terms ? static_cast<uint8_t>(x[r * stride + term]) : uint8_t{0};
        panel[(step * R + r) * 4 + i] = value ^ flip;
      }
    }
  }
}

// Calls `f` with the number of rows of a panel as a constant.
template <class F>
inline void by_rows(int64_t rows, F f) {
  switch (rows) {
    case 1:
      return f(Index<1>{});
    case 2:
      return f(Index<2>{});
    case 3:
      return f(Index<3>{});
    case 4:
      return f(Index<4>{});
    case 5:
      return f(Index<5>{});
    case 6:
      return f(Index<6>{});
    case 7:
      return f(Index<7>{});
    default:
      return f(Index<8>{});
  }
}

void pack_int8(const int8_t* x, int64_t stride, int64_t rows, int64_t terms, int64_t steps, uint8_t flip,
               uint8_t* panel) {
  by_rows(rows, [&](auto r) { pack_int8_rows<r.value>(x, stride, terms, steps, flip, panel); });
}

void pack_float(const void* x, Dtype dtype, int64_t stride, int64_t rows, int64_t terms, int64_t padded, void* to) {
  float* const panel = static_cast<float*>(to);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < padded; k += 16) {
      alignas(64) float sixteen[16] = {};
      if (k < terms) storef(sixteen, load_floats(element(x, dtype, r * stride + k), dtype, terms - k));
      for (int64_t i = 0; i < smaller(16, padded - k); ++i) panel[(k + i) * rows + r] = sixteen[i];
    }
  }
}

// What becomes of the sums of a row of a tile, which are in registers: put(row, sums of its strips), where the row is a
// constant. These are kept in memory.
struct KeepInts {
  int32_t* acc;

  template <class R, int S>
  [[gnu::always_inline]] void operator()(R r, const V (&sums)[S]) const {
    unroll<S>(ARB_UNROLLED(s) { store(acc + (r.value * S + s.value) * 16, sums[s.value]); });
  }
};

struct KeepFloats {
  float* acc;

  template <class R, int S>
  [[gnu::always_inline]] void operator()(R r, const F (&sums)[S]) const {
    unroll<S>(ARB_UNROLLED(s) { storef(acc + (r.value * S + s.value) * 16, sums[s.value]); });
  }
};

// Sixteen elements of a result, or `count`; `past` as in ProductKernels.
template <Dtype D>
inline void store_result(Of<D>, void* out, F f, int64_t count, [[maybe_unused]] bool past) {
#if defined(ARB_STREAMS)
  if (past && count >= 16) {
    if constexpr (D == Dtype::float32) {
      stream(out, as_bits(f));
    } else {
      alignas(64) char narrow[64];
      store_full(narrow, D, f);
      stream_half(out, narrow);
    }
    return;
  }
#endif
  store_floats(out, D, f, count);
}

// Thirty-two elements.
template <Dtype D>
inline void store_results(Of<D> of, void* out, F first, F second, bool past) {
#if defined(ARB_STREAMS)
  if (D == Dtype::bfloat16 && !any_nan(first, second)) {
    const V both = narrow_high(as_bits(nearest(of, first)), as_bits(nearest(of, second)));
    if (past) return stream(out, both);
    return store(out, both);
  }
#endif
  store_result(of, out, first, 16, past);
  store_result(of, element(out, D, 16), second, 16, past);
}

template <Dtype D, int S>
inline void store_strips(Of<D> of, void* row, const F (&y)[S], int64_t count, bool past) {
  if constexpr (S == 2) {
    if (count >= 32) return store_results(of, row, y[0], y[1], past);
  }
  unroll<S>(ARB_UNROLLED(s) {
    if (count > 16 * s.value) store_result(of, element(row, D, 16 * s.value), y[s.value], count - 16 * s.value, past);
  });
}

// And these become results.
template <Dtype D>
struct FinishInts {
  const Finish& to;

  template <class R, int S>
  [[gnu::always_inline]] void operator()(R r, const V (&sums)[S]) const {
    const F scale = splatf(to.row_scale[r.value]);
    F y[S];
    unroll<S>(ARB_UNROLLED(s) {
      const F sum = to_float(sub(sums[s.value], load(to.offset + 16 * s.value)));
      y[s.value] = mulf(mulf(sum, scale), loadf(to.column_scale + 16 * s.value));
      if (to.bias != nullptr) y[s.value] = addf(y[s.value], loadf(to.bias + 16 * s.value));
    });
    store_strips(Of<D>{}, element(to.out, D, r.value * to.out_stride), y, to.count, to.past);
  }
};

template <Dtype D>
struct FinishFloats {
  const Finish& to;

  template <class R, int S>
  [[gnu::always_inline]] void operator()(R r, const F (&sums)[S]) const {
    F y[S];
    unroll<S>(ARB_UNROLLED(s) {
      y[s.value] = sums[s.value];
      if (to.bias != nullptr) y[s.value] = addf(y[s.value], loadf(to.bias + 16 * s.value));
    });
    store_strips(Of<D>{}, element(to.out, D, r.value * to.out_stride), y, to.count, to.past);
  }
};

template <Dtype D>
inline FinishInts<D> finish_ints(Of<D>, const Finish& to) {
  return {to};
}

template <Dtype D>
inline FinishFloats<D> finish_floats(Of<D>, const Finish& to) {
  return {to};
}

// A panel of few rows leaves too few sums to hide the latency of a product, hence several sets of sums, used in turn.
template <int R, int S, class Put>
inline void tile_int8_of(int64_t steps, const uint8_t* panel, int64_t stride, const int8_t* weights, bool fresh,
                         const int32_t* acc, const Put& put) {
  constexpr int kWanted = 4 * kTileStrips;
  constexpr int kChains = 4 * R * S <= kWanted ? 4 : (2 * R * S <= kWanted ? 2 : 1);
  V sums[kChains][R * S];
  unroll<R * S>(ARB_UNROLLED(i) {
    sums[0][i.value] = fresh ? zero() : load(acc + i.value * 16);
    unroll<kChains - 1>(ARB_UNROLLED(c) { sums[c.value + 1][i.value] = zero(); });
  });
  // Steps come in fours, those of a block.
  for (int64_t step = 0; step < steps; step += kChains) {
    unroll<kChains>(ARB_UNROLLED(c) {
      V w[S];
      unroll<S>(ARB_UNROLLED(s) { w[s.value] = load(weights + (c.value * S + s.value) * kBlockBytes); });
      unroll<R>(ARB_UNROLLED(r) {
        const V x = splat(load_dword(panel + c.value * stride + 4 * r.value));
        unroll<S>(ARB_UNROLLED(s) {
          V& sum = sums[c.value][r.value * S + s.value];
          sum = dot(sum, w[s.value], x);
        });
      });
    });
    weights += kChains * S * kBlockBytes;
    panel += kChains * stride;
  }
  unroll<R>(ARB_UNROLLED(r) {
    V row[S];
    unroll<S>(ARB_UNROLLED(s) {
      row[s.value] = sums[0][r.value * S + s.value];
      unroll<kChains - 1>(ARB_UNROLLED(c) {
        row[s.value] = add(row[s.value], sums[c.value + 1][r.value * S + s.value]);
      });
    });
    put(r, row);
  });
}

#if defined(ARB_PAIR_SUMS)
// Sums of two products in 16 bits, which are widened before they could overflow: a pair of a step is at most 510 times
// the largest weight. Widening each of them would be half of the work.
//
// A function of its own: where more is done with the sums, gcc 12 copies them in every turn of the loop.
template <int R>
[[gnu::noinline]] void sum_pairs(int64_t steps, const uint8_t* panel, int64_t stride, const int8_t* weights, V* to) {
  V sums[R];
  unroll<R>(ARB_UNROLLED(r) { sums[r.value] = zero(); });
  // There is at least one; the compiler copies the sums in every turn of a loop that may have none.
  const int8_t* const end = weights + steps * kBlockBytes;
  do {
    const V w = load(weights);
    unroll<R>(ARB_UNROLLED(r) {
      add_pairs(sums[r.value], splat(load_dword(panel + 4 * r.value)), w);
    });
    weights += kBlockBytes;
    panel += stride;
  } while (weights != end);
  unroll<R>(ARB_UNROLLED(r) { to[r.value] = widen_pairs(sums[r.value]); });
}

template <int R, class Put>
inline void tile_pairs_of(int64_t steps, const uint8_t* panel, int64_t stride, const int8_t* weights, int spread,
                          bool fresh, const int32_t* acc, const Put& put) {
  const int64_t stretch = kPairSteps >> spread;
  V total[R];
  unroll<R>(ARB_UNROLLED(r) { total[r.value] = fresh ? zero() : load(acc + r.value * 16); });
  for (int64_t step = 0; step < steps; step += stretch) {
    V sums[R];
    sum_pairs<R>(smaller(stretch, steps - step), panel + step * stride, stride, weights + step * kBlockBytes, sums);
    unroll<R>(ARB_UNROLLED(r) { total[r.value] = add(total[r.value], sums[r.value]); });
  }
  unroll<R>(ARB_UNROLLED(r) {
    const V row[1] = {total[r.value]};
    put(r, row);
  });
}
#endif

template <int R, int S, class Put>
inline void tile_float_of(int64_t terms, const float* panel, const float* weights, bool fresh, const float* acc,
                          const Put& put) {
  F sums[R * S];
  unroll<R * S>(ARB_UNROLLED(i) { sums[i.value] = fresh ? splatf(0.0f) : loadf(acc + i.value * 16); });
  for (int64_t k = 0; k < terms; ++k) {
    F w[S];
    unroll<S>(ARB_UNROLLED(s) { w[s.value] = loadf(weights + s.value * 16); });
    unroll<R>(ARB_UNROLLED(r) {
      const F x = splatf(panel[r.value]);
      unroll<S>(ARB_UNROLLED(s) {
        F& sum = sums[r.value * S + s.value];
        sum = fma(w[s.value], x, sum);
      });
    });
    weights += S * 16;
    panel += R;
  }
  unroll<R>(ARB_UNROLLED(r) {
    F row[S];
    unroll<S>(ARB_UNROLLED(s) { row[s.value] = sums[r.value * S + s.value]; });
    put(r, row);
  });
}

// A panel has at most kTileRows (or kTileRowsFloat) rows; taller tiles would only spill registers.
template <int R, class Put>
inline void tile_int8_strips(int64_t steps, const uint8_t* panel, int64_t stride, const int8_t* weights, int64_t strips,
                             [[maybe_unused]] int spread, bool fresh, int32_t* acc, const Put& put) {
  if constexpr (R <= kTileRows) {
#if defined(ARB_PAIR_SUMS)
    if (spread <= kPairSpread) return tile_pairs_of<R>(steps, panel, stride, weights, spread, fresh, acc, put);
#endif
    if (kTileStrips == 1 || strips == 1) {
      tile_int8_of<R, 1>(steps, panel, stride, weights, fresh, acc, put);
    } else {
      tile_int8_of<R, kTileStrips>(steps, panel, stride, weights, fresh, acc, put);
    }
  }
}

template <int R, class Put>
inline void tile_float_strips(int64_t terms, const void* from, const void* decoded, int64_t strips, bool fresh,
                              const float* acc, const Put& put) {
  const float* const panel = static_cast<const float*>(from);
  const float* const weights = static_cast<const float*>(decoded);
  if constexpr (R <= kTileRowsFloat) {
    if (kTileStrips == 1 || strips == 1) {
      tile_float_of<R, 1>(terms, panel, weights, fresh, acc, put);
    } else {
      tile_float_of<R, kTileStrips>(terms, panel, weights, fresh, acc, put);
    }
  }
}

void tile_int8(int64_t rows, int64_t steps, const uint8_t* panel, int64_t stride, const int8_t* weights, int64_t strips,
               int spread, bool fresh, int32_t* acc) {
  by_rows(rows, [&](auto r) {
    tile_int8_strips<r.value>(steps, panel, stride, weights, strips, spread, fresh, acc, KeepInts{acc});
  });
}

void tile_finish_int8(int64_t rows, int64_t steps, const uint8_t* panel, int64_t stride, const int8_t* weights,
                      int64_t strips, int spread, int32_t* acc, const Finish& finish) {
  by_dtype(finish.dtype, [&](auto of) {
    by_rows(rows, [&](auto r) {
      tile_int8_strips<r.value>(steps, panel, stride, weights, strips, spread, true, acc, finish_ints(of, finish));
    });
  });
}

void tile_float(int64_t rows, int64_t terms, const void* panel, const void* weights, int64_t strips, bool fresh,
                float* acc) {
  by_rows(rows, [&](auto r) {
    tile_float_strips<r.value>(terms, panel, weights, strips, fresh, acc, KeepFloats{acc});
  });
}

void tile_finish_float(int64_t rows, int64_t terms, const void* panel, const void* weights, int64_t strips,
                       const Finish& finish) {
  by_dtype(finish.dtype, [&](auto of) {
    by_rows(rows, [&](auto r) {
      tile_float_strips<r.value>(terms, panel, weights, strips, true, nullptr, finish_floats(of, finish));
    });
  });
}

// Codes of a bit plane: where they are, worth 4**P times as much, if the dot product takes unsigned codes.
template <int P>
inline V plane(V block) {
  if (kUnsignedCodes) return bit_and(block, splat(static_cast<int32_t>(static_cast<uint32_t>(kCodeMask) << 2 * P)));
  return bit_and(shift_right<2 * P>(block), splat(kCodeMask));
}

template <int P>
inline V plane_sum(V sum) {
  return kUnsignedCodes ? shift_right_signed<2 * P>(sum) : sum;
}

// Blocks after which the sums of the planes are collected: those of the last are 64 times too large, and 64 blocks of
// 4 * 2 * 64 * 128 fit in 23 bits.
constexpr int64_t kRun = 64;
constexpr int64_t kPrefetchBytes = 16384;

#if defined(ARB_PAIR_SUMS)
// Blocks whose pairs of products fit in 16 bits: eight of 2 * 2 * 8 * 128.
constexpr int64_t kPairBlocks = 8;

// Sums of `blocks` blocks, one row. Two planes are moved down to the places of the others, so that products fit in 16
// bits and are widened once per kPairBlocks.
inline V few_pairs(const uint8_t*& block, const uint8_t*& panel, int64_t blocks) {
  V ones = zero(), fours = zero();
  const uint8_t* const end = block + blocks * kBlockBytes;
  // There is at least one; the compiler copies the sums in every turn of a loop that may have none.
  do {
    const V codes = load(block);
    const V moved = shift_right<4>(codes);
    prefetch_far(block + kPrefetchBytes);
    block += kBlockBytes;
    add_pairs(ones, plane<0>(codes), splat(load_dword(panel)));
    add_pairs(fours, plane<1>(codes), splat(load_dword(panel + 4)));
    add_pairs(ones, plane<0>(moved), splat(load_dword(panel + 8)));
    add_pairs(fours, plane<1>(moved), splat(load_dword(panel + 12)));
    panel += 4 * kStepsPerBlock;
  } while (block != end);
  return widen_pairs(add_quarters(ones, fours));
}
#endif

template <int R>
inline void few_sums(const uint8_t*& block, const uint8_t*& panel, int64_t blocks, V collected[R]) {
#if defined(ARB_PAIR_SUMS)
  static_assert(R == 1);
  collected[0] = zero();
  while (blocks > 0) {
    const int64_t some = smaller(kPairBlocks, blocks);
    collected[0] = add(collected[0], few_pairs(block, panel, some));
    blocks -= some;
  }
#else
  V sums[R][4];
  unroll<R>(ARB_UNROLLED(r) { unroll<4>(ARB_UNROLLED(p) { sums[r.value][p.value] = zero(); }); });
  const uint8_t* const end = block + blocks * kBlockBytes;
  // There is at least one; the compiler copies the sums in every turn of a loop that may have none.
  do {
    const V codes = load(block);
    prefetch_far(block + kPrefetchBytes);
    block += kBlockBytes;
    unroll<4>(ARB_UNROLLED(p) {
      const V in_place = plane<p.value>(codes);
      unroll<R>(ARB_UNROLLED(r) {
        V& sum = sums[r.value][p.value];
        sum = dot_codes(sum, in_place, splat(load_dword(panel + 4 * (p.value * R + r.value))));
      });
    });
    panel += 4 * R * kStepsPerBlock;
  } while (block != end);
  unroll<R>(ARB_UNROLLED(r) {
    const V low = add(plane_sum<0>(sums[r.value][0]), plane_sum<1>(sums[r.value][1]));
    const V high = add(plane_sum<2>(sums[r.value][2]), plane_sum<3>(sums[r.value][3]));
    collected[r.value] = add(low, high);
  });
#endif
}

template <int R>
inline void few_int8_of(const DecodeSource& from, const uint8_t* panel, const int32_t* group_sums, int32_t* acc) {
  V total[R];
  unroll<R>(ARB_UNROLLED(r) { total[r.value] = zero(); });
  const V floors = load(from.floors);
  const int64_t groups = (from.count + from.blocks_per_group - 1) / from.blocks_per_group;
  const uint8_t* block = from.blocks;
  int64_t i = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t stop = smaller(from.count, (group + 1) * from.blocks_per_group);
    const V shift = sub(block_exponents(from.exponents[0], group), floors);
    do {
      const int64_t some = smaller(kRun, stop - i);
      V sums[R];
      few_sums<R>(block, panel, some, sums);
      unroll<R>(ARB_UNROLLED(r) { total[r.value] = add(total[r.value], shift_left(sums[r.value], shift)); });
      i += some;
    } while (i < stop);
    // Codes are trits plus one.
    unroll<R>(ARB_UNROLLED(r) {
      total[r.value] = sub(total[r.value], shift_left(splat(group_sums[r.value * groups + group]), shift));
    });
  }
  unroll<R>(ARB_UNROLLED(r) { store(acc + 16 * r.value, total[r.value]); });
}

void few_int8(int64_t rows, const DecodeSource& source, const uint8_t* panel, const int32_t* sums, int32_t* acc) {
  if constexpr (kFewRows > 1) {
    switch (rows) {
      case 2:
        return few_int8_of<2>(source, panel, sums, acc);
      case 3:
        return few_int8_of<3>(source, panel, sums, acc);
      case 4:
        return few_int8_of<4>(source, panel, sums, acc);
      default:
        break;
    }
  }
  few_int8_of<1>(source, panel, sums, acc);
}

void sum_groups(const int8_t* x, int64_t terms, int64_t group_terms, int32_t* sums) {
  for (int64_t start = 0; start < terms; start += group_terms) {
    int32_t sum = 0;
    for (int64_t k = start; k < smaller(terms, start + group_terms); ++k) sum += x[k];
    *sums++ = sum;
  }
}

template <Dtype D>
inline void finish_int8_of(Of<D> of, const int32_t* acc, const int32_t* offset, int64_t rows, int64_t lanes,
                           int64_t count, const float* row_scale, const float* column_scale, const float* bias,
                           void* out, int64_t out_stride, bool past) {
  for (int64_t r = 0; r < rows; ++r) {
    const F scale = splatf(row_scale[r]);
    const auto finished = [&](int64_t n) {
      const F sum = to_float(sub(load(acc + r * lanes + n), load(offset + n)));
      const F y = mulf(mulf(sum, scale), loadf(column_scale + n));
      return bias == nullptr ? y : addf(y, loadf(bias + n));
    };
    void* const row = element(out, D, r * out_stride);
    int64_t n = 0;
    for (; n + 32 <= count; n += 32) store_results(of, element(row, D, n), finished(n), finished(n + 16), past);
    for (; n < count; n += 16) store_result(of, element(row, D, n), finished(n), count - n, past);
  }
}

void finish_int8(const int32_t* acc, const int32_t* offset, int64_t rows, int64_t lanes, int64_t count,
                 const float* row_scale, const float* column_scale, const float* bias, void* out, int64_t out_stride,
                 Dtype dtype, bool past) {
  by_dtype(dtype, [&](auto of) {
    finish_int8_of(of, acc, offset, rows, lanes, count, row_scale, column_scale, bias, out, out_stride, past);
  });
}

void finish_float(const float* acc, int64_t rows, int64_t lanes, int64_t count, const float* bias, void* out,
                  int64_t out_stride, Dtype dtype, bool past) {
  by_dtype(dtype, [&](auto of) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t n = 0; n < count; n += 16) {
        F y = loadf(acc + r * lanes + n);
        if (bias != nullptr) y = addf(y, loadf(bias + n));
        store_result(of, element(out, dtype, r * out_stride + n), y, count - n, past);
      }
    }
  });
}

}  // namespace
}  // namespace arb
