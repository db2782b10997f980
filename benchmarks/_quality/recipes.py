"""Recipes: ways of training that ``quality.py`` compares, as data.

A recipe changes the base config, which is the same for all: the architecture, the data and their
order, the batch, the warm-up. ``recipes.yaml`` explains its fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from arb_ternary.config.yaml_document import read_yaml
from arb_ternary.errors import ComponentError, UsageProblem

#: Settings of every recipe, so that none is tuned more than another.
TRIALS: Final = 4
#: What a recipe may change. ``phase`` is the base config's only phase.
SECTIONS: Final = ("exact", "model", "optimizer", "phase")
#: Rates do not grow further for shorter runs.
_LARGEST_FACTOR: Final = 2.5
_OURS: Final = Path(__file__).with_name("recipes.yaml")

Config = Mapping[str, Any]


@frozen(kw_only=True)
class Recipe:
    """A way of training; see ``recipes.yaml``."""

    name: str
    summary: str = ""
    overrides: Config = field(factory=dict)
    without: Sequence[str] = ()
    trials: Mapping[str, Sequence[Any]] = field(factory=dict)
    rates_for: int | None = None
    fewer_steps: Config | None = None

    def config(self, base: Config, steps: int) -> dict[str, Any]:
        """Return the base config with the changes of the recipe, for a run of ``steps``."""
        config = deepcopy(dict(base))
        for path in self.without:
            section, _, key = path.partition(".")
            if key not in config.get(section, {}):
                raise ComponentError(f"recipe {self.name!r}: the base config has no {path!r}")
            del config[section][key]
        config = merged(config, self.overrides)
        fewer = self.fewer_steps
        if fewer is not None and steps % fewer["of"] == 0:
            config = merged(config, fewer["overrides"])
            config["phase"]["steps"] = steps // fewer["of"] * fewer["take"]
        return config

    def settings(self, number: int, steps: int) -> dict[str, Any]:
        """Return the settings of a trial, to be merged over the config of a run of ``steps``."""
        settings: dict[str, Any] = {}
        for path, values in self.trials.items():
            value = values[number]
            if self.rates_for is not None and path.endswith(".lr"):
                value = rate_for(steps, value, self.rates_for)
            settings = merged(settings, _nested(path, value))
        return settings

    def check(self) -> None:
        """Refuse a recipe that is tuned more than others, or changes what must be equal.

        Raises:
            ComponentError: it is such a recipe.
        """
        counts = {len(values) for values in self.trials.values()}
        if counts != {TRIALS}:
            raise ComponentError(
                f"recipe {self.name!r}: it has {sorted(counts) or 'no'} trials, not {TRIALS}",
                "Every recipe has as many, so that none is tuned more than another.",
            )
        changed = [*self.overrides, *(path.partition(".")[0] for path in self.trials)]
        if self.fewer_steps is not None:
            changed += self.fewer_steps["overrides"]
        for section in changed:
            if section not in SECTIONS:
                raise ComponentError(
                    f"recipe {self.name!r}: it must not change {section!r}",
                    f"A recipe may change: {', '.join(SECTIONS)}.",
                )


def rate_for(steps: int, rate: float, reference: int) -> float:
    """Scale a rate for a run of ``steps``, given the one for ``reference`` steps.

    It falls with the cube root of the length, as the best rates of AdamW and of votes did between
    500 and 2,560 steps (reports/diary.md). Short trials can then choose for a long run: both differ
    by the same factors. Three significant digits.
    """
    if steps == reference:
        return rate
    factor = (reference / steps) ** (1 / 3)
    return float(f"{rate * min(_LARGEST_FACTOR, factor):.3g}")


def merged(base: Config, changes: Config) -> dict[str, Any]:
    """Return ``base`` with ``changes``: mappings key by key, everything else replaced."""
    result = dict(base)
    for key, value in changes.items():
        before = result.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            result[key] = merged(before, value)
        else:
            result[key] = deepcopy(value)
    return result


def _nested(path: str, value: Any) -> dict[str, Any]:
    """Return ``{"a": {"b": value}}`` for ``a.b``."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


def load_recipes(names: Sequence[str] = (), further: Path | None = None) -> list[Recipe]:
    """Return the recipes of these names, or all: those of ``recipes.yaml`` and of another file.

    Raises:
        UsageProblem: there is no such recipe.
        ComponentError: a recipe has an unknown field, or fails :meth:`Recipe.check`.
    """
    plain: dict[str, Any] = {}
    for file in (_OURS, further):
        if file is not None:
            plain |= read_yaml(file.read_text(encoding="utf-8"), str(file)).data
    recipes = []
    for name in dict.fromkeys(names or plain):
        if name not in plain:
            raise UsageProblem(f"no recipe is called {name!r}", f"recipes: {', '.join(plain)}")
        try:
            recipe = Recipe(name=name, **_resolved(name, plain))
        except (KeyError, TypeError) as error:
            raise ComponentError(f"recipe {name!r}: {error}") from error
        recipe.check()
        recipes.append(recipe)
    return recipes


def _resolved(name: str, plain: Config) -> dict[str, Any]:
    """Return the fields of a recipe, with those of the recipe that it is like."""
    own = dict(plain[name])
    like = own.pop("like", None)
    if like is None:
        return own
    base = _resolved(like, plain)
    overrides = merged(base.get("overrides", {}), own.get("overrides", {}))
    return {**base, **own, "overrides": overrides}
