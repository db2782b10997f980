// Random votes and flips between ranks: every instruction set against plain arithmetic, with 2 threads.
//
// All buffers have exactly the size that the kernels are told, so that an address sanitizer sees a step beyond them.
// Arguments: rounds, first seed; compiled with -DARB_FUZZ and libFuzzer it takes its seeds from the fuzzer.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "rounds.h"
#include "threads.h"
#include "votes_storage.h"
#include "wire.h"

namespace {

void require(bool holds, arb::Isa isa, const char* what, uint64_t seed) {
  if (holds) return;
  std::printf("%s: %s, seed %llu\n", arb::isa_name(isa), what, static_cast<unsigned long long>(seed));
  std::exit(1);
}

void check_digits(arb::Isa isa, uint64_t seed) {
  Random random(seed);
  const arb::WireKernels& kernels = arb::wire_kernels(isa);
  const int base = static_cast<int>(random.within(0, arb::kBases - 1)), half = arb::kBase[base] / 2;
  const int64_t count = random.within(1, random.within(0, 3) == 0 ? 200000 : 300);
  const int64_t width = arb::ceil_div(count, arb::kDigits[base]);
  std::vector<int16_t> values = random.numbers<int16_t>(count, -half, half);
  std::vector<uint8_t> packed(static_cast<size_t>(width));
  require(arb::pack_digits(kernels, base, values.data(), count, packed.data(), 2), isa, "digits are refused", seed);
  for (int64_t i = 0; i < width; ++i) {
    int byte = 0, weight = 1;
    for (int64_t j = 0; j < arb::kDigits[base]; ++j, weight *= arb::kBase[base]) {
      const int64_t place = i + j * width;
      byte += weight * ((place < count ? values[static_cast<size_t>(place)] : 0) + half);
    }
    require(packed[static_cast<size_t>(i)] == byte, isa, "a byte differs", seed);
  }
  std::vector<int16_t> brief = random.numbers<int16_t>(count, -1000, 1000);
  std::vector<int32_t> wide = random.numbers<int32_t>(count, -1000000, 1000000);
  const std::vector<int16_t> before = brief;
  const std::vector<int32_t> wide_before = wide;
  arb::add_digits(kernels, base, packed.data(), count, brief.data(), 2);
  arb::add_digits(kernels, base, packed.data(), count, wide.data(), 2);
  for (size_t i = 0; i < values.size(); ++i) {
    require(brief[i] == before[i] + values[i] && wide[i] == wide_before[i] + values[i], isa, "a sum differs", seed);
  }
  const size_t place = static_cast<size_t>(random.within(0, count - 1));
  values[place] = static_cast<int16_t>(random.within(0, 1) == 0 ? half + 1 : -32768);
  require(!arb::pack_digits(kernels, base, values.data(), count, packed.data(), 2), isa, "no digit is taken", seed);
}

template <class Sum>
void check_sums(arb::Isa isa, uint64_t seed) {
  Random random(seed);
  const arb::WireKernels& kernels = arb::wire_kernels(isa);
  const int64_t rows = random.within(1, 20), columns = random.within(1, random.within(0, 5) == 0 ? 20000 : 500);
  const int64_t count = rows * columns, most = random.within(0, 1) == 0 ? 127 : 32767;
  const std::vector<Sum> sums = random.numbers<Sum>(count, -most, most);
  const arb::VoteUnit unit = {static_cast<int32_t>(random.within(0, 127)),
                              static_cast<int32_t>(random.within(0, (1 << 24) - 1))};
  const arb::HashWords words = {seed, 1, 2};
  const uint64_t start = random.within(0, 1) == 0 ? 7 : (uint64_t{1} << 32) - static_cast<uint64_t>(columns);
  std::vector<int32_t> quanta(sums.size());
  arb::sums_to_quanta(kernels, sums.data(), count, unit, words, start, quanta.data(), 2);
  const arb::HashStream stream(words);
  for (size_t i = 0; i < sums.size(); ++i) {
    const int64_t noise = arb::hash_finish(stream.base(start + i)) >> 8, sum = sums[i];
    require(quanta[i] == ((sum * unit.fraction + noise) >> 24) + sum * unit.whole, isa, "a worth differs", seed);
  }

  const int bits = 1 << random.within(1, 3), highest = bits == 8 ? 127 : bits == 4 ? 7 : 1;
  const arb::VoteRange range = {random.within(0, 1) == 0 && bits == 8 ? -128 : -highest, highest};
  std::vector<int8_t> open = random.numbers<int8_t>(count, range.low, range.high);
  std::vector<uint8_t> stored(static_cast<size_t>(rows * arb::vote_row_bytes(columns, bits)));
  if (bits == 8) {
    stored.assign(open.begin(), open.end());
  } else {
    arb::pack_votes(open.data(), rows, columns, bits, stored.data(), 1);
  }
  arb::settle_votes(kernels, sums.data(), rows, columns, bits, range, stored.data(), 2);
  for (size_t i = 0; i < open.size(); ++i) {
    const int settled = std::clamp(static_cast<int>(open[i]) + static_cast<int>(sums[i]), range.low, range.high);
    open[i] = static_cast<int8_t>(settled);
  }
  std::vector<uint8_t> expected(stored.size());
  if (bits == 8) {
    expected.assign(open.begin(), open.end());
  } else {
    arb::pack_votes(open.data(), rows, columns, bits, expected.data(), 1);
  }
  require(stored == expected, isa, "an accumulator differs", seed);
}

void check_flips(uint64_t seed) {
  Random random(seed);
  const int64_t rows = random.within(1, 40), columns = random.within(1, 300);
  const int64_t strips = arb::ceil_div(rows, arb::kBlock), across = arb::ceil_div(columns, arb::kBlock);
  const int64_t rarity = random.within(0, 1) == 0 ? 1 : 50;
  std::vector<uint8_t> before(static_cast<size_t>(strips * across * 4 * arb::kBlock), 0x55), after = before;
  std::vector<int64_t> expected_places;
  std::vector<int8_t> expected_directions;
  for (int64_t place = 0; place < rows * columns; ++place) {
    const int64_t n = place / columns, c = place % columns;
    const size_t byte = static_cast<size_t>(arb::code_offset(columns, n, c / arb::kBlock * arb::kBlock) + c % 4);
    const int shift = static_cast<int>(c % arb::kBlock / 4 * 2), old = static_cast<int>(random.within(0, 2));
    const int step = random.within(1, rarity) == 1 ? static_cast<int>(random.within(-1, 1)) : 0;
    const int now = std::clamp(old + step, 0, 2);
    before[byte] = static_cast<uint8_t>((before[byte] & ~(3 << shift)) | (old << shift));
    after[byte] = static_cast<uint8_t>((after[byte] & ~(3 << shift)) | (now << shift));
    if (now != old) {
      expected_places.push_back(place);
      expected_directions.push_back(static_cast<int8_t>(now - old));
    }
  }
  const arb::Isa isa = arb::Isa::scalar;
  std::vector<int64_t> first(static_cast<size_t>(strips + 1));
  arb::count_flips(before.data(), after.data(), strips, columns, first.data() + 1, 2);
  for (size_t s = 1; s < first.size(); ++s) first[s] += first[s - 1];
  require(first.back() == static_cast<int64_t>(expected_places.size()), isa, "flips are miscounted", seed);
  std::vector<int64_t> places(expected_places.size());
  std::vector<int8_t> directions(places.size());
  arb::list_flips(before.data(), after.data(), strips, columns, first.data(), places.data(), directions.data(), 2);
  require(places == expected_places && directions == expected_directions, isa, "the list of flips differs", seed);
  const int64_t count = static_cast<int64_t>(places.size());
  const arb::Applied applied =
      arb::apply_flips(before.data(), rows, columns, places.data(), directions.data(), count);
  require(applied == arb::Applied::all && before == after, isa, "flips are applied otherwise", seed);
}

void round(uint64_t seed) {
  check_flips(seed);
  for (const arb::Isa isa : arb::usable_isas()) {
    check_digits(isa, seed);
    check_sums<int16_t>(isa, seed);
    check_sums<int32_t>(isa, seed);
  }
}

}  // namespace

#include "check_main.h"
