"""The common part of rules whose votes are normalised gradients: magnitudes, scales and flips."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from arb_ternary.backends.vote_state import VoteLimits
from arb_ternary.optim.ternary import TernaryOptimizer, VoteUpdate, to_host
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_votes.magnitudes import Magnitudes
from arb_ternary_votes.sign_votes import effective_threshold


class NormalisedVotes(TernaryOptimizer):
    """Casts votes by ``cast_scaled_votes`` and applies them by ``apply_scaled_votes``.

    A rule says how many votes a gradient is worth (:meth:`_quanta`) and when trits flip
    (:meth:`_flip_settings`). A step takes in the magnitudes of its gradients, sets the scales of
    the next backward pass, moves exponents and flips trits.

    Groups need the entries ``base_lr``, ``clip``, ``carry``, ``magnitude_decay``, ``exponent_rate``
    and ``band``. They get ``vote_rate``: the rate of the last step, at which votes are cast until
    the next one.

    Args:
        modules: ternary modules by qualified name.
        defaults: entries of every group.
    """

    votes_by_rows = True

    def __init__(self, modules: Mapping[str, TernaryModule], defaults: Mapping[str, Any]) -> None:
        super().__init__(modules, defaults)
        self._magnitudes: dict[TernaryModule, Magnitudes] = {}
        self._group_index: dict[TernaryModule, int] = {}
        for index, members in enumerate(self._modules):
            for module in members:
                shape = module.shape
                self._magnitudes[module] = Magnitudes(
                    shape.out_features, shape.in_features, module.weight.device
                )
                self._group_index[module] = index
        #: Modules that can have cast votes for the step under way.
        self._voted: set[TernaryModule] = set()
        for name, module in modules.items():
            module.transform = self._transform(name, module)
            module.use_scaled_votes(integer=casts_integers(module))
        self._refresh_scales()

    # --- what a rule defines

    def _transform(self, name: str, module: TernaryModule) -> str | None:
        """Return what gradients of ``module`` go through before votes are cast from them.

        See ``VoteState.transform``; None means no transformation.
        """
        return None

    @abstractmethod
    def _quanta(self, group: Mapping[str, Any], module: TernaryModule) -> float:
        """Return the votes for a gradient of one standard deviation.

        It is called only if the group's ``vote_rate`` is above 0.
        """

    def _scaling(
        self, group: Mapping[str, Any], module: TernaryModule, quanta: float
    ) -> tuple[float, float, int]:
        """Return how votes are cast: factor of the gradient, largest vote, ``noise_shift``.

        By default votes are proportional to the gradient, up to the group's ``clip``, and rounded
        stochastically. ``quanta`` is the number of votes for one standard deviation.
        """
        return quanta, group["clip"] * quanta, 0

    @abstractmethod
    def _exponent_quanta(self, group: Mapping[str, Any], module: TernaryModule) -> float:
        """Return the votes of one standard deviation that move an exponent at ``exponent_rate``."""

    @abstractmethod
    def _flip_settings(self, group: Mapping[str, Any], module: TernaryModule) -> tuple[int, int]:
        """Return the threshold of a flip and the decay of accumulators, in units of 2**-16."""

    # --- the step

    def begin_group(self, group: dict[str, Any], modules: Sequence[TernaryModule]) -> None:
        """Take in the magnitudes of the step's gradients, and set the scales of the next step."""
        group["vote_rate"] = group["lr"]
        self._observe_gradients(modules, 1.0 - group["magnitude_decay"])
        self._set_scales(modules, group)

    def update_of(self, group: Mapping[str, Any], module: TernaryModule) -> VoteUpdate:
        """Flip the trits whose accumulators are beyond the rule's threshold."""
        threshold, decay = self._flip_settings(group, module)
        rate = group["lr"] / group["base_lr"]
        return VoteUpdate(
            "apply_scaled_votes",
            (threshold, decay, group["carry"]),
            bias_threshold=effective_threshold(group["accum_threshold"], rate),
            exponent_threshold=group["e_accum_threshold"],
        )

    def _observe_gradients(self, modules: Sequence[TernaryModule], weight: float) -> None:
        """Update the magnitudes of the modules that a gradient has reached."""
        sums: list[Tensor] = []
        for module in modules:
            assert module.magnitudes is not None
            sums.append(module.magnitudes)
        reached = to_host(each.any() for each in sums)

        learning: list[TernaryModule] = []
        sums_of: dict[TernaryModule, Tensor] = {}
        for module, own, has_gradient in zip(modules, sums, reached, strict=True):
            self._voted.discard(module)
            if not has_gradient or module.frozen:
                continue
            learning.append(module)
            sums_of[module] = own
            # Before the first magnitudes no votes are cast.
            if self._magnitudes[module].steps > 0:
                self._voted.add(module)

        for alike in self._by_device(learning):
            Magnitudes.update_all(
                [self._magnitudes[module] for module in alike],
                [sums_of[module] for module in alike],
                weight,
                [max(1, module.casts) for module in alike],
            )

    def defer_step(self) -> None:
        """Make votes smaller if there are more micro-batches than in the last step."""
        for group, modules in zip(self.param_groups, self._modules, strict=True):
            later = []
            for module in modules:
                magnitudes = self._magnitudes[module]
                magnitudes.deferred = module.casts
                if magnitudes.spread > magnitudes.casts:
                    later.append(module)
            self._set_scales(later, group)

    def rescale_gradients(self, octaves: float) -> bool:
        """Rescale the magnitudes; votes that were divided by the old ones are of the wrong size."""
        known = [each for each in self._magnitudes.values() if each.steps > 0]
        for magnitudes in known:
            magnitudes.rescale(octaves)
        self._refresh_scales()
        return bool(known)

    def _set_scales(self, modules: Sequence[TernaryModule], group: Mapping[str, Any]) -> None:
        """Set what the next backward pass of ``modules`` divides their gradients by."""
        quanta: dict[TernaryModule, float] = {}
        limits: list[VoteLimits] = []
        for module in modules:
            if self._magnitudes[module].steps > 0 and group["vote_rate"] > 0:
                quanta[module], allowed = self._sizes(module, group)
                limits.append(allowed.check())
                continue
            # No votes are cast.
            assert module.vote_scale is not None
            module.vote_scale.fill_(31 if casts_integers(module) else 0)
            module.limits = module.limits._replace(vote_limit=1)

        if limits:
            rows = torch.tensor(limits).unbind()
            torch._foreach_copy_([module.vote_limits for module in quanta], list(rows))
        for integer in (False, True):
            casting = [module for module in quanta if casts_integers(module) is integer]
            for alike in self._by_device(casting):
                tracked = [self._magnitudes[module] for module in alike]
                sizes = [quanta[module] for module in alike]
                if integer:
                    scales = Magnitudes.all_shifts(tracked, sizes)
                else:
                    scales = Magnitudes.all_factors(tracked, sizes)
                vote_scales = [each.vote_scale for each in alike if each.vote_scale is not None]
                torch._foreach_copy_(vote_scales, list(scales))

    def _sizes(self, module: TernaryModule, group: Mapping[str, Any]) -> tuple[float, VoteLimits]:
        """Return the quanta of one standard deviation, and the limits of a module's votes."""
        per_cast = self._quanta(group, module) / self._magnitudes[module].spread
        quanta, largest, noise_shift = self._scaling(group, module, per_cast)
        limit = max(1, min(round(256 * largest), 256 * module.shape.largest_vote))
        # A score of one standard deviation, ``quanta * sqrt(G)``, is to move the exponent's
        # accumulator by ``exponent_rate`` of its threshold.
        score = self._exponent_quanta(group, module) * math.sqrt(module.shape.group_size)
        shift = round(math.log2(score / (group["exponent_rate"] * group["e_accum_threshold"])))
        return quanta, VoteLimits(limit, min(31, max(0, shift)), noise_shift)

    def _refresh_scales(self) -> None:
        """Set all scales from the state and the rates of the last step.

        A schedule may have set the rates of the next step already.
        """
        for group, modules in zip(self.param_groups, self._modules, strict=True):
            group.setdefault("vote_rate", group["lr"])
            self._set_scales(modules, group)

    def _by_device(self, modules: Iterable[TernaryModule]) -> list[list[TernaryModule]]:
        """Return ``modules``, grouped by the device of their magnitudes."""
        groups: dict[torch.device, list[TernaryModule]] = {}
        for module in modules:
            groups.setdefault(self._magnitudes[module].device, []).append(module)
        return list(groups.values())

    # --- state

    def _group_of(self, module: TernaryModule) -> dict[str, Any]:
        """Return the param group of a module."""
        return self.param_groups[self._group_index[module]]

    def state_dict(self) -> dict[str, Any]:
        """Return settings, counters and the running magnitudes of every module."""
        tracked = [
            [self._magnitudes[module].state_dict() for module in members]
            for members in self._modules
        ]
        return {**super().state_dict(), "magnitudes": tracked}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state_dict)
        for members, saved in zip(self._modules, state_dict["magnitudes"], strict=True):
            for module, state in zip(members, saved, strict=True):
                self._magnitudes[module].load_state_dict(state)
        self._refresh_scales()


def casts_integers(module: TernaryModule) -> bool:
    """Return whether the module's votes are cast from exact integers."""
    return has_exact_gradient(module) and module.transform is None


def has_exact_gradient(module: TernaryModule) -> bool:
    """Return whether the gradient of the module's weight is an exact integer."""
    return module.gradients == "int8" and getattr(module, "activations", "int8") == "int8"
