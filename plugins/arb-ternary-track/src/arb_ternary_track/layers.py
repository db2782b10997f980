"""Flips, saturation and histograms of ternary layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from arb_ternary.backends.dispatch import kernel
from arb_ternary.optim.ternary import to_host
from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_track.points import Histogram

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext

#: Elements that are counted at a time: counting takes eight bytes for each.
_CHUNK: Final = 1 << 20


class LayerMeter:
    """Measures every ternary layer that learns, every so many steps. It changes nothing.

    Before such a step it copies the packed trits, 2 bits per weight, to count the flips. While a
    policy reports steps that it has taken together, the model is ahead of the step. Layers are then
    measured after the last of them, without flips.

    Args:
        every: steps between two measurements; 0 = none.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._due = False
        self._copied_at = -1
        self._copies: dict[str, tuple[TernaryModule, Tensor]] = {}

    @torch.no_grad()
    def prepare(self, context: TrainingContext, step: int) -> None:
        """Copy the trits after ``step`` if the next step is to be measured."""
        self._copies = {}
        if not self._every or (step + 1) % self._every or context.reporting_behind:
            return
        self._copied_at = step
        self._copies = {
            name: (module, module.weight.clone()) for name, module in _learning(context)
        }

    @torch.no_grad()
    def measure(
        self, context: TrainingContext, step: int
    ) -> tuple[dict[str, float], dict[str, Histogram]] | None:
        """Return scalars and histograms after ``step``; None if they are not due."""
        self._due |= bool(self._every) and step % self._every == 0
        if not self._due or context.reporting_behind:
            return None
        self._due = False

        scalars: dict[str, float] = {}
        histograms: dict[str, Histogram] = {}
        flips: dict[str, Tensor] = {}
        for name, module in _learning(context):
            # With sharded weights these are the rows of this rank; the others are elsewhere.
            votes = count_values(module.local_votes())
            largest = module.shape.largest_vote
            number = int(votes.sum())
            if number:
                ends = votes[: 129 - largest].sum() + votes[128 + largest :].sum()
                scalars[f"saturated/{name}"] = int(ends) / number
                histograms[f"accumulators/{name}"] = _histogram(votes)
            if module.exponent.numel():
                histograms[f"exponents/{name}"] = _histogram(count_values(module.exponent))
            before = self._copies.get(name)
            if self._copied_at == step - 1 and before is not None and before[0] is module:
                unpack = kernel(module.backend, "unpack")
                flips[name] = (unpack(before[1], module.shape) != module.trits()).sum()
        counts = to_host(flips.values())
        scalars |= {f"flips/{name}": count for name, count in zip(flips, counts, strict=True)}
        return scalars, histograms


def count_values(values: Tensor) -> Tensor:
    """Return how often -128 to 127 occur in an int8 tensor, as int64 on the CPU."""
    total = torch.zeros(256, dtype=torch.int64, device=values.device)
    for chunk in torch.split(values.reshape(-1), _CHUNK):
        total += torch.bincount(chunk.to(torch.int64) + 128, minlength=256)
    return total.cpu()


def _histogram(counts: Tensor) -> Histogram:
    """Return the histogram of :func:`count_values`, without the empty ends."""
    occurring = np.flatnonzero(counts.numpy())
    first = int(occurring[0])
    return Histogram(first - 128, counts.numpy()[first : int(occurring[-1]) + 1].copy())


def _learning(context: TrainingContext) -> list[tuple[str, TernaryModule]]:
    return [(name, module) for name, module in ternary_modules(context.model) if not module.frozen]
