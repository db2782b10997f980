"""Momentum votes: the accumulator is the momentum, and a flip feeds back what it took.

A vote is the gradient, normalised by row and column as in the default rule, times a number of
quanta that does not depend on the rate, rounded stochastically by the kernel ``cast_scaled_votes``.
Accumulators decay by a share a step, so that they are exponential sums of the votes: the momentum
of SGD in 8 (or 4) bits. A trit takes a step where the momentum passes a threshold, which is then
subtracted: the momentum keeps what the flip did not do (error feedback). The threshold of each
module is servoed (:mod:`arb_ternary_votes.servo`) so that the share of flips follows the schedule.
The rate acts on nothing else but the exponents and an integer bias.

All state is integer: accumulators in the modules, two int16 vectors of magnitudes and one int16
level a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from attrs import asdict, evolve
from torch import Tensor

from arb_ternary.counters.hashing import STEP
from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import StepOutcome, Trainable
from arb_ternary.optim.ternary import to_host
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_votes.config import MomentumVotesConfig
from arb_ternary_votes.normalised_votes import NormalisedVotes
from arb_ternary_votes.servo import exact_threshold, level_of, next_level, whole_threshold

# : Standard deviation of the momentum of independent gradients by bits of an accumulator, in
# quanta, where ``quanta`` is : not given: five of them fit into 8 bits, and three into 4 with the
# noise of rounding, which is as large as the votes.
SPREADS: Final = {8: 24.0, 4: 1.5}
#: Standard deviations at which the threshold starts.
_START: Final = 3.0


class MomentumVotes(NormalisedVotes):
    """The momentum-vote optimizer; see the module's docstring for the rule.

    The groups' ``lr`` is 1 at birth: a rate that a schedule drives. With a rate of 0 nothing is
    cast, flips or decays. A loss signal is looked at only for whether it is finite. A step's
    statistics have ``flip_threshold``, the mean threshold of the modules.

    Args:
        modules: ternary modules by qualified name.
        options: of the rule; None takes the defaults.

    Raises:
        ConfigError: a module has 2-bit accumulators, which cannot hold a momentum; or ``quanta``
            are more than its accumulators hold.
    """

    def __init__(
        self, modules: Mapping[str, TernaryModule], options: MomentumVotesConfig | None = None
    ) -> None:
        options = MomentumVotesConfig() if options is None else options
        for name, module in modules.items():
            _check(name, module, options)
        super().__init__(modules, {**asdict(options), "base_lr": 1.0})
        self._levels = [
            [_first_level(group, module) for module in members]
            for group, members in zip(self.param_groups, self._modules, strict=True)
        ]

        #: Of the step under way: whose threshold follows from how many flips.
        self._flipped: list[tuple[dict[str, Any], TernaryModule, list[int], int, Tensor]] = []

    def thresholds(self) -> list[float]:
        """The threshold of every module, in the order of :attr:`modules`; a step uses a whole
        number next to it.
        """
        return [exact_threshold(level) / 65536 for levels in self._levels for level in levels]

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, loss_signal: Tensor | float | None = None
    ) -> StepOutcome:
        """Flip by the momentum, then let it decay, then move the thresholds; see
        :meth:`TernaryOptimizer.step`.
        """
        self._flipped.clear()
        outcome = super().step(closure, loss_signal=loss_signal)
        if not outcome.stepped:
            return outcome
        for (group, module, levels, i, _), flips in zip(
            self._flipped, to_host(f[-1] for f in self._flipped), strict=True
        ):
            levels[i] = next_level(
                levels[i],
                flips,
                module.shape.out_features * module.shape.in_features,
                min(1.0, group["flip_rate"] * group["lr"] ** group["power"]),
                gain=group["gain"],
                dead_band=group["dead_band"],
                largest=module.shape.largest_vote,
            )
        thresholds = self.thresholds()
        return evolve(
            outcome, statistics={"flip_threshold": math.fsum(thresholds) / len(thresholds)}
        )

    def _quanta(self, group: Mapping[str, Any], module: TernaryModule) -> float:
        return _quanta(group, module)

    def _exponent_quanta(self, group: Mapping[str, Any], module: TernaryModule) -> float:
        # Votes do not know the rate here, so that the exponents follow the schedule by whole powers
        # of two.
        return _quanta(group, module) / float(group["vote_rate"])

    def _flip(
        self, group: dict[str, Any], module: TernaryModule, place: tuple[int, int], voted: bool
    ) -> Tensor:
        levels = self._levels[place[0]]
        i = place[1]
        largest = module.shape.largest_vote
        threshold = whole_threshold(levels[i], module.control.tolist()[STEP], largest)
        flips = module.apply_votes(
            "apply_scaled_votes", threshold, round(65536 * group["decay"]), group["carry"]
        )
        if voted and module.shape.out_features * module.shape.in_features:
            self._flipped.append((group, module, levels, i, flips))
        return flips

    def state_dict(self) -> dict[str, Any]:
        """Settings, counters, and the running magnitudes and the threshold's level of every
        module.
        """
        return {
            **super().state_dict(),
            "levels": [torch.tensor(levels, dtype=torch.int16) for levels in self._levels],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave.

        Raises:
            ValueError: it is of other modules.
        """
        super().load_state_dict(state_dict)
        levels = [[int(level) for level in saved] for saved in state_dict["levels"]]
        if [len(group) for group in levels] != [len(group) for group in self._levels]:
            raise ValueError("the levels of the thresholds are those of another number of modules")
        self._levels = levels


def _check(name: str, module: TernaryModule, options: MomentumVotesConfig) -> None:
    """See that the rule can train ``module``; raises ConfigError."""
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
    """Votes for a gradient of one standard deviation.

    The exponential sum of independent votes has the variance of one over ``1 - beta**2``.
    """
    if group["quanta"] is not None:
        return float(group["quanta"])
    return SPREADS[module.shape.vote_bits] * math.sqrt(1.0 - (1.0 - group["decay"]) ** 2)


def _first_level(group: Mapping[str, Any], module: TernaryModule) -> int:
    spread = _quanta(group, module) / math.sqrt(1.0 - (1.0 - group["decay"]) ** 2)
    return level_of(max(1, min(round(_START * spread), module.shape.largest_vote)))


def build(config: MomentumVotesConfig, trainable: Trainable) -> MomentumVotes:
    """Factory of the optimizer ``momentum_votes``: all ternary modules of ``trainable``."""
    return MomentumVotes(trainable.ternary, config)
