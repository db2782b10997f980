"""Options that are ``auto``: a run chooses their values from its config, before it builds anything.

A config class may have options that can be ``auto``. Such a class has two attributes, which are
looked up by name:

* ``auto_fields``: the names of the options that are ``auto`` now;
* ``auto_values(plan)``: a value for each of them, given the :class:`TrainingPlan` of the run. It
  returns the same values whenever and wherever it is called.

A new run writes the chosen values into its ``config.yaml``, as numbers, and into ``run.json`` under
``chosen``. A resumed run reads them from there and chooses nothing again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs
from attrs import field, frozen

from arb_ternary.config.choice import Choice
from arb_ternary.config.errors import Fault, Origin, Path, show_path
from arb_ternary.config.fields import config_fields
from arb_ternary.config.yaml_document import LoadedConfig
from arb_ternary_train.capabilities import has_own_loops
from arb_ternary_train.config import RunConfig
from arb_ternary_train.options import LoopOptions
from arb_ternary_train.schedules import scheduled_value

#: Key of ``run.json``: what was chosen, by the path of the option.
CHOSEN: Final = "chosen"
#: Largest number of steps at which a schedule is sampled.
_SAMPLES: Final = 4096


@frozen(kw_only=True)
class TrainingPlan:
    """The quantities of a run from which the values of ``auto`` options are computed.

    Attributes:
        steps: optimizer steps of a phase.
        tokens: predictions per optimizer step.
        mean_rate: mean of the schedule over the steps, as a fraction of its peak.
        width: width of the model.
    """

    steps: int
    tokens: int
    mean_rate: float
    width: int

    def __str__(self) -> str:
        return (
            f"{self.steps:,} steps of {self.tokens:,} tokens, a mean rate of {self.mean_rate:.3g} "
            f"of the peak, width {self.width:,}"
        )


@frozen
class ResolvedConfig:
    """A config without ``auto``.

    Attributes:
        config: the config of the run.
        chosen: the values that replaced ``auto``, by the path of the option.
        plan: what the values were computed from; None if no option was ``auto``.
        recorded: the paths whose values were read from the record of the run.
    """

    config: RunConfig
    chosen: Mapping[Path, float] = field(factory=dict)
    plan: TrainingPlan | None = None
    recorded: frozenset[Path] = frozenset()

    def record(self) -> dict[str, float]:
        """Return the chosen values as they are stored in ``run.json``."""
        return {show_path(path): value for path, value in self.chosen.items()}

    def notes(self) -> list[str]:
        """Return one sentence per chosen value: the value and why."""
        lines = []
        for path, value in self.chosen.items():
            why = "as the run began" if path in self.recorded else str(self.plan)
            lines.append(f"{show_path(path)}: auto is {value:g}: {why}")
        return lines


def resolve_auto_options(
    config: RunConfig, recorded: Mapping[str, float] = MappingProxyType({})
) -> ResolvedConfig:
    """Replace every ``auto`` in ``config`` by a value.

    Args:
        config: a config without faults (:func:`auto_option_faults`).
        recorded: the values that the run chose when it began, from its ``run.json``. Values that
            are not in it are computed.
    """
    if not any(_auto_fields(config, ())):
        return ResolvedConfig(config)
    plan = training_plan(config)
    chosen: dict[Path, float] = {}

    for path, options in _with_auto_fields(config, ()):
        computed = options.auto_values(plan)
        for name in options.auto_fields:
            key = (*path, name)
            chosen[key] = recorded.get(show_path(key), computed[name])

    resolved = _replaced(config, (), chosen)
    known = frozenset(path for path in chosen if show_path(path) in recorded)
    return ResolvedConfig(resolved, chosen, plan, known)


def resolve_loaded(loaded: LoadedConfig[RunConfig]) -> LoadedConfig[RunConfig]:
    """Return a loaded config as a new run takes it: ``auto`` options with their values.

    The origin of such a value says what it follows from.
    """
    resolved = resolve_auto_options(loaded.config)
    derived = {
        path: Origin("derived", f"{loaded.origins[path]}: auto, {resolved.plan}")
        for path in resolved.chosen
    }
    origins = {**loaded.origins, **derived}
    return attrs.evolve(loaded, config=resolved.config, origins=origins)


def auto_option_faults(run: RunConfig) -> Iterator[Fault]:
    """Yield a fault for each option that is ``auto`` if the config does not determine a plan."""
    for path, name in _auto_fields(run, ()):
        for reason in _reasons_against(run):
            yield Fault((*path, name), f"auto does not go with this run: {reason}; give a number")


def training_plan(run: RunConfig) -> TrainingPlan:
    """Return the plan of a run whose phases share one (:func:`auto_option_faults`)."""
    options = next(phase.options for phase in run.phases if isinstance(phase.options, LoopOptions))
    return _plan_of(run, options)


def _plan_of(run: RunConfig, options: LoopOptions) -> TrainingPlan:
    """Return the plan of one phase."""
    samples = min(options.steps, _SAMPLES)
    rates = [
        scheduled_value(
            options.lr_schedule,
            (2 * sample + 1) * options.steps // (2 * samples),
            steps=options.steps,
            warmup=options.warmup_steps,
            peak=1.0,
            floor=options.min_rate,
        )
        for sample in range(samples)
    ]
    return TrainingPlan(
        steps=options.steps,
        tokens=options.batch_size * options.block_size * options.gradient_accumulation_steps,
        mean_rate=sum(rates) / samples,
        width=run.model.options.width,
    )


def _reasons_against(run: RunConfig) -> Iterator[str]:
    """Yield the reasons why the config does not determine a training plan."""
    if getattr(run.data.options, "sized_samples", False):
        yield (
            f"samples of the data {run.data.name!r} have a size of their own, and steps are not "
            f"counted in tokens"
        )
    if getattr(run.masking.options, "hides_tokens", False):
        yield (
            f"the masking {run.masking.name!r} has only hidden tokens predicted, and auto counts "
            "every one"
        )
    has_width = isinstance(getattr(run.model.options, "width", None), int)
    if not has_width:
        yield f"the options of the model {run.model.name!r} state no width"
    if getattr(run.optimizer.options, "defers", False):
        yield (
            f"the optimizer {run.optimizer.name!r} puts steps off, and how large they are is known "
            f"only then"
        )

    # The first phase that has each plan.
    plans: dict[TrainingPlan, int] = {}
    for index, phase in enumerate(run.phases):
        options = phase.options
        if getattr(options, "no_training", False):
            continue
        if not isinstance(options, LoopOptions) or has_own_loops(options):
            yield f"phases[{index}], {phase.name!r}, is not one training loop over the whole model"
            continue
        if getattr(options, "batch_doublings", None) is not None:
            yield f"the micro-batches of phases[{index}] grow: tokens per step are not constant"
        if getattr(options, "init_from", None) is not None:
            yield (
                f"phases[{index}] begins with the weights of another run, and auto is calibrated "
                f"for random initialisation"
            )
        if has_width:
            plans.setdefault(_plan_of(run, options), index)

    if len(plans) > 1:
        first, second = [*plans.values()][:2]
        yield (
            f"phases[{first}] and phases[{second}] differ in steps, tokens per step or schedule, "
            f"and share the rate"
        )
    elif not plans and has_width:
        yield "no phase trains"


def _auto_fields(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the path of the options and the name of each option that is ``auto``."""
    for found, options in _with_auto_fields(value, path):
        for name in options.auto_fields:
            yield found, name


def _with_auto_fields(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the config object of each one that has ``auto_fields``."""
    if isinstance(value, Choice):
        value = value.options
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _with_auto_fields(item, (*path, index))
    elif attrs.has(type(value)):
        if getattr(value, "auto_fields", ()):
            yield path, value
        for option in config_fields(type(value)):
            yield from _with_auto_fields(getattr(value, option.name), (*path, str(option.alias)))


def _replaced(value: Any, path: Path, chosen: Mapping[Path, float]) -> Any:
    """Return ``value`` with the chosen values in it; what has none in it stays the same object."""
    if isinstance(value, list | tuple):
        items = [_replaced(item, (*path, index), chosen) for index, item in enumerate(value)]
        unchanged = all(new is old for new, old in zip(items, value, strict=True))
        return value if unchanged else type(value)(items)
    if isinstance(value, Choice):
        options = _replaced(value.options, path, chosen)
        return value if options is value.options else attrs.evolve(value, options=options)
    if not attrs.has(type(value)):
        return value

    changed: dict[str, Any] = {}
    for option in config_fields(type(value)):
        key = (*path, str(option.alias))
        old = getattr(value, option.name)
        new = chosen[key] if key in chosen else _replaced(old, key, chosen)
        if new is not old:
            changed[option.name] = new
    return attrs.evolve(value, **changed) if changed else value
