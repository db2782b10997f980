"""The parts of a model by name, and patterns that name some of them.

A part is what learns by itself: a ternary module, a module with integer weights of its own format,
or a float parameter. A pattern (as of ``fnmatch``: ``*`` also stands for dots) names a part or
tensor by its qualified name, or by that of a module that holds it: ``head`` names ``head.weight``,
and ``blocks.0`` everything in the first block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import TYPE_CHECKING

from arb_ternary.ternary.models import stored_modules, ternary_modules

if TYPE_CHECKING:
    from torch import nn

    from arb_ternary.ternary.models import StoredWeights
    from arb_ternary.ternary.module import TernaryModule

#: How many names an error offers.
_OFFERED = 4


def parts_of(model: nn.Module) -> Mapping[str, TernaryModule | StoredWeights | nn.Parameter]:
    """Every part by its qualified name, whether it learns now or is frozen; what is tied once."""
    floats = {name: each for name, each in model.named_parameters() if each.is_floating_point()}
    return {**dict(ternary_modules(model)), **dict(stored_modules(model)), **floats}


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of ``patterns`` names the part or tensor ``name``, or a module that holds it."""
    holders = [*accumulate(name.split("."), "{}.{}".format)]
    return any(fnmatchcase(holder, pattern) for pattern in patterns for holder in holders)


def near(pattern: str, names: Iterable[str]) -> str:
    """What ``pattern``, which names none of ``names``, may have been meant to be: a sentence for an
    error's hint.
    """
    holders = dict.fromkeys(
        holder for name in names for holder in accumulate(name.split("."), "{}.{}".format)
    )
    wanted = pattern.strip("*?.")
    found = (
        get_close_matches(wanted, holders, n=_OFFERED)
        or [name for name in holders if "." not in name][:_OFFERED]
    )
    return (
        f"Nearest: {', '.join(found)}. A pattern names modules or parameters; `*` stands for "
        f"any text, dots too."
    )
