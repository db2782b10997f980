// Attention over bfloat16 with AVX-512: two terms a lane and instruction.
#define ARB_HARDWARE_BFLOAT16
#include "simd_avx512vnni.h"

// The loops are written in what comes first.
#include "attention_loops.h"

namespace arb {
namespace {

// A word is two bfloat16.
struct PairWords {
  using Operand = V;
  static constexpr int64_t kTerms = 2;
  static V load_words(const uint32_t* p) { return load(p); }
  static V splat_word(const uint32_t* p) { return splat(load_dword(p)); }
  static F multiply_add(V x, V w, F sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x));
  }
  static void store_row(Words to, int64_t row, int64_t k, F f) {
    store_bfloat16(reinterpret_cast<char*>(to.first + row * to.stride) + 2 * k, f);
  }
  static void store_rows(Words to, int64_t row, int64_t k, F first, F second) {
    const V low = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(first)));
    const V high = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(second)));
    store(to.first + row / 2 * to.stride + k, bit_or(low, shift_left<16>(high)));
  }
};

}  // namespace

const AttentionKernels& attention_avx512bf16() {
  static constexpr AttentionKernels kernels = attention_of<PairWords>();
  return kernels;
}

}  // namespace arb
