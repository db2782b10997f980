// Exponents, and packed blocks as the float operand of a tile.
#pragma once

#include "loops_decode.h"

namespace arb {
namespace {

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
      uint32_t bytes = 0;
      if (group + 4 <= groups) {
        std::memcpy(&bytes, row + group, 4);
      } else {
        for (int64_t i = 3; i >= 0; --i) bytes = bytes << 8 | static_cast<uint8_t>(row[smaller(group + i, groups - 1)]);
      }
      std::memcpy(four + 4 * r, &bytes, 4);
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
