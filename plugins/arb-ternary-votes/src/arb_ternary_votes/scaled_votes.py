"""Scaled votes, the default update rule: stochastically rounded votes of normalised gradients.

A trit and its accumulator are a fixed-point number ``T + A / U`` in base ``U`` (the *cell*: quanta
per trit). In backward each element of the gradient is divided by its normaliser, clipped, scaled to
``rate * U`` quanta and rounded stochastically into the accumulator, tile by tile. A step turns
accumulators that left their cell into flips of one trit step and carries the rest (or, with
``carry`` off, starts again in the middle of the cell). Normalisers are those of the steps before
(delayed scaling), so a gradient is never needed twice; the first step casts no votes.

All state is integer: the accumulators in the modules, and two int16 vectors per weight
(:mod:`arb_ternary_votes.magnitudes`). With int8 gradients the votes are exact integers too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, Final

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
from arb_ternary_votes.rate import AUTO
from arb_ternary_votes.spectral_clip import TRANSFORM as CLIPPED
from arb_ternary_votes.weight_gradients import HEAD

#: Use of the counter hash, besides those of core's kernels and of sums of three levels.
USE_SPREAD: Final = 7

#: Quanta per trit by bits of an accumulator, if none are given. With half the range a carry fits.
#: With few bits a cell as large as the range trains better, and what a flip would carry saturates.
CELLS: Final = {8: 64, 4: 7, 2: 1}

#: Votes of the tail: a vote is cast if the scaled gradient exceeds a half, give or take noise of a
#: quarter, and is never more than one quantum.
_TAIL_NOISE_SHIFT: Final = 2
_TAIL_LIMIT: Final = 1.25
#: ``E|x|`` of a normal gradient of one standard deviation.
_MEAN_SIZE: Final = math.sqrt(2.0 / math.pi)


class ScaledVotes(NormalisedVotes):
    """The scaled-vote optimizer; see the module's docstring for the rule.

    The rate of a step, as a scheduler set it, acts on the votes that are cast after the step. With
    a rate of 0 no votes are cast. Of a loss signal only whether it is finite matters.

    Args:
        modules: ternary modules by qualified name.
        options: see :class:`~arb_ternary_votes.config.ScaledVotesConfig`. By default votes of the
            tail are cast if accumulators have 4 bits and gradients are float, without
            ``vote_levels``.

    Raises:
        ValueError: the cell is larger than a module's accumulators can hold; votes of the tail are
            asked for a module whose gradients are exact integers, or together with ``vote_levels``;
            ``leak_every`` is given without a leak; or both ``orthogonal`` and ``spectral_clip``.
    """

    def __init__(self, modules: Mapping[str, TernaryModule], **options: Any) -> None:
        config = ScaledVotesConfig(**options)
        if config.tail and config.vote_levels:
            raise ValueError(
                "tail: true does not go with vote_levels: votes of the tail are one quantum each"
            )
        if config.orthogonal and config.spectral_clip:
            raise ValueError(
                "orthogonal and spectral_clip both choose what votes are cast from; leave one of "
                "them out"
            )
        if config.leak_every != 1 and not config.leak:
            raise ValueError(
                f"leak_every: {config.leak_every} has no effect with leak: 0, with which nothing "
                f"decays"
            )
        for name, module in modules.items():
            _check_module(config, name, module)
        self.sums_votes = config.vote_levels is not None
        self._gradient_transform = _transform_of(config)

        # These options are not settings of a group: they are fixed when the optimizer is made.
        of_modules = ("vote_levels", "spread", "orthogonal", "spectral_clip")
        settings = {name: value for name, value in asdict(config).items() if name not in of_modules}
        super().__init__(modules, {**settings, "base_lr": config.lr})

        if config.spread:
            for group, members in zip(self.param_groups, self._modules, strict=True):
                for module in members:
                    spread_votes(module, _cell(group, module))
        if self.sums_votes:
            for module in modules.values():
                module.sum_votes()

    def _transform(self, name: str, module: TernaryModule) -> str | None:
        if not isinstance(module, TernaryLinear) or name.rpartition(".")[2] == HEAD:
            return None
        return self._gradient_transform

    def _quanta(self, group: Mapping[str, Any], module: TernaryModule) -> float:
        return float(group["vote_rate"]) * _cell(group, module)

    def _scaling(
        self, group: Mapping[str, Any], module: TernaryModule, quanta: float
    ) -> tuple[float, float, int]:
        if self.sums_votes:
            # The factor does not depend on the rate: the owner of a sum knows what a vote is worth.
            # In float32 a clipped gradient and its noise can round up to the next whole number, so
            # the clip is a 256th below it; shifts are exact.
            return 1.0 / group["clip"], 1.0 if casts_integers(module) else 255 / 256, 0
        if not _in_tail(group, module):
            return super()._scaling(group, module, quanta)
        # The share of a normal gradient beyond +-tau equals the share for which stochastic rounding
        # would have cast a vote.
        share = _MEAN_SIZE * min(quanta, 1.0)
        tau = -NormalDist().inv_cdf(share / 2)
        return 0.5 / tau, _TAIL_LIMIT, _TAIL_NOISE_SHIFT

    def _exponent_quanta(self, group: Mapping[str, Any], module: TernaryModule) -> float:
        # At the initial rate: the schedule is in the votes already.
        quanta = float(group["base_lr"]) * _cell(group, module)
        if not self.sums_votes:
            return quanta
        # Votes of three levels do not depend on the rate, so the exponents follow it by whole
        # powers of two.
        return quanta / self._unit(group, module, self._magnitudes[module].spread)

    def defer_step(self) -> None:
        """Make votes smaller if there are more micro-batches than in the last step.

        Raises:
            ConfigError: ``vote_levels`` is set, whose sums cannot drop one micro-batch.
        """
        if self.sums_votes:
            raise ConfigError(
                "vote_levels: votes are summed until a step is taken, and an optimizer that puts "
                "steps off may drop some of them",
                "Leave vote_levels out, or use gradient_accumulation_steps instead.",
            )
        super().defer_step()

    def whole_votes(self, module: TernaryModule, sums: Tensor, first_row: int) -> Tensor:
        """Return the sums of a step in quanta.

        With ``vote_levels`` a vote is worth the clip at the rate, divided by the number of casts.
        """
        if not self.sums_votes:
            return sums
        group = self._group_of(module)
        magnitudes = self._magnitudes[module]
        unit = 0.0
        if magnitudes.steps:
            unit = self._unit(group, module, max(magnitudes.casts, module.casts))
        backend = get_backend(module.backend)
        return in_quanta(sums, min(unit, LARGEST_UNIT), module.control, first_row, backend)

    def _unit(self, group: Mapping[str, Any], module: TernaryModule, casts: int) -> float:
        """Return the quanta that a vote of three levels is worth."""
        return float(group["clip"]) * self._quanta(group, module) / casts

    def _flip_settings(self, group: Mapping[str, Any], module: TernaryModule) -> tuple[int, int]:
        # Groups of a checkpoint from before the option do not have it.
        every = int(group.get("leak_every", 1))
        decay = 0
        if (self.updates + 1) % every == 0:
            decay = round(65536 * min(1.0, group["leak"] * group["lr"] * every))
        return _cell(group, module), decay


def spread_votes(module: TernaryModule, cell: int) -> None:
    """Begin with accumulators anywhere in their cells, if all of them are 0.

    Every element gets ``floor(u * (2 U - 1)) - (U - 1)`` with ``U`` the cell and ``u`` from the
    counter hash: uniform over the ``2 U - 1`` values that turn no trit. If all accumulators begin
    at 0, no trit turns before the votes of a whole cell have come together, and then many turn at
    once.
    """
    if bool(module.logical_votes().any()):
        return
    seed, _, stream = hash_words(module.control)
    shape = (module.shape.out_features, module.shape.in_features)
    u_NK = uniform(shape, seed, 0, stream + USE_SPREAD, device=module.weight.device)
    votes_NK = u_NK.mul_(2 * cell - 1).floor_().sub_(cell - 1)
    module.set_votes(votes_NK.to(torch.int8))


def _check_module(config: ScaledVotesConfig, name: str, module: TernaryModule) -> None:
    """Raise ValueError if the rule with these options cannot train ``module``."""
    shape = module.shape
    settings = {"cell": config.cell, "accum_threshold": module.accum_threshold}
    cell = _cell(settings, module)
    if cell > shape.largest_vote:
        which = f"accum_threshold: {module.accum_threshold} makes a cell"
        if config.cell:
            which = "cell"
        raise ValueError(
            f"{which}: {cell} does not fit the {shape.vote_bits}-bit accumulators of {name!r}, "
            f"which hold up to {shape.largest_vote}"
        )
    if config.tail and has_exact_gradient(module):
        raise ValueError(
            f"tail: true does not fit {name!r}, whose gradients are int8: shifts by whole powers "
            f"of two cannot set how often a vote is cast. Take gradients 'float', or tail null"
        )


def _transform_of(config: ScaledVotesConfig) -> str | None:
    """Return the transformation of gradients that the options ask for."""
    if config.orthogonal:
        return HALF_ORTHOGONAL
    return CLIPPED if config.spectral_clip else None


def _in_tail(group: Mapping[str, Any], module: TernaryModule) -> bool:
    """Return whether votes of ``module`` are votes of the tail."""
    if group["tail"] is None:
        return module.shape.vote_bits == 4 and not has_exact_gradient(module)
    return bool(group["tail"])


def _cell(group: Mapping[str, Any], module: TernaryModule) -> int:
    """Return the group's cell, or the default cell in proportion to the group's threshold."""
    usual = min(32, module.shape.largest_vote)
    return int(group["cell"] or CELLS[module.shape.vote_bits] * group["accum_threshold"] // usual)


def build(config: ScaledVotesConfig, trainable: Trainable) -> ScaledVotes:
    """Build the optimizer ``scaled_votes`` over all ternary modules of ``trainable``.

    Raises:
        ConfigError: the rate is still ``auto``, which a run replaces before it builds anything.
    """
    if config.lr == AUTO:
        raise ConfigError(
            "lr: auto is chosen by a run of `arb train`, and nothing here says its length",
            "Give a number.",
        )
    return ScaledVotes(trainable.ternary, **asdict(config))
