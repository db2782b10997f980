"""When the parts of a block may be computed by kernels of their own, not by the operations of torch.

Such kernels (``arb_ternary.backends.protocol.BLOCK_OPS``) are optional: they save the memory traffic and the calls of a
dozen operations each. They add up in an order of their own, so that their results differ from torch's in the last bits.
"""

from __future__ import annotations

import torch

from arb_ternary_train.exact_arithmetic import is_exact

__all__ = ["may_round_otherwise"]


def may_round_otherwise() -> bool:
    """Whether float results may differ from those of torch's operations in the last bits.

    Not in an exact run, whose bits are the same on every backend; and not while a graph is compiled, which is made of
    torch's operations.
    """
    return not (torch.compiler.is_compiling() or is_exact())
