// Votes and flips as they travel between ranks: digits packed into bytes, and lists of trits that have moved.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hash.h"
#include "isa.h"
#include "votes.h"

namespace arb {

// Bases with 5, 3, 2 and 1 digits to a byte.
constexpr int kBases = 4;
constexpr int kBase[kBases] = {3, 5, 15, 255};
constexpr int kDigits[kBases] = {5, 3, 2, 1};

// What a vote is worth in quanta: whole + fraction / 2**24.
struct VoteUnit {
  int32_t whole;
  int32_t fraction;
};

// The inner loops, by the index of the base. Byte i is made of values[i], values[i + width], values[i + 2 width], ...,
// as many as the base has digits to a byte; all of them are there.
struct WireKernels {
  // False where a value has no digit.
  bool (*pack[kBases])(const int16_t* values, int64_t width, int64_t count, uint8_t* out);
  // total += digits
  void (*add_short[kBases])(const uint8_t* packed, int64_t width, int64_t count, int16_t* total);
  void (*add_long[kBases])(const uint8_t* packed, int64_t width, int64_t count, int32_t* total);
  // Sums of votes as whole quanta; `hash` is that of the first, see HashStream.
  void (*quanta_short)(const int16_t* sums, int64_t count, const VoteUnit& unit, uint32_t hash, int32_t* out);
  void (*quanta_long)(const int32_t* sums, int64_t count, const VoteUnit& unit, uint32_t hash, int32_t* out);
  // votes = clip(votes + whole)
  void (*settle_short)(const int16_t* whole, int64_t count, VoteRange range, int8_t* votes);
  void (*settle_long)(const int32_t* whole, int64_t count, VoteRange range, int8_t* votes);
};

const WireKernels& wire_kernels_scalar();
#if defined(ARB_HAVE_AVX2)
const WireKernels& wire_kernels_avx2();
#endif
#if defined(ARB_HAVE_AVX512VNNI)
const WireKernels& wire_kernels_avx512vnni();
#endif
#if defined(ARB_HAVE_NEON)
const WireKernels& wire_kernels_neon();
#endif

const WireKernels& wire_kernels(Isa isa);

// Values to ceil(count / digits) bytes; what is missing in the last ones is 0. False where a value has no digit.
bool pack_digits(const WireKernels& kernels, int base, const int16_t* values, int64_t count, uint8_t* out, int threads);
void add_digits(const WireKernels& kernels, int base, const uint8_t* packed, int64_t count, int16_t* total,
                int threads);
void add_digits(const WireKernels& kernels, int base, const uint8_t* packed, int64_t count, int32_t* total,
                int threads);

// (sums * unit + noise) >> 24, exact, clipped to 32 bits; the noise is the hash of `start` and the indices after it.
template <class Sum>
void sums_to_quanta(const WireKernels& kernels, const Sum* sums, int64_t count, const VoteUnit& unit,
                    const HashWords& words, uint64_t start, int32_t* out, int threads);

// Adds whole votes [rows, columns] to accumulators of 8, 4 or 2 bits, which are clipped.
template <class Sum>
void settle_votes(const WireKernels& kernels, const Sum* whole, int64_t rows, int64_t columns, int bits,
                  VoteRange range, uint8_t* votes, int threads);

// Trits in which two packed weights differ, for each strip of 16 rows.
void count_flips(const uint8_t* before, const uint8_t* after, int64_t strips, int64_t columns, int64_t* counts,
                 int threads);
// Their places (row * columns + column) and directions, ascending; those of strip i begin at first[i].
void list_flips(const uint8_t* before, const uint8_t* after, int64_t strips, int64_t columns, const int64_t* first,
                int64_t* places, int8_t* directions, int threads);

enum class Applied : int { all = 0, outside = 1, beyond_rail = 2 };

// Moves the trits at distinct places. Nothing is changed where a place is outside the weight, or a trit would leave
// -1..1.
Applied apply_flips(uint8_t* packed, int64_t rows, int64_t columns, const int64_t* places, const int8_t* directions,
                    int64_t count);

}  // namespace arb
