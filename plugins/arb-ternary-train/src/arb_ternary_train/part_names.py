"""The parts of a model by name, and patterns that name some of them.

A part is what learns by itself: a ternary module or a float parameter. A pattern (of ``fnmatch``,
in which ``*`` also stands for dots) names a part or tensor by its qualified name, or by the name of
a module that holds it: ``head`` names ``head.weight``, and ``blocks.0`` names everything in the
first block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from arb_ternary.ternary.models import ternary_modules

if TYPE_CHECKING:
    from torch import nn

    from arb_ternary.ternary.module import TernaryModule

#: How many names an error offers.
_OFFERED: Final = 4


def parts_of(model: nn.Module) -> Mapping[str, TernaryModule | nn.Parameter]:
    """Return every part by its qualified name, also frozen ones. Tied parts occur once."""
    floats = {name: each for name, each in model.named_parameters() if each.is_floating_point()}
    return {**dict(ternary_modules(model)), **floats}


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Return whether one of ``patterns`` names ``name``, or a module that holds it."""
    holders = _with_holders(name)
    return any(fnmatchcase(holder, pattern) for pattern in patterns for holder in holders)


def near(pattern: str, names: Iterable[str]) -> str:
    """Return a hint for an error: what ``pattern``, which names none of ``names``, may mean."""
    holders = dict.fromkeys(holder for name in names for holder in _with_holders(name))
    found = get_close_matches(pattern.strip("*?."), holders, n=_OFFERED)
    if not found:
        found = [name for name in holders if "." not in name][:_OFFERED]
    return (
        f"Nearest: {', '.join(found)}. A pattern names modules or parameters; `*` stands for "
        f"any text, including dots."
    )


def _with_holders(name: str) -> list[str]:
    """Return ``name`` and the names of the modules that hold it, outermost first."""
    return [*accumulate(name.split("."), "{}.{}".format)]
