"""The control words of a module: what its counter hash depends on besides the element's index.

An int64 buffer ``[4]``: seed of the run, optimizer steps taken, stream (identity of the tensor), micro-batches cast
since the last step. They are a tensor, not Python numbers, so that a compiled graph does not depend on the step.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary.counters.hashing import HASH_USES, MICRO_BITS

__all__ = ["MICRO", "SEED", "STEP", "STREAM", "hash_words", "new_control"]

SEED: Final = 0
STEP: Final = 1
STREAM: Final = 2
MICRO: Final = 3


def new_control() -> Tensor:
    """Control words of a module that has taken no step: all zero."""
    return torch.zeros(4, dtype=torch.int64)


def hash_words(control: Tensor) -> tuple[int, int, int]:
    """``seed, step, stream`` for a kernel's hash: ``step`` counts micro-batches too, a use is added to ``stream``."""
    seed, step, stream, micro = control.tolist()[:4]
    return seed, (step << MICRO_BITS) + micro, stream * HASH_USES
