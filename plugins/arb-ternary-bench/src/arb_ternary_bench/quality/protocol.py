"""Recipes of the quality bench: what a plugin hands in to have a way of training measured beside
the others.

A recipe is registered as a ``RecipeSpec``; its factory is called with the number of optimizer steps
of a run and returns a :class:`Recipe`. It changes the bench's base config
(``arb_ternary_bench.quality.sizes``), the same for all recipes: the architecture, the data and
their order, the batch, the warm-up. What must be equal for a fair comparison cannot be changed: the
data, the seed, and the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from attrs import field, frozen

#: Settings that every recipe is tried with, so that none is tuned more than another.
TRIALS: Final = 4

#: The length that rates of recipes are written for: optimizer steps of the study of size small.
_REFERENCE_STEPS: Final = 2560
#: No run is so short that it could bear more.
_LARGEST_FACTOR: Final = 2.5

#: What a recipe may change. ``phase`` is the base config's only phase.
SECTIONS: Final = ("exact", "model", "optimizer", "phase")


def rate_for(steps: int, rate: float) -> float:
    """A rate for a run of ``steps``, given the one for 2,560: it falls with the cube root of the
    length.

    Best rates of AdamW and of votes alike did so between 500 and 2,560 steps (the project's diary
    has the runs). Short trials can then choose for a long run: both differ by the same factors. At
    most 2.5 times the rate for 2,560 steps; three significant digits.
    """
    if steps == _REFERENCE_STEPS:
        return rate
    return float(f"{rate * min(_LARGEST_FACTOR, (_REFERENCE_STEPS / steps) ** (1 / 3)):.3g}")


def _as_tuple(trials: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    return tuple(trials)


@frozen(kw_only=True)
class Recipe:
    """A way of training.

    Mappings are merged key by key, other values replaced; a trial comes after the overrides.

    Attributes:
        overrides: merged over the base config: nested mappings with the keys of :data:`SECTIONS` at
            the top.
        trials: as many as :data:`TRIALS`, each merged over the overrides; the one with the least
            loss on a held-out part of the training text is used.
        without: dotted paths of the base config that do not apply, such as ``model.scale_rule``.
    """

    overrides: Mapping[str, Any]
    trials: tuple[Mapping[str, Any], ...] = field(converter=_as_tuple)
    without: tuple[str, ...] = ()
