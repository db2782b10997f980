// Exponents and packed blocks: from sixteen rows of codes to the operand of a tile.
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

template <bool AlongRows>
inline void decode_int8_strip(const DecodeSource& from, int64_t strip, int band, int8_t* weights, int32_t* offset) {
  const V offsets = row_offsets(AlongRows);
  const V unit = add(load(from.floors + 16 * strip), splat(kBandBits * band));
  const V flip = splat(static_cast<int32_t>(0x01010101u * kFlip));
  const uint8_t* block = from.blocks + strip * from.strip_stride;
  const uint8_t* exponents = from.exponents[strip];
  int64_t group = from.group[strip] + from.first_block / from.blocks_per_group;
  int64_t left = from.blocks_per_group - from.first_block % from.blocks_per_group;
  V table = weight_table(sub(block_exponents(exponents, group), unit));
  V surplus[4] = {zero(), zero(), zero(), zero()};
  for (int64_t i = 0; i < from.count; ++i) {
    if (AlongRows) {
      table = weight_table(sub(block_exponents(exponents + i * from.exponent_stride, group), unit));
    } else if (left == 0) {
      table = weight_table(sub(block_exponents(exponents, ++group), unit));
      left = from.blocks_per_group;
    }
    --left;
    V steps[4];
    prefetch(block + (i + kBlocksAhead) * from.block_stride);
    decode_block<AlongRows>(load(block + i * from.block_stride), table, offsets, steps);
    unroll<4>(ARB_UNROLLED(p) {
      store(weights + ((i * kStepsPerBlock + p.value) * from.strips + strip) * kBlockBytes, steps[p.value]);
      if (kFlip != 0) surplus[p.value] = dot(surplus[p.value], steps[p.value], flip);
    });
  }
  const V collected = add(add(surplus[0], surplus[1]), add(surplus[2], surplus[3]));
  store(offset + 16 * strip, add(load(offset + 16 * strip), collected));
}

void decode_int8(const DecodeSource& source, bool along_rows, int band, int8_t* weights, int32_t* offset) {
  for (int64_t s = 0; s < source.strips; ++s) {
    if (along_rows) {
      decode_int8_strip<true>(source, s, band, weights, offset);
    } else {
      decode_int8_strip<false>(source, s, band, weights, offset);
    }
  }
}

template <int B>
inline F signed_byte(V v) {
  return to_float(shift_right_signed<24>(shift_left<24 - 8 * B>(v)));
}

template <bool AlongRows>
inline void decode_float_strip(const DecodeSource& from, int64_t strip, float* weights) {
  const V offsets = row_offsets(AlongRows);
  const V table = weight_table(zero());
  const uint8_t* block = from.blocks + strip * from.strip_stride;
  int64_t group = from.group[strip] + from.first_block / from.blocks_per_group;
  int64_t left = from.blocks_per_group - from.first_block % from.blocks_per_group;
  for (int64_t i = 0; i < from.count; ++i, --left) {
    if (!AlongRows && left == 0) {
      ++group;
      left = from.blocks_per_group;
    }
    const F scale = power_of_two(block_exponents(from.exponents[strip] + i * from.exponent_stride, group));
    alignas(64) float scales[16];
    storef(scales, scale);
    V steps[4];
    decode_block<AlongRows>(load(block + i * from.block_stride), table, offsets, steps);
    for (int64_t p = 0; p < kStepsPerBlock; ++p) {
      const F trits[4] = {signed_byte<0>(steps[p]), signed_byte<1>(steps[p]), signed_byte<2>(steps[p]),
                          signed_byte<3>(steps[p])};
      for (int64_t b = 0; b < 4; ++b) {
        const F factor = AlongRows ? splatf(scales[4 * p + b]) : scale;
        storef(weights + ((i * kBlockSide + 4 * p + b) * from.strips + strip) * 16, mulf(trits[b], factor));
      }
    }
  }
}

void decode_float(const DecodeSource& source, bool along_rows, void* decoded) {
  float* const weights = static_cast<float*>(decoded);
  for (int64_t s = 0; s < source.strips; ++s) {
    if (along_rows) {
      decode_float_strip<true>(source, s, weights);
    } else {
      decode_float_strip<false>(source, s, weights);
    }
  }
}

void gather_exponents(const int8_t* exponent, int64_t rows, int64_t groups, uint8_t* gathered) {
  int64_t group = 0;
  if (rows == 16) {
    for (; group + 16 <= groups; group += 16) {
      V columns[4];
      load_columns(exponent + group, groups, columns);
      for (int i = 0; i < 4; ++i) store(gathered + (group / 4 + i) * kBlockBytes, columns[i]);
    }
  }
  for (; group < groups; group += 4) {
    uint8_t* four = gathered + group / 4 * kBlockBytes;
    for (int64_t r = 0; r < 16; ++r) {
      const int8_t* row = exponent + smaller(r, rows - 1) * groups;
      for (int64_t i = 0; i < 4; ++i) four[4 * r + i] = static_cast<uint8_t>(row[smaller(group + i, groups - 1)]);
    }
  }
}

template <int B>
inline V exponent_byte(V v) {
  return shift_right_signed<24>(shift_left<24 - 8 * B>(v));
}

int row_floors(const uint8_t* gathered, int64_t groups, int32_t floors[16]) {
  V low = load(gathered), high = low;
  for (int64_t i = 1; i < (groups + 3) / 4; ++i) {
    const V four = load(gathered + i * kBlockBytes);
    low = min_bytes(low, four);
    high = max_bytes(high, four);
  }
  const V floor = min_signed(min_signed(exponent_byte<0>(low), exponent_byte<1>(low)),
                             min_signed(exponent_byte<2>(low), exponent_byte<3>(low)));
  const V top = max_signed(max_signed(exponent_byte<0>(high), exponent_byte<1>(high)),
                           max_signed(exponent_byte<2>(high), exponent_byte<3>(high)));
  store(floors, floor);
  return reduce_max(sub(top, floor));
}

void group_range(const uint8_t* gathered, int64_t strips, int64_t groups, int8_t* lowest, int8_t* highest) {
  const int64_t stride = exponent_bytes(groups);
  for (int64_t g = 0; g < groups; g += 4) {
    V low = load(gathered + g / 4 * kBlockBytes), high = low;
    for (int64_t i = 1; i < strips; ++i) {
      const V four = load(gathered + i * stride + g / 4 * kBlockBytes);
      low = min_bytes(low, four);
      high = max_bytes(high, four);
    }
    alignas(64) int8_t lows[64], highs[64];
    store(lows, low);
    store(highs, high);
    for (int64_t j = 0; j < smaller(4, groups - g); ++j) {
      lowest[g + j] = lows[j];
      highest[g + j] = highs[j];
      for (int64_t r = 1; r < 16; ++r) {
        const int8_t least = lows[4 * r + j], most = highs[4 * r + j];
        lowest[g + j] = least < lowest[g + j] ? least : lowest[g + j];
        highest[g + j] = most > highest[g + j] ? most : highest[g + j];
      }
    }
  }
}

}  // namespace
}  // namespace arb
