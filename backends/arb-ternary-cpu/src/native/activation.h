// What stands between the two halves of a feed-forward part.
#pragma once

namespace arb {

// silu(gate) * up, relu(up)^2, relu(gate)^2 * up. The numbers are those of ACTIVATIONS in arguments.py.
enum class Activation : int { swiglu = 0, relu2 = 1, reglu2 = 2 };

}  // namespace arb
