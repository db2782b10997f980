// Packed blocks: from sixteen rows of codes to the int8 operand of a tile.
#pragma once

#include "loops_common.h"

namespace arb {
namespace {

// For each quarter of a block a table of its four rows: bytes 4 i + code hold the signed weight of row i.
inline V weight_table(V shift) {
  // Counts that are negative or above 31 give 0, those from 7 on lie above the mask.
  const V positive = bit_and(shift_left(splat(1), shift), splat(0x7F));
  const V negative = bit_and(sub(zero(), positive), splat(0xFF));
  return bit_or(shift_left<16>(positive), negative);
}

// Which row of its quarter a byte belongs to, as an offset into the table: by dword in a block as it is packed, by byte
// once the 4 x 4 bytes of the quarters are transposed.
inline V row_offsets(bool along_rows) {
  alignas(64) int32_t offsets[16];
  for (int r = 0; r < 16; ++r) offsets[r] = along_rows ? 0x0C080400 : r % 4 * 0x04040404;
  return load(offsets);
}

// The signed weights of a block, four terms a lane: out[step].
template <bool AlongRows>
inline void decode_block(V block, V table, V offsets, V out[4]) {
  const V mask = splat(kCodeMask);
  if (AlongRows) block = transpose_bytes(block);
  V planes[4] = {
      lookup(table, select_bits(block, mask, offsets)),
      lookup(table, select_bits(shift_right<2>(block), mask, offsets)),
      lookup(table, select_bits(shift_right<4>(block), mask, offsets)),
      lookup(table, select_bits(shift_right<6>(block), mask, offsets)),
  };
  if (AlongRows) {
    transpose_quarters(planes, out);
  } else {
    unroll<4>(ARB_UNROLLED(p) { out[p.value] = planes[p.value]; });
  }
}

template <bool AlongRows, uint8_t Flip>
inline void decode_int8_strip(const DecodeSource& from, int64_t strip, int band, int8_t* weights, int32_t* offset) {
  const V offsets = row_offsets(AlongRows);
  const V unit = add(load(from.floors + 16 * strip), splat(kBandBits * band));
  const V flip = splat(static_cast<int32_t>(0x01010101u * Flip));
  const uint8_t* block = from.blocks + strip * from.strip_stride;
  const uint8_t* exponents = from.exponents[strip];
  int64_t group = from.group[strip] + from.first_block / from.blocks_per_group;
  int64_t left = from.blocks_per_group - from.first_block % from.blocks_per_group;
  V table = weight_table(sub(block_exponents(exponents, group), unit));
  V surplus[4] = {zero(), zero(), zero(), zero()};
  // Copies, because for all the compiler knows the weights are written over `from`.
  const int64_t count = from.count, stride = from.block_stride, width = from.strips * kBlockBytes;
  const int64_t per_group = from.blocks_per_group, exponent_stride = from.exponent_stride;
  int8_t* to = weights + strip * kBlockBytes;
  for (int64_t i = 0; i < count; ++i) {
    if (AlongRows) {
      table = weight_table(sub(block_exponents(exponents, group), unit));
      exponents += exponent_stride;
    } else if (left == 0) {
      table = weight_table(sub(block_exponents(exponents, ++group), unit));
      left = per_group;
    }
    --left;
    V steps[4];
    prefetch(block + kBlocksAhead * stride);
    decode_block<AlongRows>(load(block), table, offsets, steps);
    block += stride;
    unroll<4>(ARB_UNROLLED(p) {
      store(to, steps[p.value]);
      to += width;
      if (Flip != 0) surplus[p.value] = dot(surplus[p.value], steps[p.value], flip);
    });
  }
  const V collected = add(add(surplus[0], surplus[1]), add(surplus[2], surplus[3]));
  store(offset + 16 * strip, add(load(offset + 16 * strip), collected));
}

template <uint8_t Flip>
void decode_int8(const DecodeSource& source, bool along_rows, int band, int8_t* weights, int32_t* offset) {
  for (int64_t s = 0; s < source.strips; ++s) {
    if (along_rows) {
      decode_int8_strip<true, Flip>(source, s, band, weights, offset);
    } else {
      decode_int8_strip<false, Flip>(source, s, band, weights, offset);
    }
  }
}

}  // namespace
}  // namespace arb
