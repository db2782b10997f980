"""Scaled votes: the default update rule. Magnitude-aware, stochastically rounded votes with normalisers of O(N + K).

A trit and its accumulator are a fixed-point number ``T + A / U`` in base ``U`` (the *cell*: quanta a trit). In backward
each element of the gradient is divided by its normaliser, clipped, scaled to ``rate * U`` quanta and rounded
stochastically into the accumulator, tile by tile. A step turns accumulators that left their cell into flips of one
trit step and carries the rest (or, with ``carry`` off, starts again in the middle of the cell). Normalisers are
those of the steps before (delayed scaling), so a gradient is never needed twice; the first step casts no votes.

All state is integer: the accumulators in the modules, and two int16 vectors a weight
(:mod:`arb_ternary.optim.magnitudes`). With int8 gradients the votes are exact integers too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from attrs import asdict, frozen
from attrs.validators import and_, ge, gt, instance_of, le, lt, optional
from torch import Tensor

from arb_ternary.backends.dispatch import kernel
from arb_ternary.config.options import option
from arb_ternary.optim.magnitudes import Magnitudes
from arb_ternary.optim.protocol import Trainable
from arb_ternary.optim.sign_votes import effective_threshold
from arb_ternary.optim.ternary import TernaryOptimizer
from arb_ternary.ternary.control import hash_words
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.module import TernaryModule

__all__ = ["CELLS", "ScaledVotes", "ScaledVotesConfig", "build"]

#: Quanta a trit by bits of an accumulator, where none are given. Half the range lets a carry fit; with few bits, a cell
#: as large as the range trains better, and what a flip would carry saturates.
CELLS: Final = {8: 64, 4: 7, 2: 1}


@frozen(kw_only=True)
class ScaledVotesConfig:
    """Options of the scaled-vote rule."""

    lr: float = option(
        0.1,
        "Rate at the start: trits that a weight moves in a step whose gradient is one standard deviation.",
        validator=gt(0.0),
    )
    clip: float = option(2.5, "Largest normalised gradient, in standard deviations.", validator=gt(0.0))
    carry: bool = option(
        True,
        "A flip leaves the accumulator what exceeds the cell; false = it starts again in the middle of the cell.",
        validator=instance_of(bool),
    )
    leak: float = option(
        0.02, "Share of an accumulator that decays each step, times the rate.", validator=and_(ge(0.0), le(1.0))
    )
    magnitude_decay: float = option(
        0.98, "Decay of the running gradient magnitudes, per step.", validator=and_(ge(0.0), lt(1.0))
    )
    cell: int | None = option(
        None,
        "Quanta a trit, 1..127; null takes 64, 7 or 1 for accumulators of 8, 4 or 2 bits.",
        validator=optional(and_(instance_of(int), ge(1), le(127))),
    )
    exponent_rate: float = option(
        0.05, "Rate of the exponents at the start: factors of two a step, likewise.", validator=gt(0.0)
    )
    band: int = option(2, "How far an exponent may move from its initial value.", validator=ge(0))


class ScaledVotes(TernaryOptimizer):
    """The scaled-vote optimizer; see the module's docstring for the rule.

    The rate of a step, as a scheduler set it, acts on the votes that are cast after the step. With a rate of 0 no votes
    are cast. A loss signal is looked at only for whether it is finite.

    Args:
        modules: ternary modules by qualified name.
        lr: rate, in trits a step for a gradient of one standard deviation.
        clip: largest normalised gradient.
        carry: whether a flip keeps what exceeds the cell.
        leak: share of an accumulator that decays each step, times the rate.
        magnitude_decay: of the running magnitudes.
        cell: quanta a trit; None takes 64, 7 or 1 for 8, 4 or 2 bits.
        exponent_rate: of the exponents, where they learn.
        band: how far exponents may move from their origin.

    Raises:
        ValueError: a cell larger than a module's accumulators can hold.
    """

    def __init__(
        self,
        modules: Mapping[str, TernaryModule],
        *,
        lr: float = 0.1,
        clip: float = 2.5,
        carry: bool = True,
        leak: float = 0.02,
        magnitude_decay: float = 0.98,
        cell: int | None = None,
        exponent_rate: float = 0.05,
        band: int = 2,
    ) -> None:
        config = ScaledVotesConfig(
            lr=lr,
            clip=clip,
            carry=carry,
            leak=leak,
            magnitude_decay=magnitude_decay,
            cell=cell,
            exponent_rate=exponent_rate,
            band=band,
        )
        for name, module in modules.items():
            if cell is not None and cell > module.shape.largest_vote:
                raise ValueError(
                    f"cell: {cell} does not fit the {module.shape.vote_bits}-bit accumulators of {name!r}, which hold "
                    f"up to {module.shape.largest_vote}"
                )
        super().__init__(modules, {**asdict(config), "base_lr": lr})
        self._magnitudes = [
            [Magnitudes(m.shape.out_features, m.shape.in_features, m.weight.device) for m in group]
            for group in self._modules
        ]
        for module in modules.values():
            module.use_scaled_votes(integer=_casts_integers(module))
        self._refresh_scales()

    def _apply_group(self, group: dict[str, Any], modules: list[TernaryModule]) -> tuple[Tensor, Tensor]:
        flips = torch.zeros((), dtype=torch.int64)
        moves = torch.zeros((), dtype=torch.int64)
        tracked = self._magnitudes[next(i for i, other in enumerate(self._modules) if other is modules)]
        decay = round(65536 * min(1.0, group["leak"] * group["lr"]))
        group["vote_rate"] = group["lr"]
        for module, magnitudes in zip(modules, tracked, strict=True):
            assert module.magnitudes is not None
            if not module.frozen and bool(module.magnitudes.any()):
                magnitudes.update(module.magnitudes, 1.0 - group["magnitude_decay"])
            _set_scale(module, magnitudes, group)
            if module.frozen or group["lr"] <= 0:
                continue
            if module.voting_exponents() is not None:
                moves += kernel(module.backend, "apply_exponent_votes")(
                    module.exponent,
                    module.exponent_votes,
                    module.exponent_origin,
                    group["e_accum_threshold"],
                    group["band"],
                    0,
                ).to(moves.device)
                torch.autograd.graph.increment_version((module.exponent, module.exponent_votes))
            flips += kernel(module.backend, "apply_scaled_votes")(
                module.weight,
                module.votes,
                _cell(group, module),
                decay,
                group["carry"],
                *hash_words(module.control),
                module.shape,
            ).to(flips.device)
            torch.autograd.graph.increment_version((module.weight, module.votes))
            if isinstance(module, TernaryLinear):
                rate = group["lr"] / group["base_lr"]
                module.apply_bias_votes(effective_threshold(group["accum_threshold"], rate, 0.0, None, None))
        return flips, moves

    def _refresh_scales(self) -> None:
        """Set every module's scales from the state and the rates of the last step; a schedule may be ahead of them."""
        for group, modules, tracked in zip(self.param_groups, self._modules, self._magnitudes, strict=True):
            group.setdefault("vote_rate", group["lr"])
            for module, magnitudes in zip(modules, tracked, strict=True):
                _set_scale(module, magnitudes, group)

    def state_dict(self) -> dict[str, Any]:
        """Settings, counters and the running magnitudes of every module."""
        tracked = [[magnitudes.state_dict() for magnitudes in group] for group in self._magnitudes]
        return {**super().state_dict(), "magnitudes": tracked}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        super().load_state_dict(state_dict)
        for tracked, saved in zip(self._magnitudes, state_dict["magnitudes"], strict=True):
            for magnitudes, state in zip(tracked, saved, strict=True):
                magnitudes.load_state_dict(state)
        self._refresh_scales()


def _cell(group: Mapping[str, Any], module: TernaryModule) -> int:
    return int(group["cell"] or CELLS[module.shape.vote_bits])


def _casts_integers(module: TernaryModule) -> bool:
    """Whether the gradient of the module's weight is an exact integer."""
    return module.gradients == "int8" and getattr(module, "activations", "int8") == "int8"


def _set_scale(module: TernaryModule, magnitudes: Magnitudes, group: Mapping[str, Any]) -> None:
    """Set what the next backward of ``module`` divides its gradient by; no votes before the first magnitudes."""
    assert module.vote_scale is not None
    integer = _casts_integers(module)
    cell = _cell(group, module)
    quanta = float(group["vote_rate"]) * cell
    if magnitudes.steps == 0 or quanta <= 0:
        module.vote_scale.fill_(31 if integer else 0)
        module.vote_limit = 1
        return
    module.vote_scale.copy_(magnitudes.shifts(quanta) if integer else magnitudes.factors(quanta))
    module.vote_limit = max(1, min(round(256 * group["clip"] * quanta), 256 * module.shape.largest_vote))
    # A score of one standard deviation, ``quanta * sqrt(G)``, is to move the exponent's accumulator by
    # ``exponent_rate`` of its threshold at the initial rate; the schedule is in the votes already.
    score = float(group["base_lr"]) * cell * math.sqrt(module.shape.group_size)
    shift = round(math.log2(score / (group["exponent_rate"] * group["e_accum_threshold"])))
    module.exponent_shift = min(31, max(0, shift))


def build(config: ScaledVotesConfig, trainable: Trainable) -> ScaledVotes:
    """Factory of the optimizer ``scaled_votes``: all ternary modules of ``trainable``."""
    return ScaledVotes(trainable.ternary, **asdict(config))
