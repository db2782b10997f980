// Products of bfloat16 with AVX-512: two terms a lane and instruction. All else is as with AVX-512 VNNI.
//
// Every product is exact; the two of a lane are added to its sum one after the other, each addition rounded to nearest.
#include "simd_avx512vnni.h"

// The loops are written in what comes first.
#include "loops_common.h"

namespace arb {
namespace {

constexpr int64_t kPairRows = 8;
constexpr int64_t kTermBytes = 2;
// Fields of a bfloat16.
constexpr int32_t kExponentBit = 7;

template <int R>
inline void pack_rows(const uint16_t* x, int64_t stride, int64_t terms, int64_t padded, uint32_t* panel) {
  for (int64_t k = 0; k + 1 < terms; k += 2) {
    for (int r = 0; r < R; ++r) std::memcpy(panel++, x + r * stride + k, 4);
  }
  if (terms % 2 != 0) {
    for (int r = 0; r < R; ++r) *panel++ = x[r * stride + terms - 1];
  }
  std::memset(panel, 0, static_cast<size_t>((padded - terms) / 2 * R * 4));
}

// Calls f(Index<rows>) for 1 to 8 rows.
template <class F>
inline void for_rows(int64_t rows, F f) {
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

void pack(const void* x, Dtype, int64_t stride, int64_t rows, int64_t terms, int64_t padded, void* panel) {
  const auto* from = static_cast<const uint16_t*>(x);
  auto* to = static_cast<uint32_t*>(panel);
  for_rows(rows, [=](auto r) { pack_rows<r.value>(from, stride, terms, padded, to); });
}

// Bytes 0 and 1, or 2 and 3, of every dword, each twice.
inline V first_pair() {
  return _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13));
}
inline V second_pair() {
  return _mm512_broadcast_i32x4(_mm_setr_epi8(2, 2, 3, 3, 6, 6, 7, 7, 10, 10, 11, 11, 14, 14, 15, 15));
}

// -1, 0 and 1 in bfloat16 by their codes: the low bytes, then from 4 on the high bytes.
inline V trit_table() {
  return _mm512_broadcast_i32x4(_mm_setr_epi8(static_cast<char>(0x80), 0, static_cast<char>(0x80), 0,
                                              static_cast<char>(0xBF), 0, 0x3F, 0, 0, 0, 0, 0, 0, 0, 0, 0));
}

// The trits whose codes are the low two bits of bytes 2i and 2i + 1, times 2**E, which is added to the exponents.
inline V pair(V twice, V exponents) {
  const V codes = select_bits(twice, splat(kCodeMask), splat(0x04000400));
  const V trits = lookup(trit_table(), codes);
  return _mm512_maskz_add_epi16(_mm512_test_epi16_mask(trits, trits), trits, exponents);
}

inline V in_both_words(V exponents) {
  const V low = bit_and(shift_left<kExponentBit>(exponents), splat(0xFFFF));
  return bit_or(low, shift_left<16>(low));
}

template <bool AlongRows>
inline void decode_strip(const DecodeSource& from, int64_t strip, uint8_t* weights) {
  const V first = first_pair(), second = second_pair();
  const uint8_t* block = from.blocks + strip * from.strip_stride;
  const uint8_t* exponents = from.exponents[strip];
  int64_t group = from.group[strip] + from.first_block / from.blocks_per_group;
  int64_t left = from.blocks_per_group - from.first_block % from.blocks_per_group;
  V same = in_both_words(block_exponents(exponents, group));
  alignas(64) int32_t by_row[16];
  // Copies, because for all the compiler knows the weights are written over `from`.
  const int64_t count = from.count, stride = from.block_stride, width = from.strips * kBlockBytes;
  const int64_t per_group = from.blocks_per_group, exponent_stride = from.exponent_stride;
  uint8_t* to = weights + strip * kBlockBytes;
  for (int64_t i = 0; i < count; ++i, --left) {
    if (AlongRows) {
      // Lanes are columns of one group; terms are rows, each with an exponent of its own.
      store(by_row, shift_left<kExponentBit>(block_exponents(exponents, group)));
      exponents += exponent_stride;
    } else if (left == 0) {
      same = in_both_words(block_exponents(exponents, ++group));
      left = per_group;
    }
    prefetch(block + kBlocksAhead * stride);
    V codes = load(block);
    block += stride;
    V steps[4];
    if (AlongRows) {
      codes = transpose_bytes(codes);
      const V planes[4] = {codes, shift_right<2>(codes), shift_right<4>(codes), shift_right<6>(codes)};
      transpose_quarters(planes, steps);
    } else {
      steps[0] = codes;
      steps[1] = shift_right<2>(codes);
      steps[2] = shift_right<4>(codes);
      steps[3] = shift_right<6>(codes);
    }
    unroll<4>(ARB_UNROLLED(p) {
      V low = same, high = same;
      if (AlongRows) {
        const int32_t* const e = by_row + 4 * p.value;
        low = splat((e[0] & 0xFFFF) | static_cast<int32_t>(static_cast<uint32_t>(e[1]) << 16));
        high = splat((e[2] & 0xFFFF) | static_cast<int32_t>(static_cast<uint32_t>(e[3]) << 16));
      }
      store(to, pair(lookup(steps[p.value], first), low));
      store(to + width, pair(lookup(steps[p.value], second), high));
      to += 2 * width;
    });
  }
}

void decode(const DecodeSource& source, bool along_rows, void* weights) {
  for (int64_t s = 0; s < source.strips; ++s) {
    if (along_rows) {
      decode_strip<true>(source, s, static_cast<uint8_t*>(weights));
    } else {
      decode_strip<false>(source, s, static_cast<uint8_t*>(weights));
    }
  }
}

inline F dot_pairs(F acc, V w, V x) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x));
}

template <int R, int S>
inline void tile_of(int64_t pairs, const uint8_t* panel, const uint8_t* weights, float* acc) {
  F sums[R * S];
  unroll<R * S>(ARB_UNROLLED(i) { sums[i.value] = loadf(acc + i.value * 16); });
  for (int64_t k = 0; k < pairs; ++k) {
    V w[S];
    unroll<S>(ARB_UNROLLED(s) { w[s.value] = load(weights + s.value * kBlockBytes); });
    unroll<R>(ARB_UNROLLED(r) {
      const V x = splat(load_dword(panel + 4 * r.value));
      unroll<S>(ARB_UNROLLED(s) {
        F& sum = sums[r.value * S + s.value];
        sum = dot_pairs(sum, w[s.value], x);
      });
    });
    weights += S * kBlockBytes;
    panel += 4 * R;
  }
  unroll<R * S>(ARB_UNROLLED(i) { storef(acc + i.value * 16, sums[i.value]); });
}

void tile(int64_t rows, int64_t terms, const void* panel, const void* weights, int64_t strips, bool fresh,
          float* acc) {
  if (fresh) std::memset(acc, 0, static_cast<size_t>(rows * strips * kBlockSide) * sizeof(float));
  const auto* from = static_cast<const uint8_t*>(panel);
  const auto* decoded = static_cast<const uint8_t*>(weights);
  for_rows(rows, [=](auto r) {
    if (strips == 1) {
      tile_of<r.value, 1>(terms / 2, from, decoded, acc);
    } else {
      tile_of<r.value, kTileStrips>(terms / 2, from, decoded, acc);
    }
  });
}

ProductKernels with_bfloat16() {
  ProductKernels kernels = products_avx512vnni();
  kernels.bfloat16 = {kPairRows, kTermBytes, pack, decode, tile};
  return kernels;
}

}  // namespace

const ProductKernels& products_avx512bf16() {
  static const ProductKernels kernels = with_bfloat16();
  return kernels;
}

}  // namespace arb
