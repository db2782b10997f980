"""The common part of rules whose votes are normalised gradients: magnitudes, scales, and the order
of a step.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from arb_ternary.backends.vote_state import VoteLimits
from arb_ternary.optim.ternary import TernaryOptimizer, to_host
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_votes.magnitudes import Magnitudes
from arb_ternary_votes.sign_votes import effective_threshold


class NormalisedVotes(TernaryOptimizer):
    """Casts votes by ``cast_scaled_votes`` and applies them by ``apply_scaled_votes``; a rule says
    how many and when.

    A step takes in the magnitudes of its gradients, sets the scales of the next backward pass,
    moves exponents and lets the rule flip. Groups need the entries ``base_lr``, ``clip``,
    ``carry``, ``magnitude_decay``, ``exponent_rate`` and ``band``, and get ``vote_rate``: the rate
    of the last step, at which votes are cast until the next one.

    Args:
        modules: ternary modules by qualified name.
        defaults: entries of every group.
    """

    def __init__(self, modules: Mapping[str, TernaryModule], defaults: Mapping[str, Any]) -> None:
        super().__init__(modules, defaults)
        self._magnitudes = [
            [Magnitudes(m.shape.out_features, m.shape.in_features, m.weight.device) for m in group]
            for group in self._modules
        ]
        self._places = {
            module: (i, j)
            for i, group in enumerate(self._modules)
            for j, module in enumerate(group)
        }
        for name, module in modules.items():
            module.transform = self._transform(name, module)
            module.use_scaled_votes(integer=casts_integers(module))
        self._refresh_scales()

    votes_by_rows = True

    def _tracked(self, module: TernaryModule) -> tuple[dict[str, Any], Magnitudes]:
        """The group of a module, and its running magnitudes."""
        group, place = self._places[module]
        return self.param_groups[group], self._magnitudes[group][place]

    def _transform(self, name: str, module: TernaryModule) -> str | None:
        """What the gradients of a module go through before votes are cast of them:
        ``VoteState.transform``.
        """
        return None

    @abstractmethod
    def _quanta(self, group: Mapping[str, Any], module: TernaryModule) -> float:
        """Votes for a gradient of one standard deviation, at the group's ``vote_rate`` above 0."""

    def _scaling(
        self, group: Mapping[str, Any], module: TernaryModule, quanta: float
    ) -> tuple[float, float, int]:
        """How votes of ``quanta`` a standard deviation are cast: factor of the gradient, largest
        vote, ``noise_shift``.

        Here they are proportional to the gradient, up to the group's ``clip``, and rounded
        stochastically.
        """
        return quanta, group["clip"] * quanta, 0

    @abstractmethod
    def _exponent_quanta(self, group: Mapping[str, Any], module: TernaryModule) -> float:
        """Votes of one standard deviation that move an exponent at ``exponent_rate``."""

    @abstractmethod
    def _flip(
        self, group: dict[str, Any], module: TernaryModule, place: tuple[int, int], voted: bool
    ) -> Tensor:
        """Apply the votes of one module; returns the flips (int64 scalar).

        Args:
            group: of the module.
            module: with a rate above 0, and not frozen.
            place: its group's number and its own within it.
            voted: whether votes can have been cast since the last step.
        """

    def _apply_group(
        self, group: dict[str, Any], modules: list[TernaryModule]
    ) -> tuple[list[Tensor], list[Tensor]]:
        flips: list[Tensor] = []
        moves: list[Tensor] = []
        index = next(i for i, other in enumerate(self._modules) if other is modules)
        group["vote_rate"] = group["lr"]
        tracked = self._magnitudes[index]
        voted = self._take_in(modules, tracked, 1.0 - group["magnitude_decay"])
        self._set_scales(modules, tracked, group)
        for i, module in enumerate(modules):
            if module.frozen or group["lr"] <= 0:
                continue
            moves.append(module.apply_exponent_votes(group["e_accum_threshold"], group["band"]))
            flips.append(self._flip(group, module, (index, i), voted[i]))
            if isinstance(module, TernaryLinear):
                rate = group["lr"] / group["base_lr"]
                module.apply_bias_votes(
                    effective_threshold(group["accum_threshold"], rate, 0.0, None, None)
                )
        return flips, moves

    @staticmethod
    def _take_in(
        modules: Sequence[TernaryModule], tracked: Sequence[Magnitudes], weight: float
    ) -> list[bool]:
        """Update the magnitudes of those that a gradient has reached; whether each can have cast
        votes of it.
        """
        sums = [module.magnitudes for module in modules if module.magnitudes is not None]
        reached = to_host(each.any() for each in sums)
        learning = [has and not module.frozen for has, module in zip(reached, modules, strict=True)]
        voted = [
            learns and magnitudes.steps > 0
            for learns, magnitudes in zip(learning, tracked, strict=True)
        ]
        for kind, places in _alike(tracked, (i for i, learns in enumerate(learning) if learns)):
            casts = [max(1, modules[i].casts) for i in places]
            kind.update_all([tracked[i] for i in places], [sums[i] for i in places], weight, casts)
        return voted

    def defer_step(self) -> None:
        """See :class:`TernaryOptimizer`: votes get smaller when there are more micro-batches than
        in the last step.
        """
        for group, modules, tracked in zip(
            self.param_groups, self._modules, self._magnitudes, strict=True
        ):
            for module, magnitudes in zip(modules, tracked, strict=True):
                magnitudes.deferred = module.casts
            later = [
                i for i, magnitudes in enumerate(tracked) if magnitudes.spread > magnitudes.casts
            ]
            self._set_scales([modules[i] for i in later], [tracked[i] for i in later], group)

    def _set_scales(
        self,
        modules: Sequence[TernaryModule],
        tracked: Sequence[Magnitudes],
        group: Mapping[str, Any],
    ) -> None:
        """Set what the next backward of modules divides their gradients by; no votes before the
        first magnitudes.
        """
        casting: list[int] = []
        for i, (module, magnitudes) in enumerate(zip(modules, tracked, strict=True)):
            assert module.vote_scale is not None
            if magnitudes.steps == 0 or group["vote_rate"] <= 0:
                module.vote_scale.fill_(31 if casts_integers(module) else 0)
                module.limits = module.limits._replace(vote_limit=1)
            else:
                casting.append(i)
        quanta = {i: self._limit(modules[i], tracked[i], group) for i in casting}
        for integer in (False, True):
            for kind, places in _alike(
                tracked, [i for i in casting if casts_integers(modules[i]) is integer]
            ):
                scales = kind.all_shifts if integer else kind.all_factors
                found = scales([tracked[i] for i in places], [quanta[i] for i in places])
                for i, scale in zip(places, found, strict=True):
                    held = modules[i].vote_scale
                    assert held is not None
                    held.copy_(scale)

    def _limit(
        self, module: TernaryModule, magnitudes: Magnitudes, group: Mapping[str, Any]
    ) -> float:
        """Set the limits of a module's votes; the quanta that a standard deviation of its gradient
        is worth.
        """
        quanta, largest, noise_shift = self._scaling(
            group, module, self._quanta(group, module) / magnitudes.spread
        )
        limit = max(1, min(round(256 * largest), 256 * module.shape.largest_vote))
        # A score of one standard deviation, ``quanta * sqrt(G)``, is to move the exponent's
        # accumulator by ``exponent_rate`` of its threshold.
        score = self._exponent_quanta(group, module) * math.sqrt(module.shape.group_size)
        shift = round(math.log2(score / (group["exponent_rate"] * group["e_accum_threshold"])))
        module.limits = VoteLimits(limit, min(31, max(0, shift)), noise_shift)
        return quanta

    def _refresh_scales(self) -> None:
        """Set every module's scales from the state and the rates of the last step; a schedule may
        be ahead of them.
        """
        for group, modules, tracked in zip(
            self.param_groups, self._modules, self._magnitudes, strict=True
        ):
            group.setdefault("vote_rate", group["lr"])
            self._set_scales(modules, tracked, group)

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


def _alike(
    tracked: Sequence[Magnitudes], places: Iterable[int]
) -> Iterable[tuple[type[Magnitudes], list[int]]]:
    """Places of magnitudes of one kind and on one device, with that kind."""
    groups: dict[tuple[type[Magnitudes], torch.device], list[int]] = {}
    for i in places:
        groups.setdefault((type(tracked[i]), tracked[i].device), []).append(i)
    return [(kind, members) for (kind, _), members in groups.items()]


def casts_integers(module: TernaryModule) -> bool:
    """Whether the module's votes are cast of exact integers."""
    return has_exact_gradient(module) and module.transform is None


def has_exact_gradient(module: TernaryModule) -> bool:
    """Whether the gradient of the module's weight is an exact integer."""
    return module.gradients == "int8" and getattr(module, "activations", "int8") == "int8"
