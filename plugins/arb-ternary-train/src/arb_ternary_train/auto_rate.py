"""The rate ``lr: auto``, which a run computes from its config before it builds anything.

The spec of an optimizer whose ``lr`` may be ``auto`` names the function of the rate
(``OptimizerSpec.auto_rate``). A new run writes the rate into its ``config.yaml``, as a number, and
into ``run.json`` under ``chosen``. A resumed run reads it from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import attrs
from attrs import field, frozen

from arb_ternary.config.choice import Choice, OptimizerChoice
from arb_ternary.config.errors import Fault, Origin, Path, show_path
from arb_ternary.config.yaml_document import LoadedConfig
from arb_ternary.specs import load_target
from arb_ternary_train.capabilities import has_own_loops
from arb_ternary_train.config import RunConfig
from arb_ternary_train.options import LoopOptions
from arb_ternary_train.schedules import scheduled_value

#: Key of ``run.json``: the rate that replaced ``auto``, by the path of the option.
CHOSEN: Final = "chosen"
#: Largest number of steps at which a schedule is sampled.
_SAMPLES: Final = 4096


@frozen(kw_only=True)
class TrainingPlan:
    """The quantities of a run from which the rate is computed.

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
        chosen: the rate that replaced ``auto``, by the path of the option; empty if none did.
        notes: a sentence with the rate and why it is this one.
    """

    config: RunConfig
    chosen: Mapping[str, float] = field(factory=dict)
    notes: tuple[str, ...] = ()


def resolve_auto_rate(
    config: RunConfig, recorded: Mapping[str, float] = MappingProxyType({})
) -> ResolvedConfig:
    """Replace an ``lr`` that is ``auto`` by a number.

    Args:
        config: a config without faults (:func:`auto_rate_faults`).
        recorded: the rate that the run chose when it began, from its ``run.json``.
    """
    path, choice = _auto_rate(config.optimizer, ())
    if choice is None:
        return ResolvedConfig(config)
    name = show_path(("optimizer", *path))
    if name in recorded:
        rate = recorded[name]
        why = "as the run began"
    else:
        plan = training_plan(config)
        rate = load_target(f"optimizer {choice.name!r}:", str(choice.spec.auto_rate))(plan)
        why = str(plan)
    resolved = attrs.evolve(config, optimizer=config.optimizer.with_option(path, rate))
    return ResolvedConfig(resolved, {name: rate}, (f"{name}: auto is {rate:g}: {why}",))


def resolve_loaded(loaded: LoadedConfig[RunConfig]) -> LoadedConfig[RunConfig]:
    """Return a loaded config as a new run takes it: ``lr: auto`` with its value.

    The origin of the value says what it follows from.
    """
    path, choice = _auto_rate(loaded.config.optimizer, ())
    if choice is None:
        return loaded
    key = ("optimizer", *path)
    text = f"{loaded.origins[key]}: auto, {training_plan(loaded.config)}"
    origins = {**loaded.origins, key: Origin("derived", text)}
    return attrs.evolve(loaded, config=resolve_auto_rate(loaded.config).config, origins=origins)


def auto_rate_faults(run: RunConfig) -> Iterator[Fault]:
    """Yield a fault for an ``lr`` that is ``auto`` if the config does not determine a plan."""
    path, choice = _auto_rate(run.optimizer, ())
    if choice is not None:
        for reason in _reasons_against(run):
            text = f"auto does not go with this run: {reason}; give a number"
            yield Fault(("optimizer", *path), text)


def training_plan(run: RunConfig) -> TrainingPlan:
    """Return the plan of a run whose phases share one (:func:`auto_rate_faults`)."""
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


def _auto_rate(choice: OptimizerChoice, path: Path) -> tuple[Path, OptimizerChoice | None]:
    """Return the path of the rate that is ``auto`` in an optimizer, and the optimizer that has it.

    An optimizer may wrap others. None as the optimizer means that no rate is ``auto``.
    """
    options = choice.options
    if choice.spec.auto_rate is not None and options.lr == "auto":
        return (*path, "lr"), choice
    if options is not None:
        for name in attrs.fields_dict(type(options)):
            inner = getattr(options, name)
            if isinstance(inner, Choice):
                found = _auto_rate(inner, (*path, name))
                if found[1] is not None:
                    return found
    return path, None
