// Votes without vector instructions.
#include "votes_rows.h"

namespace arb {

const VoteKernels& vote_kernels_scalar() {
  static constexpr VoteKernels kernels = {0x80,
                                          multiply_int8_plain,
                                          multiply_float_plain,
                                          interleave_plain,
                                          sum_panel_plain,
                                          4 * kPanelRows,
                                          plan_shifts,
                                          {vote_float, vote_int32_plain, vote_int64_plain},
                                          cast_plain,
                                          flip_plain,
                                          settle_plain,
                                          move_exponents_plain};
  return kernels;
}

}  // namespace arb
