"""Carrying state from one optimizer of a model to the next."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Final

from torch.optim import Optimizer

from arb_ternary.optim.protocol import Joins, Wraps, inner_optimizers
from arb_ternary.optim.ternary import TernaryOptimizer

#: Entries of a group that the new optimizer's config and the schedule decide.
_OWN: Final = ("params", "lr", "initial_lr")


def carry_state(old: Optimizer, new: Optimizer) -> None:
    """Copy the state of ``old``, bit for bit, to optimizers in ``new`` of the same class and
    parameters.

    Moments, running magnitudes, counters and the rate of the last votes are copied. Settings are
    not: they are the entries of a group that the optimizer's ``defaults`` have. An optimizer
    without a match starts empty. Votes and exponents are in the modules, which both optimizers
    share. Both are built over the same model, and neither is in the middle of a step.

    Args:
        old: the optimizer that has trained so far; it is not changed.
        new: the optimizer that continues, with any parts and wrappers. A wrapper keeps the state of
            the wrapped optimizer under ``inner`` in its ``state_dict``, or starts empty.
    """
    left = [each for each in inner_optimizers(old) if not isinstance(each, Joins)]
    # Inner optimizers come before their wrappers.
    for each in reversed(list(inner_optimizers(new))):
        if isinstance(each, Joins):
            # Its parts have new groups by now.
            each.load_state_dict(dict(each.state_dict()))
            continue
        for other in left:
            if type(other) is type(each) and _trained(other) == _trained(each):
                left.remove(other)
                _copy_state(other, each)
                break


def _trained(optimizer: Optimizer) -> list[list[int]]:
    if isinstance(optimizer, TernaryOptimizer):  # modules replace their packed weights
        return [[id(module) for module in optimizer.modules]]
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def _copy_state(old: Optimizer, new: Optimizer) -> None:
    state: dict[str, Any] = deepcopy(dict(old.state_dict()))
    fresh: Mapping[str, Any] = new.state_dict()
    if isinstance(new, Wraps):
        if "inner" not in state:
            return
        state["inner"] = fresh["inner"]
    if "param_groups" in state:
        pairs = zip(state["param_groups"], fresh["param_groups"], strict=True)
        state["param_groups"] = [_group(saved, own, new.defaults) for saved, own in pairs]
    new.load_state_dict(state)


def _group(
    saved: Mapping[str, Any], own: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a group with the settings of ``own`` and the state of ``saved``, such as the rate of
    its last votes.
    """
    settings = {*_OWN, *defaults}
    state = {name: value for name, value in saved.items() if name not in settings}
    return {**own, **state}
