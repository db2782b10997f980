"""The micro-batches that are on their way to the next step, and what they have left behind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.module import TernaryModule
from arb_ternary.ternary.step_sums import StepSums
from arb_ternary_train.model_options import to_device


@frozen
class Outcome:
    """Of a micro-batch: its ``loss``, and the predictions that counted in it."""

    loss: float
    tokens: int

    @property
    def finite(self) -> bool:
        """Whether it takes part in the step."""
        return math.isfinite(self.loss)


@frozen
class InFlight:
    """Micro-batches since the last step.

    Attributes:
        accumulated: since the last call of ``optimizer.step``, those without a finite loss too.
        losses: of all that have a finite one.
        tokens: of the same ones.
        cast: with a finite loss, since the last call of ``optimizer.step``.
        microbatch_index: index of the next micro-batch of the step, from 0.
    """

    accumulated: int = 0
    losses: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    cast: int = 0
    microbatch_index: int = 0

    def plus(self, outcome: Outcome) -> InFlight:
        """With one micro-batch more. Where its loss is not finite, it has a place, and nothing
        else.
        """
        longer = evolve(
            self, accumulated=self.accumulated + 1, microbatch_index=self.microbatch_index + 1
        )
        if not outcome.finite:
            return longer
        losses = (*self.losses, outcome.loss)
        tokens = (*self.tokens, outcome.tokens)
        return evolve(longer, losses=losses, tokens=tokens, cast=self.cast + 1)

    @property
    def recent(self) -> tuple[float, ...]:
        """Losses since the last call of ``optimizer.step``."""
        return self.losses[len(self.losses) - self.cast :]

    def attempted(self, *, dropped: bool) -> InFlight:
        """After a call of ``optimizer.step`` that did not step; it may have dropped what it was
        called for.
        """
        if not dropped:
            return evolve(self, accumulated=0, cast=0)
        kept = len(self.losses) - self.cast
        return InFlight(
            0,
            self.losses[:kept],
            self.tokens[:kept],
            microbatch_index=self.microbatch_index - self.accumulated,
        )


def in_flight_state(model: nn.Module, in_flight: InFlight) -> dict[str, Any]:
    """``in_flight`` and what its micro-batches have left in ``model``. The tensors are those in
    use.
    """
    # Between steps statistics of gradients and sums of votes are zero, and of no interest.
    modules = dict(ternary_modules(model)) if in_flight.losses else {}
    undo = {
        name: {**kept, **_logical(module, kept)}
        for name, module in modules.items()
        if (kept := module.kept_votes)
    }
    sums = {name: _sums(module.sums) for name, module in modules.items() if module.sums is not None}
    lost = in_flight.microbatch_index != len(in_flight.losses)
    return {
        "accumulated": in_flight.accumulated,
        "losses": list(in_flight.losses),
        "tokens": list(in_flight.tokens),
        **({"cast": in_flight.cast, "place": in_flight.microbatch_index} if lost else {}),
        "gradients": {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        "statistics": {name: module.stats for name, module in modules.items()},
        "magnitudes": {
            name: m.magnitudes for name, m in modules.items() if m.magnitudes is not None
        },
        **({"sums": sums} if sums else {}),
        **({"undo": undo} if undo else {}),
    }


def load_in_flight(model: nn.Module, state: Mapping[str, Any], device: torch.device) -> InFlight:
    """Put back into ``model`` what :func:`in_flight_state` gave; the micro-batches. Its tensors may
    be used on.
    """
    for name, parameter in model.named_parameters():
        gradient = state["gradients"].get(name)
        parameter.grad = (
            None if gradient is None else gradient.to(parameter.device, parameter.dtype, copy=True)
        )
    for name, module in ternary_modules(model):
        if name in state["statistics"]:
            module.stats.copy_(state["statistics"][name])
        if module.magnitudes is not None and name in state["magnitudes"]:
            module.magnitudes.copy_(state["magnitudes"][name])
        kept = state.get("undo", {}).get(name)
        if kept is not None:
            packed = {"votes": module.packed_votes(kept["votes"])} if "votes" in kept else {}
            kept = {**to_device(kept, device), **packed}
        module.kept_votes = kept
        if module.sums is not None:
            module.sums.clear()
            found = state.get("sums", {}).get(name, {})
            module.sums.casts = found.get("casts", 0)
            for part, tensor in module.sums.tensors().items():
                if part in found:
                    tensor.copy_(found[part])
    losses = tuple(state["losses"])
    accumulated = state["accumulated"]
    cast = state.get("cast", accumulated)
    index = state.get("place", len(losses))
    return InFlight(accumulated, losses, tuple(state["tokens"]), cast, index)


def _logical(module: TernaryModule, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Accumulators in no layout of a backend."""
    return {"votes": module.logical_votes(kept["votes"])} if "votes" in kept else {}


def _sums(sums: StepSums) -> dict[str, Any]:
    """What votes have been summed to; all that is of one micro-batch only has been added up and is
    zero.
    """
    votes = {"votes": sums.votes, "exponent_votes": sums.exponent_votes, "casts": sums.casts}
    return {**votes, **({} if sums.bias is None else {"bias": sums.bias})}
