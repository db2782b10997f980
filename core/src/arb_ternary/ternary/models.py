"""Find, seed and reset the ternary modules of a model."""

from __future__ import annotations

from torch import nn

from arb_ternary.counters.hashing import SEED, STREAM, stream_id
from arb_ternary.ternary.module import TernaryModule


def ternary_modules(model: nn.Module) -> list[tuple[str, TernaryModule]]:
    """Return name and module of every ternary module, once, in the order of ``named_modules``."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, TernaryModule)
    ]


def seed_votes(model: nn.Module, seed: int) -> None:
    """Give every ternary module the seed of the run, and the stream of its name.

    Two modules share a stream only if their qualified names have the same CRC-32. A name has the
    same stream on every machine.
    """
    for name, module in ternary_modules(model):
        module.control[SEED] = seed
        module.control[STREAM] = stream_id(name)


def reset_runtime_state(model: nn.Module) -> None:
    """Clear the state that modules carry from one batch to the next (KV caches, sliding windows).

    Call it between randomly sampled batches. Keep the state only for text that is streamed in
    order.
    """
    for module in model.modules():
        reset = getattr(module, "reset_runtime_state", None)
        if callable(reset):
            reset()
