"""Momentum votes: the accumulator is the momentum, and a flip feeds back what it took.

A vote is the gradient, normalised by row and column as in the default rule, times a number of
quanta that does not depend on the rate, rounded stochastically by the kernel ``cast_scaled_votes``.
Accumulators decay by a share per step, so they are exponential sums of the votes: the momentum of
SGD in 8 (or 4) bits. A trit moves one step if the momentum passes a threshold, which is then
subtracted: the momentum keeps what the flip did not do (error feedback). The threshold of each
module is servoed (:mod:`arb_ternary_votes.servo`) so that the share of flips follows the schedule.
Besides, the rate acts on the exponents and an integer bias only.

All state is integer: accumulators in the modules, two int16 vectors of magnitudes and one int16
level per weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from attrs import asdict

from arb_ternary.counters.hashing import STEP
from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import Trainable
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_votes.config import MomentumVotesConfig
from arb_ternary_votes.normalised_votes import NormalisedVotes
from arb_ternary_votes.servo import exact_threshold, level_of, next_level, whole_threshold

#: Standard deviation of the momentum of independent gradients by bits of an accumulator, in
#: quanta, if ``quanta`` is not given. Five of them fit into 8 bits. Three fit into 4 bits, with the
#: noise of rounding, which is as large as the votes.
SPREADS: Final = {8: 24.0, 4: 1.5}
#: Standard deviations at which the threshold starts.
_START: Final = 3.0


class MomentumVotes(NormalisedVotes):
    """The momentum-vote optimizer; see the module's docstring for the rule.

    The groups' ``lr`` is 1 at first, and a schedule drives it. With a rate of 0 nothing is cast,
    flips or decays. Of a loss signal only whether it is finite matters. The statistics of a step
    have ``flip_threshold``, the mean threshold of the modules.

    Args:
        modules: ternary modules by qualified name.
        options: options of the rule; None takes the defaults.

    Raises:
        ConfigError: a module has 2-bit accumulators, which cannot hold a momentum, or ``quanta``
            exceed what its accumulators hold.
    """

    def __init__(
        self, modules: Mapping[str, TernaryModule], options: MomentumVotesConfig | None = None
    ) -> None:
        options = MomentumVotesConfig() if options is None else options
        for name, module in modules.items():
            _check(name, module, options)
        super().__init__(modules, {**asdict(options), "base_lr": 1.0})
        self._levels: dict[TernaryModule, int] = {}
        for group, members in zip(self.param_groups, self._modules, strict=True):
            for module in members:
                self._levels[module] = _first_level(group, module)

    def thresholds(self) -> list[float]:
        """Return the threshold of every module, in the order of :attr:`modules`.

        A step uses one of the two whole numbers next to it.
        """
        return [exact_threshold(self._levels[module]) / 65536 for module in self.modules]

    def end_update(self, flips: Mapping[TernaryModule, int]) -> Mapping[str, float]:
        """Move the thresholds so that the right share of trits flips in the next step."""
        for module, flipped in flips.items():
            elements = module.shape.out_features * module.shape.in_features
            if module not in self._voted or not elements:
                continue
            group = self._group_of(module)
            self._levels[module] = next_level(
                self._levels[module],
                flipped,
                elements,
                min(1.0, group["flip_rate"] * group["lr"] ** group["power"]),
                gain=group["gain"],
                dead_band=group["dead_band"],
                largest=module.shape.largest_vote,
            )
        thresholds = self.thresholds()
        return {"flip_threshold": math.fsum(thresholds) / len(thresholds)}

    def _quanta(self, group: Mapping[str, Any], module: TernaryModule) -> float:
        return _quanta(group, module)

    def _exponent_quanta(self, group: Mapping[str, Any], module: TernaryModule) -> float:
        # Votes do not depend on the rate here, so the exponents follow the schedule by whole powers
        # of two.
        return _quanta(group, module) / float(group["vote_rate"])

    def _flip_settings(self, group: Mapping[str, Any], module: TernaryModule) -> tuple[int, int]:
        step = module.control.tolist()[STEP]
        threshold = whole_threshold(self._levels[module], step, module.shape.largest_vote)
        return threshold, round(65536 * group["decay"])

    def state_dict(self) -> dict[str, Any]:
        """Return settings, counters, and the magnitudes and threshold level of every module."""
        levels = []
        for members in self._modules:
            own = [self._levels[module] for module in members]
            levels.append(torch.tensor(own, dtype=torch.int16))
        return {**super().state_dict(), "levels": levels}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: it was taken from other modules.
        """
        super().load_state_dict(state_dict)
        levels = [[int(level) for level in saved] for saved in state_dict["levels"]]
        if [len(group) for group in levels] != [len(group) for group in self._modules]:
            raise ValueError("the levels of the thresholds are those of another number of modules")
        for members, own in zip(self._modules, levels, strict=True):
            self._levels.update(zip(members, own, strict=True))


def _check(name: str, module: TernaryModule, options: MomentumVotesConfig) -> None:
    """Raise ConfigError if the rule cannot train ``module``."""
    bits = module.shape.vote_bits
    largest = module.shape.largest_vote
    if bits not in SPREADS:
        raise ConfigError(
            f"optimizer: momentum_votes keeps a momentum in the accumulators, and those of "
            f"{name!r} have {bits} bits",
            "Use vote_bits 8 or 4, or the optimizer scaled_votes.",
        )
    if module.accum_threshold != min(32, largest):
        raise ConfigError(
            f"accum_threshold: momentum_votes moves its thresholds by itself, and {name!r} was "
            f"given {module.accum_threshold}",
            "Leave it out, or use the optimizer sign_votes or scaled_votes.",
        )
    if options.quanta is not None and options.quanta > largest:
        raise ConfigError(
            f"quanta: {options.quanta:g} do not fit the {bits}-bit accumulators of {name!r}, which "
            f"hold up to {largest}"
        )


def _quanta(group: Mapping[str, Any], module: TernaryModule) -> float:
    """Return the votes for a gradient of one standard deviation.

    The exponential sum of independent votes has the variance of one over ``1 - beta**2``.
    """
    if group["quanta"] is not None:
        return float(group["quanta"])
    return SPREADS[module.shape.vote_bits] * math.sqrt(1.0 - (1.0 - group["decay"]) ** 2)


def _first_level(group: Mapping[str, Any], module: TernaryModule) -> int:
    """Return the level of the threshold at the start."""
    spread = _quanta(group, module) / math.sqrt(1.0 - (1.0 - group["decay"]) ** 2)
    return level_of(max(1, min(round(_START * spread), module.shape.largest_vote)))


def build(config: MomentumVotesConfig, trainable: Trainable) -> MomentumVotes:
    """Build the optimizer ``momentum_votes`` over all ternary modules of ``trainable``."""
    return MomentumVotes(trainable.ternary, config)
