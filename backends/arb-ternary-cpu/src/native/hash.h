// The counter hash of the number format: randomness without state, a function of (seed, step, stream, index).
#pragma once

#include <cstdint>

namespace arb {

// index * kHashStep + key is what the finaliser gets.
constexpr uint32_t kHashStep = 0x9E3779B1u;
constexpr uint32_t kHashFirst = 0x7FEB352Du;
constexpr uint32_t kHashSecond = 0x846CA68Bu;

// Uses of a stream, added to the stream that a kernel is given.
constexpr uint64_t kUseVoteRounding = 3;
constexpr uint64_t kUseExponentRounding = 4;
constexpr uint64_t kUseDecay = 5;

// Internal linkage on purpose: these are compiled with the flags of several instruction sets.

static inline uint64_t hash_mix64(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

struct HashWords {
  uint64_t seed;
  uint64_t step;
  uint64_t stream;

  HashWords use(uint64_t which) const { return {seed, step, stream + which}; }
};

// The 32-bit key of a block of 2**32 indices.
static inline uint32_t hash_key(const HashWords& words, uint64_t high_index) {
  uint64_t folded = 0;
  const uint64_t folding[4] = {words.seed, words.step, words.stream, high_index};
  for (const uint64_t word : folding) {
    folded = hash_mix64((folded ^ word) + 0x9E3779B97F4A7C15ull);
  }
  return static_cast<uint32_t>(folded >> 32) ^ static_cast<uint32_t>(folded);
}

// One use of the hash. The key of the first 2**32 indices, nearly always the only one, is made once.
class HashStream {
 public:
  HashStream() : HashStream(HashWords{0, 0, 0}) {}
  explicit HashStream(const HashWords& words) : words_(words), first_key_(hash_key(words, 0)) {}

  // What the finaliser gets for a flat index; of later indices, up to the next multiple of 2**32, it is this plus
  // multiples of kHashStep.
  uint32_t base(uint64_t index) const {
    const uint64_t high = index >> 32;
    return static_cast<uint32_t>(index) * kHashStep + (high == 0 ? first_key_ : hash_key(words_, high));
  }

 private:
  HashWords words_;
  uint32_t first_key_;
};

static inline uint32_t hash_finish(uint32_t x) {
  x = (x ^ (x >> 16)) * kHashFirst;
  x = (x ^ (x >> 15)) * kHashSecond;
  return x ^ (x >> 16);
}

}  // namespace arb
