"""The ternary modules of a model: find, seed, set or reset all of them at once."""

from __future__ import annotations

from torch import nn

from arb_ternary.counters.control import SEED, STREAM
from arb_ternary.counters.hashing import stream_id
from arb_ternary.ternary.module import TernaryModule
from arb_ternary.ternary.stored import stored_modules

__all__ = [
    "configure_ternary_training",
    "reset_runtime_state",
    "seed_votes",
    "ternary_modules",
]


def ternary_modules(model: nn.Module) -> list[tuple[str, TernaryModule]]:
    """Name and module of every ternary module, each once, in the order of ``named_modules``."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, TernaryModule)]


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


def configure_ternary_training(model: nn.Module, accum_threshold: int = 32, e_accum_threshold: int = 32) -> int:
    """Set the vote thresholds of every ternary module; returns ``accum_threshold``.

    Optimizers that are built afterwards start from these thresholds. Low ones (3 to 8) move signs and scales early and
    make the loss spike.

    Raises:
        ValueError: a threshold is outside 1..127, or beyond the accumulators of a module (7 for 4 bits, 1 for 2); then
            nothing is changed.
    """
    for name, value in (("accum_threshold", accum_threshold), ("e_accum_threshold", e_accum_threshold)):
        if not 1 <= value <= 127:
            raise ValueError(f"{name} must be in 1..127, got {value}")
    for name, module in ternary_modules(model):
        if accum_threshold > module.shape.largest_vote:
            raise ValueError(
                f"{name}: accumulators of {module.shape.vote_bits} bits end at {module.shape.largest_vote}, "
                f"below accum_threshold {accum_threshold}"
            )
    for _, module in ternary_modules(model):
        module.accum_threshold = accum_threshold
        module.e_accum_threshold = e_accum_threshold
    return accum_threshold


def reset_runtime_state(model: nn.Module) -> None:
    """Clear what modules carry from one batch to the next (KV caches, sliding windows).

    Call it between randomly sampled batches; keep the state only for text that is streamed in order.
    """
    for module in model.modules():
        reset = getattr(module, "reset_runtime_state", None)
        if callable(reset):
            reset()
