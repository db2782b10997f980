"""The trials of a study: which runs it is made of, and the exact config of each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any, Literal

from attrs import field, frozen

from arb_ternary.config.yaml_document import Document
from arb_ternary.errors import ArbError, ComponentError
from arb_ternary.plugins.discovery import Registered
from arb_ternary.plugins.manager import manager
from arb_ternary_bench.quality.protocol import SECTIONS, TRIALS, Recipe
from arb_ternary_bench.quality.sizes import STEP_TOKENS, TUNING_SEED, QualitySize, base_config
from arb_ternary_train.config import RunConfig
from arb_ternary_train.growing_batches import tokens_in
from arb_ternary_train.loading import structure_run

Stage = Literal["tuning", "final"]


@frozen(eq=False)
class Trial:
    """One run of a study.

    Attributes:
        stage: ``tuning`` chooses a recipe's settings, ``final`` measures them.
        rule: the recipe's name.
        number: the recipe's trial in the stage ``tuning``, the seed in the stage ``final``.
        tokens: that it trains on.
        settings: the recipe's trial: what was merged over its overrides.
        config: the run's config, as its file holds it.
    """

    stage: Stage
    rule: str
    number: int
    tokens: int
    settings: Mapping[str, Any] = field(repr=False)
    config: Mapping[str, Any] = field(repr=False)

    @property
    def name(self) -> str:
        """Name of its files."""
        return f"{self.stage}-{self.rule}-{self.number}"

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"{self.rule}, {'trial' if self.stage == 'tuning' else 'seed'} {self.number}"

    @property
    def digest(self) -> str:
        """SHA-256 of what decides the run: its config, but for the places of plugin files."""
        plain = {key: value for key, value in self.config.items() if key != "plugins"}
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def tuning_trials(size: QualitySize, rules: Iterable[str], tokens: int) -> list[Trial]:
    """Every recipe with each of its settings, the recipes in turn.

    Raises:
        UsageProblem, EnvironmentProblem: there is no such recipe.
        ComponentError: a recipe does not keep its protocol, or asks for what a recipe must not
            change.
    """
    made = [(rule, make_recipe(rule, tokens // STEP_TOKENS)) for rule in rules]
    return [
        _trial("tuning", size, rule, recipe, number, number, tokens)
        for number in range(TRIALS)
        for rule, recipe in made
    ]


def final_trials(
    size: QualitySize, chosen: Mapping[str, int], seeds: Iterable[int], tokens: int
) -> list[Trial]:
    """Every recipe with the trial that was chosen for it, with each seed, the recipes in turn.

    Raises:
        as :func:`tuning_trials`.
    """
    made = [
        (rule, number, make_recipe(rule, tokens // STEP_TOKENS)) for rule, number in chosen.items()
    ]
    return [
        _trial("final", size, rule, recipe, number, seed, tokens)
        for seed in seeds
        for rule, number, recipe in made
    ]


def make_recipe(rule: str, steps: int) -> Recipe:
    """The recipe called ``rule`` for a run of ``steps`` steps.

    Raises:
        UsageProblem, EnvironmentProblem: there is none.
        ComponentError: its factory fails, or what it returns is not a recipe with :data:`TRIALS`
            trials.
    """
    found = manager().registry.get("recipe", rule)
    factory = _factory(found)
    try:
        recipe = factory(steps)
    except ArbError:
        raise
    except Exception as error:
        raise ComponentError(
            f"recipe {rule!r}: its factory failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(recipe, Recipe):
        raise ComponentError(
            f"recipe {rule!r}: its factory returned a {type(recipe).__name__}, not a Recipe"
        )
    if len(recipe.trials) != TRIALS:
        raise ComponentError(
            f"recipe {rule!r}: it has {len(recipe.trials)} trials; every recipe has exactly "
            f"{TRIALS}, so that none is tuned more than another"
        )
    for section in (key for part in (recipe.overrides, *recipe.trials) for key in part):
        if section not in SECTIONS:
            raise ComponentError(
                f"recipe {rule!r}: it must not change {section!r}",
                f"A recipe may change: {', '.join(SECTIONS)}.",
            )
    return recipe


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes``: mappings key by key, everything else replaced. Neither is
    modified.
    """
    result = dict(base)
    for key, value in changes.items():
        before = result.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        result[key] = merged(before, value) if both else deepcopy(value)  # type: ignore[arg-type]
    return result


def _factory(found: Registered) -> Callable[[int], Any]:
    try:
        factory: Callable[[int], Any] = found.load()
    except (ImportError, AttributeError) as error:
        raise ComponentError(
            f"recipe {found.name!r}: {found.spec.target} cannot be imported: {error}"
        ) from error
    return factory


def _trial(
    stage: Stage,
    size: QualitySize,
    rule: str,
    recipe: Recipe,
    choice: int,
    number: int,
    tokens: int,
) -> Trial:
    tuning = stage == "tuning"
    steps = tokens // STEP_TOKENS
    base = base_config(
        size,
        name=f"{stage}-{rule}-{number}",
        steps=steps,
        seed=TUNING_SEED if tuning else number,
        tuning=tuning,
    )
    for path in recipe.without:
        _remove(base, path, rule)
    settings = recipe.trials[choice]
    config = merged(merged(base, recipe.overrides), settings)
    config["phases"] = [config.pop("phase")]
    if files := manager().files:
        config["plugins"] = [str(path) for path in files]
    trial = Trial(stage, rule, number, steps * STEP_TOKENS, settings, config)
    _check(trial)
    return trial


def _remove(config: dict[str, Any], path: str, rule: str) -> None:
    *above, last = path.split(".")
    holder: Any = config
    for part in above:
        holder = holder.get(part) if isinstance(holder, dict) else None
    if not isinstance(holder, dict) or last not in holder or path.partition(".")[0] not in SECTIONS:
        raise ComponentError(
            f"recipe {rule!r}: the base config has no {path!r} that a recipe may leave out"
        )
    del holder[last]


def _check(trial: Trial) -> None:
    """Structure the config as a run will, and see that it trains on as many tokens as the others.

    Raises:
        ConfigError: a value is wrong.
        ComponentError: the number of tokens is.
    """
    source = f"recipe {trial.rule!r}, {trial.name}"
    config: RunConfig = structure_run(
        Document(deepcopy(dict(trial.config)), source), manager().registry
    ).config
    options = config.phases[0].options
    parts = ("steps", "batch_size", "block_size", "gradient_accumulation_steps")
    if all(hasattr(options, part) for part in parts):
        tokens = tokens_in(options, options.steps)
        if tokens != trial.tokens:
            raise ComponentError(
                f"{source}: steps x batch_size x block_size x gradient_accumulation_steps, with "
                f"batch_doublings, is {tokens:,} tokens, not {trial.tokens:,}",
                "Every recipe trains on the same tokens.",
            )
