"""Recipes: ways of training that the study ``quality`` measures, as data.

A recipe changes the base config of the study, which is the same for all: the architecture, the data
and their order, the batch, the warm-up. What must be equal for a fair comparison cannot be changed:
the data, the seed, and the number of tokens. The fields of a recipe are explained in
``recipes.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from arb_ternary.config.yaml_document import read_yaml
from arb_ternary.errors import ComponentError, UsageProblem, nearest

#: Settings of every recipe, so that none is tuned more than another.
TRIALS: Final = 4
#: What a recipe may change. ``phase`` is the base config's only phase.
SECTIONS: Final = ("exact", "model", "optimizer", "phase")
#: Rates do not grow further for shorter runs.
_LARGEST_FACTOR: Final = 2.5
_OURS: Final = Path(__file__).with_name("recipes.yaml")

Config = Mapping[str, Any]


@frozen
class FewerSteps:
    """A shorter run: ``take`` of every ``of`` steps, if ``of`` divides them, with ``overrides``."""

    of: int
    take: int
    overrides: Config


def _fewer_steps(given: Config | None) -> FewerSteps | None:
    return None if given is None else FewerSteps(**given)


@frozen(kw_only=True)
class Recipe:
    """A way of training; see ``recipes.yaml``."""

    name: str
    summary: str = ""
    overrides: Config = field(factory=dict)
    without: Sequence[str] = ()
    trials: Mapping[str, Sequence[Any]] = field(factory=dict)
    rates_for: int | None = None
    fewer_steps: FewerSteps | None = field(default=None, converter=_fewer_steps)
    half_of_steps: str | None = None

    def config(self, base: Config, steps: int) -> dict[str, Any]:
        """Return the base config with the changes of the recipe, for a run of ``steps``."""
        config = deepcopy(dict(base))
        for path in self.without:
            self._remove(config, path)
        config = merged(config, self.overrides)
        fewer = self.fewer_steps
        if fewer is not None and steps % fewer.of == 0:
            config = merged(config, fewer.overrides)
            config["phase"]["steps"] = steps // fewer.of * fewer.take
        if self.half_of_steps is not None:
            config = merged(config, _nested(self.half_of_steps, (steps + 1) // 2))
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

    def _remove(self, config: dict[str, Any], path: str) -> None:
        section, _, key = path.partition(".")
        holder = config.get(section)
        if section not in SECTIONS or not isinstance(holder, dict) or key not in holder:
            raise ComponentError(
                f"recipe {self.name!r}: the base config has no {path!r} that a recipe may leave out"
            )
        del holder[key]

    def check(self) -> None:
        """Refuse a recipe that is tuned more than others, or changes what must be equal.

        Raises:
            ComponentError: it is such a recipe.
        """
        counts = {len(values) for values in self.trials.values()}
        if counts != {TRIALS}:
            given = ", ".join(map(str, sorted(counts))) or "no"
            raise ComponentError(
                f"recipe {self.name!r}: it has {given} trials; every recipe has exactly "
                f"{TRIALS}, so that none is tuned more than another"
            )
        sections = list(self.overrides)
        if self.fewer_steps is not None:
            sections += self.fewer_steps.overrides
        sections += [path.partition(".")[0] for path in self.trials]
        for section in sections:
            if section not in SECTIONS:
                raise ComponentError(
                    f"recipe {self.name!r}: it must not change {section!r}",
                    f"A recipe may change: {', '.join(SECTIONS)}.",
                )


def rate_for(steps: int, rate: float, reference: int = 2560) -> float:
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


def load_recipes(further: Path | None = None) -> dict[str, Recipe]:
    """Return all recipes by name: those of this package, and those of another file.

    Raises:
        ComponentError: a recipe has an unknown field, or fails :meth:`Recipe.check`.
    """
    plain: dict[str, Any] = {}
    for file in (_OURS, further):
        if file is not None:
            plain |= read_yaml(file.read_text(encoding="utf-8"), str(file)).data
    recipes = {}
    for name in plain:
        values = _resolved(name, plain)
        try:
            recipes[name] = Recipe(name=name, **values)
        except TypeError as error:
            raise ComponentError(f"recipe {name!r}: {error}") from error
        recipes[name].check()
    return recipes


def _resolved(name: str, plain: Config) -> dict[str, Any]:
    """Return the fields of a recipe, with those of the recipe that it is like."""
    own = dict(plain[name])
    like = own.pop("like", None)
    if like is None:
        return own
    if like not in plain:
        raise ComponentError(f"recipe {name!r}: there is no recipe {like!r} for it to be like")
    base = _resolved(like, plain)
    overrides = merged(base.get("overrides", {}), own.get("overrides", {}))
    return {**base, **own, "overrides": overrides}


def chosen_recipes(names: Sequence[str], known: Mapping[str, Recipe]) -> list[Recipe]:
    """Return the recipes of these names, each once; all of them for no name.

    Raises:
        UsageProblem: there is no such recipe.
    """
    for name in names:
        if name not in known:
            close = nearest(name, known)
            suggestion = f"did you mean {close!r}? " if close else ""
            raise UsageProblem(
                f"no recipe is called {name!r}", f"{suggestion}recipes: {', '.join(known)}"
            )
    return [known[name] for name in dict.fromkeys(names or known)]
