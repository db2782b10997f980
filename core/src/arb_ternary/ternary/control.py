"""The control words of a ternary module: what its counter hash depends on besides the element's index.

An int64 buffer ``[4]``: seed of the run, optimizer steps taken, stream (identity of the tensor), micro-batches cast
since the last step. They are a tensor, not Python numbers, so that a compiled graph does not depend on the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from arb_ternary.ternary.hashing import HASH_USES, MICRO_BITS, stream_id
from arb_ternary.ternary.stored import stored_modules

if TYPE_CHECKING:
    from arb_ternary.ternary.module import TernaryModule

__all__ = ["MICRO", "SEED", "STEP", "STREAM", "hash_words", "new_control", "seed_votes", "ternary_modules"]

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


def seed_votes(model: nn.Module, seed: int) -> None:
    """Give every ternary module of ``model`` the run's seed and the stream of its qualified name.

    Modules with integer weights of another format get theirs too. Two modules never share a stream unless their names
    share a CRC-32; a name keeps its stream on every machine.
    """
    controls = [(name, module.control) for name, module in ternary_modules(model)]
    controls += [(name, module.control) for name, module in stored_modules(model)]
    for name, control in controls:
        control[SEED] = seed
        control[STREAM] = stream_id(name)


def ternary_modules(model: nn.Module) -> list[tuple[str, TernaryModule]]:
    """Name and module of every ternary module, each once, in the order of ``named_modules``."""
    from arb_ternary.ternary.module import TernaryModule

    return [(name, module) for name, module in model.named_modules() if isinstance(module, TernaryModule)]
