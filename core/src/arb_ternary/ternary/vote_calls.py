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

    def run(self) -> Tensor:
        """Make this call alone; return the number of changes, an int64 scalar."""
        if self.op == "apply_exponent_votes":
            return self.module.apply_exponent_votes(*self.settings)
        return self.module.apply_votes(self.op, *self.settings)

    def may_be_combined(self) -> bool:
        """Whether the backend of the module can make this call together with others."""
        module = self.module
        if self.op == "apply_exponent_votes" and module.voting_exponents() is None:
            return False
        return module.shard is None and "apply_together" in get_backend(module.backend).kernels


def apply_calls(calls: Sequence[VoteCall]) -> list[Tensor]:
    """Make the calls; return the number of changes of each, int64 scalars on its device."""
    changed: dict[int, Tensor] = {}
    combined: dict[tuple[str, str, torch.device], list[int]] = {}
    for index, call in enumerate(calls):
        if call.may_be_combined():
            key = (call.op, call.module.backend, call.module.weight.device)
            combined.setdefault(key, []).append(index)
        else:
            changed[index] = call.run()
    for (op, backend, _), indices in combined.items():
        counts = _run_together(op, backend, [calls[index] for index in indices])
        changed.update(zip(indices, counts, strict=True))
    return [changed[index] for index in range(len(calls))]


def _run_together(op: str, backend: str, calls: Sequence[VoteCall]) -> Sequence[Tensor]:
    """Make calls of one op by one backend on one device."""
    if len(calls) == 1:
        return [calls[0].run()]
    modules = [call.module for call in calls]
    learns_exponents = op == "apply_exponent_votes"
    if learns_exponents:
        # First, so that a backend may cache facts about the new exponents by their version.
        exponents = [tensor for each in modules for tensor in (each.exponent, each.exponent_votes)]
        torch.autograd.graph.increment_version(exponents)
    states = [module.vote_state() for module in modules]
    kernel: Any = get_backend(backend).kernels["apply_together"]
    counts: Tensor = kernel(op, states, [call.settings for call in calls])
    if not learns_exponents:
        weights = [tensor for each in modules for tensor in (each.weight, each.votes)]
        torch.autograd.graph.increment_version(weights)
    return counts.unbind()
