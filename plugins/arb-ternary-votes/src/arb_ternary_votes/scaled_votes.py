"""Scaled votes: the default update rule. Magnitude-aware, stochastically rounded votes with
normalisers of O(N + K).

A trit and its accumulator are a fixed-point number ``T + A / U`` in base ``U`` (the *cell*: quanta
a trit). In backward each element of the gradient is divided by its normaliser, clipped, scaled to
``rate * U`` quanta and rounded stochastically into the accumulator, tile by tile. A step turns
accumulators that left their cell into flips of one trit step and carries the rest (or, with
``carry`` off, starts again in the middle of the cell). Normalisers are those of the steps before
(delayed scaling), so a gradient is never needed twice; the first step casts no votes.

All state is integer: the accumulators in the modules, and two int16 vectors a weight
(:mod:`arb_ternary_votes.magnitudes`). With int8 gradients the votes are exact integers too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, Final, Literal

import torch
from attrs import asdict
from torch import Tensor

from arb_ternary.backends.select import get_backend
from arb_ternary.counters.hashing import hash_words, uniform
from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import Trainable
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_votes.config import ScaledVotesConfig
from arb_ternary_votes.levels import LARGEST_UNIT, in_quanta
from arb_ternary_votes.normalised_votes import NormalisedVotes, casts_integers, has_exact_gradient
from arb_ternary_votes.orthogonal import TRANSFORM as HALF_ORTHOGONAL
from arb_ternary_votes.spectral_clip import TRANSFORM as CLIPPED
from arb_ternary_votes.weight_gradients import HEAD

#: Use of the counter hash, beside those of core's kernels and of sums of three levels.
USE_SPREAD: Final = 7

# : Quanta a trit by bits of an accumulator, where none are given. Half the range lets a carry fit;
# with few bits, a cell : as large as the range trains better, and what a flip would carry
# saturates.
CELLS: Final = {8: 64, 4: 7, 2: 1}

# : Votes of the tail: a vote is cast where the scaled gradient exceeds a half, give or take noise
# of a quarter, and is : never more than one quantum.
_TAIL_NOISE_SHIFT: Final = 2
_TAIL_LIMIT: Final = 1.25
#: ``E|x|`` of a normal gradient of one standard deviation.
_MEAN_SIZE: Final = math.sqrt(2.0 / math.pi)


class ScaledVotes(NormalisedVotes):
    """The scaled-vote optimizer; see the module's docstring for the rule.

    The rate of a step, as a scheduler set it, acts on the votes that are cast after the step. With
    a rate of 0 no votes are cast. A loss signal is looked at only for whether it is finite.

    Args:
        modules: ternary modules by qualified name.
        lr: rate, in trits a step for a gradient of one standard deviation.
        clip: largest normalised gradient of proportional votes.
        tail: whether votes are cast only where the gradient is in the tail of its distribution;
            None: where accumulators have 4 bits and gradients are float, without ``vote_levels``.
        vote_levels: 3 casts votes of -1, 0 and 1 in a unit as large as the clip, whose sum over a
            step becomes quanta (:mod:`arb_ternary_votes.levels`); None casts quanta.
        carry: whether a flip keeps what exceeds the cell.
        leak: share of an accumulator that decays each step, times the rate.
        leak_every: updates from one decay to the next, which takes as many shares, but no more than
            all of it.
        spread: whether accumulators that are all 0 begin anywhere in their cells
            (:func:`spread_votes`).
        orthogonal: whether votes of linears, but not of one called ``head``, are of a gradient of
            which half is orthogonalised (:mod:`arb_ternary_votes.orthogonal`); they are cast by
            factors also with int8 gradients.
        spectral_clip: whether they are instead of a gradient whose largest singular values are cut
            to the least of them (:mod:`arb_ternary_votes.spectral_clip`), for less time in wide
            layers.
        magnitude_decay: of the running magnitudes.
        cell: quanta a trit; None takes 64, 7 or 1 for 8, 4 or 2 bits, in proportion to a module's
            ``accum_threshold``.
        exponent_rate: of the exponents, where they learn.
        band: how far exponents may move from their origin.

    Raises:
        ValueError: a cell larger than a module's accumulators can hold; votes of the tail for a
            module whose gradients are exact integers, or together with ``vote_levels``; or
            ``leak_every`` without a leak; or both ``orthogonal`` and ``spectral_clip``.
    """

    def __init__(
        self,
        modules: Mapping[str, TernaryModule],
        *,
        lr: float = 0.1,
        clip: float = 2.5,
        tail: bool | None = None,
        vote_levels: Literal[3] | None = None,
        carry: bool = True,
        leak: float = 0.02,
        leak_every: int = 1,
        spread: bool = False,
        orthogonal: bool = False,
        spectral_clip: bool = False,
        magnitude_decay: float = 0.98,
        cell: int | None = None,
        exponent_rate: float = 0.05,
        band: int = 2,
    ) -> None:
        config = ScaledVotesConfig(
            lr=lr,
            clip=clip,
            tail=tail,
            vote_levels=vote_levels,
            carry=carry,
            leak=leak,
            leak_every=leak_every,
            spread=spread,
            orthogonal=orthogonal,
            spectral_clip=spectral_clip,
            magnitude_decay=magnitude_decay,
            cell=cell,
            exponent_rate=exponent_rate,
            band=band,
        )
        if tail and vote_levels:
            raise ValueError(
                "tail: true does not go with vote_levels: votes of the tail are one quantum each"
            )
        if orthogonal and spectral_clip:
            raise ValueError(
                "orthogonal and spectral_clip both say what votes are cast of; leave one of them "
                "out"
            )
        if leak_every != 1 and not leak:
            raise ValueError(
                f"leak_every: {leak_every} has no effect with leak: 0, with which nothing decays"
            )
        for name, module in modules.items():
            held = _cell({"cell": cell, "accum_threshold": module.accum_threshold}, module)
            if held > module.shape.largest_vote:
                which = (
                    "cell" if cell else f"accum_threshold: {module.accum_threshold} makes a cell"
                )
                raise ValueError(
                    f"{which}: {held} does not fit the {module.shape.vote_bits}-bit accumulators "
                    f"of {name!r}, which hold up to {module.shape.largest_vote}"
                )
            if tail and has_exact_gradient(module):
                raise ValueError(
                    f"tail: true does not fit {name!r}, whose gradients are int8: shifts by whole "
                    f"powers of two cannot "
                    "set how often a vote is cast. Take gradients 'float', or tail null"
                )
        self.sums_votes = vote_levels is not None
        self._cast_of = HALF_ORTHOGONAL if orthogonal else CLIPPED if spectral_clip else None
        of_modules = ("vote_levels", "spread", "orthogonal", "spectral_clip")
        options = {name: value for name, value in asdict(config).items() if name not in of_modules}
        super().__init__(modules, {**options, "base_lr": lr})
        for group, members in zip(self.param_groups, self._modules, strict=True):
            for module in members if spread else ():
                spread_votes(module, _cell(group, module))
        for module in modules.values() if self.sums_votes else ():
            module.sum_votes()

    def _transform(self, name: str, module: TernaryModule) -> str | None:
        hidden = isinstance(module, TernaryLinear) and name.rpartition(".")[2] != HEAD
        return self._cast_of if hidden else None

    def _quanta(self, group: Mapping[str, Any], module: TernaryModule) -> float:
        return float(group["vote_rate"]) * _cell(group, module)

    def _scaling(
        self, group: Mapping[str, Any], module: TernaryModule, quanta: float
    ) -> tuple[float, float, int]:
        if self.sums_votes:
            # Whatever the rate: the owner of a sum knows what a vote is worth. In float32 a clipped
            # gradient and its noise can round up to the next whole number, so that the clip is a
            # 256th below it; shifts are exact.
            return 1.0 / group["clip"], 1.0 if casts_integers(module) else 255 / 256, 0
        if not _in_tail(group, module):
            return super()._scaling(group, module, quanta)
        # Of a normal gradient, the share beyond +-tau is that for which stochastic rounding would
        # have cast a vote.
        share = _MEAN_SIZE * min(quanta, 1.0)
        tau = -NormalDist().inv_cdf(share / 2)
        return 0.5 / tau, _TAIL_LIMIT, _TAIL_NOISE_SHIFT

    def _exponent_quanta(self, group: Mapping[str, Any], module: TernaryModule) -> float:
        # At the initial rate: the schedule is in the votes already.
        quanta = float(group["base_lr"]) * _cell(group, module)
        if not self.sums_votes:
            return quanta
        # Votes of three levels do not know the rate, so that the exponents follow it by whole
        # powers of two.
        return quanta / self._unit(group, module, self._tracked(module)[1].spread)

    def defer_step(self) -> None:
        """See :class:`TernaryOptimizer`; ConfigError with ``vote_levels``, whose sums cannot drop
        one micro-batch.
        """
        if self.sums_votes:
            raise ConfigError(
                "vote_levels: votes are summed until a step is taken, and what puts steps off may "
                "drop some of them",
                "Leave vote_levels out, or take gradient_accumulation_steps instead.",
            )
        super().defer_step()

    def whole_votes(self, module: TernaryModule, sums: Tensor, first_row: int) -> Tensor:
        """See :class:`TernaryOptimizer`; with ``vote_levels`` a vote is worth the clip at the rate,
        over the casts.
        """
        if not self.sums_votes:
            return sums
        group, magnitudes = self._tracked(module)
        unit = (
            self._unit(group, module, max(magnitudes.casts, module.casts))
            if magnitudes.steps
            else 0.0
        )
        return in_quanta(
            sums, min(unit, LARGEST_UNIT), module.control, first_row, get_backend(module.backend)
        )

    def _unit(self, group: Mapping[str, Any], module: TernaryModule, casts: int) -> float:
        """Quanta that a vote is worth, of three levels."""
        return float(group["clip"]) * self._quanta(group, module) / casts

    def _flip(
        self, group: dict[str, Any], module: TernaryModule, place: tuple[int, int], voted: bool
    ) -> Tensor:
        # Groups of a checkpoint from before the option do not have it.
        every = int(group.get("leak_every", 1))
        leaks = (self.updates + 1) % every == 0
        decay = round(65536 * min(1.0, group["leak"] * group["lr"] * every)) if leaks else 0
        return module.apply_votes("apply_scaled_votes", _cell(group, module), decay, group["carry"])


def spread_votes(module: TernaryModule, cell: int) -> None:
    """Begin with accumulators anywhere in their cells, where all of them are 0.

    Every element gets ``floor(u * (2 U - 1)) - (U - 1)`` with ``U`` the cell and ``u`` of the
    counter hash, uniform over the ``2 U - 1`` values that turn no trit. Where they all begin at 0,
    no trit turns before the votes of a whole cell have come together, and then many do at once.
    """
    if not bool(module.logical_votes().any()):
        seed, _, stream = hash_words(module.control)
        shape = (module.shape.out_features, module.shape.in_features)
        u_NK = uniform(shape, seed, 0, stream + USE_SPREAD, device=module.weight.device)
        module.set_votes((u_NK.mul_(2 * cell - 1).floor_().sub_(cell - 1)).to(torch.int8))


def _in_tail(group: Mapping[str, Any], module: TernaryModule) -> bool:
    if group["tail"] is None:
        return module.shape.vote_bits == 4 and not has_exact_gradient(module)
    return bool(group["tail"])


def _cell(group: Mapping[str, Any], module: TernaryModule) -> int:
    """The group's cell, or as many quanta for each of its threshold's votes as the default has."""
    usual = min(32, module.shape.largest_vote)
    return int(group["cell"] or CELLS[module.shape.vote_bits] * group["accum_threshold"] // usual)


def build(config: ScaledVotesConfig, trainable: Trainable) -> ScaledVotes:
    """Factory of the optimizer ``scaled_votes``: all ternary modules of ``trainable``.

    Raises:
        ConfigError: the rate is still ``auto``, which a run replaces by a number before it
            builds anything.
    """
    if config.auto_fields:
        raise ConfigError(
            "lr: auto is chosen by a run of `arb train`, and nothing here says its length",
            "Give a number.",
        )
    return ScaledVotes(trainable.ternary, **asdict(config))
