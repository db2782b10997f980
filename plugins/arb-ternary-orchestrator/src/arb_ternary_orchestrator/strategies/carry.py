"""From one optimizer of a model to the next: what the old one has learnt and the new one can
use.
"""

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
    """Hand over, bit for bit, what ``old`` keeps and an optimizer in ``new`` of the same class and
    parameters can use.

    Moments, running magnitudes, counters and the rate of the last votes go over; settings do not,
    which are what an optimizer's ``defaults`` name of its groups. What finds no match starts empty.
    Votes and exponents are in the modules, where both optimizers find them. The new one is to be
    built over the same model, and neither is in the middle of a step.

    Args:
        old: what has trained so far; it is not changed.
        new: what is to go on, at any depth of parts and wrappers. A wrapper keeps the state of what
            it holds under ``inner`` in its ``state_dict``, or starts empty.
    """
    left = [each for each in inner_optimizers(old) if not isinstance(each, Joins)]
    # What is inside comes before what holds it.
    for each in reversed(list(inner_optimizers(new))):
        if isinstance(each, Joins):
            # the groups of its parts are new dictionaries
            each.load_state_dict(dict(each.state_dict()))
            continue
        match = next(
            (
                other
                for other in left
                if type(other) is type(each) and _trained(other) == _trained(each)
            ),
            None,
        )
        if match is not None:
            left.remove(match)
            _hand_over(match, each)


def _trained(optimizer: Optimizer) -> list[list[int]]:
    if isinstance(optimizer, TernaryOptimizer):  # modules replace their packed weights
        return [[id(module) for module in optimizer.modules]]
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def _hand_over(old: Optimizer, new: Optimizer) -> None:
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
    """A group with the settings of ``own`` and what ``saved`` has noted besides, such as the rate
    of its last votes.
    """
    noted = {
        name: value for name, value in saved.items() if name not in _OWN and name not in defaults
    }
    return {**own, **noted}
