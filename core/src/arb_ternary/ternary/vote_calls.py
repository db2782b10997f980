"""Apply the votes of many modules, with one launch where a backend can do so.

The kernel ``apply_together(op, states, settings)`` of a backend does what calls of ``op`` with each
state and its settings do, and returns the numbers that they return as one int64 tensor ``[n]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from arb_ternary.backends.select import get_backend
from arb_ternary.ternary.module import TernaryModule


class VoteCall(NamedTuple):
    """How the votes of one module are applied.

    Attributes:
        module: the module.
        op: the kernel.
        settings: the arguments of the kernel after the state of the module.
    """

    module: TernaryModule
    op: Literal["apply_votes", "apply_scaled_votes", "apply_exponent_votes"]
    settings: tuple[int, ...]


def apply_together(calls: Sequence[VoteCall]) -> dict[TernaryModule, Tensor]:
    """Make the calls that a backend can combine, each of another module.

    Returns:
        The number of changes of each module whose call was made, int64 scalars on its device. The
        caller makes the other calls.
    """
    combined: dict[Any, list[VoteCall]] = {}
    for call in calls:
        module = call.module
        if module.shard is None and "apply_together" in get_backend(module.backend).kernels:
            key = (call.op, module.backend, module.weight.device)
            combined.setdefault(key, []).append(call)
    changed: dict[TernaryModule, Tensor] = {}
    for (op, backend, _), alike in combined.items():
        if len(alike) > 1:
            modules = [call.module for call in alike]
            counts = _run_together(op, backend, modules, [call.settings for call in alike])
            changed.update(zip(modules, counts, strict=True))
    return changed


def _run_together(
    op: str,
    backend: str,
    modules: Sequence[TernaryModule],
    settings: Sequence[tuple[int, ...]],
) -> Sequence[Tensor]:
    """Make calls of one op by one backend on one device."""
    learns_exponents = op == "apply_exponent_votes"
    if learns_exponents:
        # First, so that a backend may cache facts about the new exponents by their version.
        exponents = [tensor for each in modules for tensor in (each.exponent, each.exponent_votes)]
        torch.autograd.graph.increment_version(exponents)
    states = [module.vote_state() for module in modules]
    kernel: Any = get_backend(backend).kernels["apply_together"]
    counts: Tensor = kernel(op, states, settings)
    if not learns_exponents:
        weights = [tensor for each in modules for tensor in (each.weight, each.votes)]
        torch.autograd.graph.increment_version(weights)
    return counts.unbind()
