// The inner loops of quantisation, products and lookup, one table for each instruction set.
//
// The drivers (product_int8.cpp, product_float.cpp, rows_driver.cpp) cut the work into tasks by the sizes alone and are
// compiled without instruction-set flags; the loops behind the table are in products_<isa>.cpp. Sizes are 64-bit
// throughout.
//
// Terms. A block holds 16 rows x 16 columns of trits in 64 bytes: dword r of a block is row r; byte b of the dword,
// bits 2p and 2p + 1, is column 4p + b; the code is t + 1, and what is padding has the code 1. A strip is the 16 rows
// (or, in grad_y @ W, the 16 columns) that share the 16 lanes of an accumulator; a step is four terms of a sum, the
// four bytes of a dword. A panel is a few rows of the other operand, step by step, so that a tile reads both operands
// in sequence.
#pragma once

#include <cstdint>

namespace arb {

constexpr int64_t kBlockSide = 16;
constexpr int64_t kBlockBytes = 64;
constexpr int64_t kStepsPerBlock = 4;
constexpr int64_t kMaxStrips = 2;
constexpr int64_t kMaxPanelRows = 32;
// Patches that are quantised at a time, and floats that a line or a plane has more than it holds.
constexpr int64_t kPatches = 16;
constexpr int64_t kLineSlack = 16;

// Shifts of a weight that fit one int8: 1 << 6 is 64. Wider spreads of exponents are summed band by band.
constexpr int kBandBits = 7;

// Element types of activations, gradients and results.
enum class Dtype : int { float32 = 0, bfloat16 = 1, float16 = 2 };

static inline int64_t dtype_size(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

static inline int64_t blocks_of(int64_t count) { return (count + kBlockSide - 1) / kBlockSide; }

// Exponents of one strip of 16 rows: for every four groups 64 bytes, dword r being those of row r. Groups beyond the
// last and rows beyond the last repeat the last.
static inline int64_t exponent_bytes(int64_t groups) { return (groups + 3) / 4 * kBlockBytes; }

// Blocks to decode for a few strips. Block i of strip s is at `blocks + i * block_stride + s * strip_stride`; the
// exponents of its rows, at `exponents[s] + i * exponent_stride`, are those of the group
// `group[s] + (first_block + i) / blocks_per_group`.
struct DecodeSource {
  const uint8_t* blocks;
  int64_t block_stride;
  int64_t strip_stride;
  int64_t count;  // blocks along the sum
  int64_t strips;
  const uint8_t* exponents[kMaxStrips];
  int64_t exponent_stride;
  int64_t group[kMaxStrips];
  int64_t first_block;
  int64_t blocks_per_group;
  // [strip][16 rows]: exponents in whose units the integer products are taken.
  const int32_t* floors;
};

// What a matrix unit asks of its operands, and of the thread that uses it.
struct MatrixUnit {
  int64_t rows = 1;    // room for rows in a panel comes in multiples of so many
  int64_t blocks = 1;  // and that for blocks in a panel or a decoded weight of so many
  // Around what a thread does at a time; null where there is nothing to do.
  void (*begin)() = nullptr;
  void (*end)() = nullptr;
};

// Where the results of a tile go, and what they are made with; as the arguments of finish_int8 and finish_float.
struct Finish {
  const int32_t* offset;      // of integer products, as the next two
  const float* row_scale;
  const float* column_scale;
  const float* bias;          // may be null
  int64_t count;
  void* out;
  int64_t out_stride;
  Dtype dtype;
  bool past;
};

// Products of int8, exact modulo 2**32.
struct Int8Loops {
  int64_t rows = 0;  // that a panel has at most; 0 where there are no such loops
  uint8_t flip = 0;  // xor of an int8 operand in a panel: 0x80 where the dot product wants it unsigned
  // int8 rows, `stride` apart, to a panel of `steps` steps, every byte xor `flip`; what lies beyond `terms` is zero.
  void (*pack)(const int8_t* x, int64_t stride, int64_t rows, int64_t terms, int64_t steps, uint8_t flip,
               uint8_t* panel) = nullptr;
  // T << (E - floor - 7 * band) as signed bytes, [step][strip][16 lanes][4 terms]; 0 where the shift is not in 0..6.
  // `along_rows`: lanes are the columns of the blocks and the sum runs over their rows. To offset[strip][lane] is added
  // what the tile adds too much because of `flip`.
  void (*decode)(const DecodeSource& source, bool along_rows, int band, int8_t* weights, int32_t* offset) = nullptr;
  // acc[row][strip][lane] += sum over the steps; or = instead of +=, if `fresh`. From a step of the panel to the next
  // are `stride` bytes, in those of `pack` 4 a row; no weight is larger than 1 << spread.
  void (*tile)(int64_t rows, int64_t steps, const uint8_t* panel, int64_t stride, const int8_t* weights, int64_t strips,
               int spread, bool fresh, int32_t* acc) = nullptr;
  MatrixUnit unit = {};
  // The tile of all terms at once, and what finish_int8 makes of it, without writing the sums; null where there is none.
  // `acc` is for sums on the way.
  void (*tile_finish)(int64_t rows, int64_t steps, const uint8_t* panel, int64_t stride, const int8_t* weights,
                      int64_t strips, int spread, int32_t* acc, const Finish& finish) = nullptr;
};

// Products of floats of one type, summed in float32. A step is one term of float32 or two of bfloat16, 4 bytes a row of
// a panel or a lane of a decoded weight.
struct FloatLoops {
  int64_t rows = 0;  // that a panel has at most; 0 where there are no such loops
  int64_t term_bytes = 0;
  // Rows, `stride` elements apart, to a panel of `padded` terms, a multiple of 16; those beyond `terms` are zero.
  void (*pack)(const void* x, Dtype dtype, int64_t stride, int64_t rows, int64_t terms, int64_t padded,
               void* panel) = nullptr;
  // T * 2**E, [step][strip][16 lanes].
  void (*decode)(const DecodeSource& source, bool along_rows, void* weights) = nullptr;
  // acc[row][strip][lane] += sum over the terms, a multiple of 16; or = instead of +=, if `fresh`.
  void (*tile)(int64_t rows, int64_t terms, const void* panel, const void* weights, int64_t strips, bool fresh,
               float* acc) = nullptr;
  MatrixUnit unit = {};
  // The tile of all terms at once, and what finish_float makes of it; null where there is none.
  void (*tile_finish)(int64_t rows, int64_t terms, const void* panel, const void* weights, int64_t strips,
                      const Finish& finish) = nullptr;
};

// How a gradient is rounded as it is and with its rows multiplied by factors, as in round_stochastic.
struct BothRoundings {
  float inverse, folded_inverse;
  uint32_t hash, folded_hash;
};

struct ProductKernels {
  int64_t strips;    // that a tile takes
  int64_t few_rows;  // that few_int8 takes at most

  // --- int8 ---

  Int8Loops int8;
  // The sums of a row over groups of `group_terms`.
  void (*sum_groups)(const int8_t* x, int64_t terms, int64_t group_terms, int32_t* sums);
  // A few rows times one strip in one pass over its packed blocks: acc[row][lane], modulo 2**32, for shifts up to 31.
  // The panel is one of int8, not flipped; sums[row][group] are those of sum_groups.
  void (*few_int8)(int64_t rows, const DecodeSource& source, const uint8_t* panel, const int32_t* sums, int32_t* acc);
  // out[row][0 .. count) = dtype(float(acc - offset) * row_scale[row] * column_scale[lane] + bias[lane]), each
  // operation rounded. acc is [row][strip][lane] with `lanes` lanes a row; bias may be null. `past`: past the caches,
  // where there are such stores; rows are then aligned to 64 bytes, and whoever reads them from another thread has
  // waited for an atomic operation of this one.
  void (*finish_int8)(const int32_t* acc, const int32_t* offset, int64_t rows, int64_t lanes, int64_t count,
                      const float* row_scale, const float* column_scale, const float* bias, void* out,
                      int64_t out_stride, Dtype dtype, bool past);

  // --- floats ---

  FloatLoops float32;  // of operands of any dtype
  void (*finish_float)(const float* acc, int64_t rows, int64_t lanes, int64_t count, const float* bias, void* out,
                       int64_t out_stride, Dtype dtype, bool past);

  // --- patches of an image ---

  // Columns of an image, x[channel * channel_stride + column * column_stride], to float32 [channels + 1][line_stride];
  // the last channel holds the largest magnitude of each column, that of NaN above all. Writes up to kLineSlack
  // elements beyond `columns`, as place_lines does beyond `pitch`; that also reads as many.
  void (*gather_columns)(const void* x, Dtype dtype, int64_t channel_stride, int64_t column_stride, int64_t channels,
                         int64_t columns, int64_t line_stride, float* lines);
  // to[line * pitch + i] = from[line * from_stride + (i - low) * step] for `low` <= i < `high`, else 0 for i < `pitch`.
  void (*place_lines)(const float* from, int64_t from_stride, int64_t step, int64_t low, int64_t high, int64_t lines,
                      float* to, int64_t pitch);
  // Sixteen patches, the rows of quantize_row: term k of patch i is planes[offsets[k] + quarters[i / 4] + i % 4], and
  // the largest magnitude of its tap t in any channel is largest[offsets[t] + quarters[i / 4] + i % 4]. To a panel of
  // `steps` steps of 64 bytes, every byte xor `flip`.
  void (*quantize_patches)(const float* planes, const int64_t* quarters, const int64_t* offsets, int64_t steps,
                           const float* largest, int64_t taps, uint8_t flip, uint8_t* panel, float* scale);

  // --- exponents ---

  // The exponents of 1 to 16 rows, [rows][groups], in the form that DecodeSource wants.
  void (*gather_exponents)(const int8_t* exponent, int64_t rows, int64_t groups, uint8_t* gathered);
  // The smallest exponent of each row, and the largest difference from it.
  int (*row_floors)(const uint8_t* gathered, int64_t groups, int32_t floors[16]);
  // The smallest and the largest exponent of each group over `strips` strips, one after another.
  void (*group_range)(const uint8_t* gathered, int64_t strips, int64_t groups, int8_t* lowest, int8_t* highest);

  // --- rows ---

  // One row to int8 and its scale.
  float (*quantize_row)(const void* x, Dtype dtype, int64_t count, int8_t* q);
  float (*norm_quantize_row)(const void* x, Dtype dtype, int64_t count, float eps, float* work, int8_t* q);
  // The largest magnitude of a stretch as the bits of a float32, NaN counted as 0.
  uint32_t (*largest_bits)(const void* x, Dtype dtype, int64_t count);
  // q = min(floor(x * inverse + u), 127), and 0 for NaN; |x * inverse| is at most 127. `hash` is what the finaliser of
  // the counter hash gets for the first element.
  void (*round_stochastic)(const void* x, Dtype dtype, int64_t count, float inverse, uint32_t hash, int8_t* q);
  // The same of x, and of x * factor, both of them elements of the type.
  void (*round_both)(const void* x, Dtype dtype, int64_t count, float factor, const BothRoundings& by, int8_t* q,
                     int8_t* folded);
  // One row of a weight to floats: dword `lane` of every block, times 2**exponent of its group.
  void (*lookup_row)(const uint8_t* strip, int64_t lane, const int8_t* exponent, int64_t columns, int64_t group_size,
                     void* out, Dtype dtype);

  // Products of bfloat16 operands as they are, subnormal ones counted as 0.
  FloatLoops bfloat16 = {};
  // Products of int8 by a matrix unit, whose panels and weights have a form of its own; those of many rows are taken by
  // it where there is one.
  Int8Loops int8_unit = {};
};

const ProductKernels& products_scalar();
const ProductKernels& products_avx2();
const ProductKernels& products_avxvnni();
const ProductKernels& products_avx512vnni();
const ProductKernels& products_avx512bf16();
const ProductKernels& products_amx();
const ProductKernels& products_neon();

// The table of an instruction set, by its index; the scalar one where it was not compiled.
const ProductKernels& product_kernels(int isa);

}  // namespace arb
