// The loops of ProductKernels, written in the sixteen lanes of a simd_<isa>.h. Included by one translation unit for
// each instruction set, after that header. Everything has internal linkage and nothing of the standard library is
// instantiated: code with wide registers must not be what the linker picks for a processor that lacks them.
#pragma once

#include "loops_patches.h"
#include "loops_rows.h"
#include "loops_tiles.h"

namespace arb {
namespace {

constexpr ProductKernels kProducts = {
    kTileStrips,
    kFewRows,
    {kTileRows, kFlip, pack_int8, decode_int8<kFlip>, tile_int8, {}, tile_finish_int8},
    sum_groups,
    few_int8,
    finish_int8,
    {kTileRowsFloat, 4, pack_float, decode_float, tile_float, {}, tile_finish_float},
    finish_float,
    gather_columns,
    place_lines,
    quantize_patches,
    gather_exponents,
    row_floors,
    group_range,
    quantize_row,
    norm_quantize_row,
    largest_bits,
    round_stochastic,
    round_both,
    lookup_row,
};

}  // namespace
}  // namespace arb
