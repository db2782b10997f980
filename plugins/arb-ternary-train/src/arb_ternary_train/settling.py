"""Options that are ``auto``: what a run makes of them, from its config alone, before anything is
built.

Options of a component may leave some of theirs to the run (``SettlesOptions``). They are told its
``Course``. A new run writes what was chosen into its ``config.yaml``, as a number, and into
``run.json`` under ``chosen``; resumed, it reads it from there and chooses nothing again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

import attrs
from attrs import frozen

from arb_ternary.config.choice import Choice
from arb_ternary.config.errors import Fault, Path, show_path
from arb_ternary.config.fields import config_fields
from arb_ternary_train.config import RunConfig
from arb_ternary_train.options import LoopOptions
from arb_ternary_train.protocols import Course, LeavesModel, PlansLoops, SettlesOptions
from arb_ternary_train.schedules import scheduled_value

#: Key of ``run.json``: what was chosen, by the path of the option.
CHOSEN: Final = "chosen"
#: Steps at which a schedule is looked at, at most.
_POINTS: Final = 4096

T = TypeVar("T")


@frozen
class Settled:
    """A config without ``auto``.

    Attributes:
        config: the run's.
        chosen: the values that took the place of ``auto``, by the path of the option.
        course: what they follow from; None where nothing was ``auto``.
        read: those that the run has chosen before.
    """

    config: RunConfig
    chosen: Mapping[Path, float]
    course: Course | None = None
    read: frozenset[Path] = frozenset()

    def record(self) -> dict[str, float]:
        """The values for ``run.json``."""
        return {show_path(path): value for path, value in self.chosen.items()}

    def notes(self) -> list[str]:
        """What was chosen and why, a sentence each."""
        why = {
            path: "as the run began" if path in self.read else str(self.course)
            for path in self.chosen
        }
        return [
            f"{show_path(path)}: auto is {value:g}: {why[path]}"
            for path, value in self.chosen.items()
        ]


def settle(config: RunConfig, recorded: Mapping[str, float] = MappingProxyType({})) -> Settled:
    """``config`` with a value in the place of every ``auto``.

    Args:
        config: without faults, see :func:`unsettled_faults`.
        recorded: what the run chose when it began, as ``run.json`` has it; the rest is chosen now.
    """
    if not any(_unsettled(config, ())):
        return Settled(config, {})
    course = course_of(config)
    chosen = {}

    def values(path: Path, options: SettlesOptions) -> dict[str, float]:
        fresh = options.settled(course)
        for name in options.unsettled:
            chosen[*path, name] = recorded.get(show_path((*path, name)), fresh[name])
        return {name: chosen[*path, name] for name in options.unsettled}

    def within(value: T, path: Path) -> T:
        if isinstance(value, list | tuple):
            made = [within(item, (*path, index)) for index, item in enumerate(value)]
            return (
                value
                if all(new is old for new, old in zip(made, value, strict=True))
                else type(value)(made)
            )
        if isinstance(value, Choice):
            options = within(value.options, path)
            return value if options is value.options else attrs.evolve(value, options=options)
        if not attrs.has(type(value)):
            return value
        changed: dict[str, Any] = {}
        for field in config_fields(type(value)):
            old = getattr(value, field.name)
            if (new := within(old, (*path, str(field.alias)))) is not old:
                changed[field.name] = new
        if isinstance(value, SettlesOptions) and value.unsettled:
            changed |= values(path, value)
        return attrs.evolve(value, **changed) if changed else value  # type: ignore[misc]

    made = within(config, ())
    return Settled(
        made, chosen, course, frozenset(path for path in chosen if show_path(path) in recorded)
    )


def unsettled_faults(run: RunConfig) -> Iterator[Fault]:
    """A fault for each option that is ``auto`` where the run's course does not decide it."""
    for path, name in _unsettled(run, ()):
        for reason in _against(run):
            yield Fault((*path, name), f"auto does not go with this run: {reason}; give a number")


def course_of(run: RunConfig) -> Course:
    """The course of a run that has one; see :func:`unsettled_faults`."""
    options = next(phase.options for phase in run.phases if isinstance(phase.options, LoopOptions))
    return _course(run, options)


def _course(run: RunConfig, options: LoopOptions) -> Course:
    points = min(options.steps, _POINTS)
    rates = (
        scheduled_value(
            options.lr_schedule,
            (2 * point + 1) * options.steps // (2 * points),
            steps=options.steps,
            warmup=options.warmup_steps,
            peak=1.0,
            floor=options.min_rate,
        )
        for point in range(points)
    )
    tokens = options.batch_size * options.block_size * options.gradient_accumulation_steps
    width = run.model.options.width
    return Course(steps=options.steps, tokens=tokens, mean_rate=sum(rates) / points, width=width)


def _against(run: RunConfig) -> Iterator[str]:
    """Why the config does not tell the course of the run, or why it says too little."""
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
    wide = isinstance(getattr(run.model.options, "width", None), int)
    if not wide:
        yield f"the options of the model {run.model.name!r} tell no width"
    if getattr(run.optimizer.options, "defers", False):
        yield (
            f"the optimizer {run.optimizer.name!r} puts steps off, and how large they are shows "
            f"only then"
        )
    courses: dict[Course, int] = {}
    for index, phase in enumerate(run.phases):
        options = phase.options
        if isinstance(options, LeavesModel) and options.leaves_model:
            continue
        if not isinstance(options, LoopOptions) or isinstance(options, PlansLoops):
            yield f"phases[{index}], {phase.name!r}, is not one training loop over the whole model"
            continue
        if getattr(options, "batch_doublings", None) is not None:
            yield (
                f"the micro-batches of phases[{index}] grow, and steps have no one number of tokens"
            )
        if getattr(options, "init_from", None) is not None:
            yield (
                f"phases[{index}] begins with the weights of another run, and auto is for "
                f"weights drawn at random"
            )
        if wide:
            courses.setdefault(_course(run, options), index)
    if len(courses) > 1:
        first, second = [*courses.values()][:2]
        yield (
            f"phases[{first}] and phases[{second}] differ in steps, tokens a step or schedule, "
            f"and share the rate"
        )
    elif not courses and wide:
        yield "no phase trains"


def _unsettled(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Path of the options and name of each that is ``auto``."""
    if isinstance(value, Choice):
        value = value.options
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _unsettled(item, (*path, index))
    elif attrs.has(type(value)):
        if isinstance(value, SettlesOptions):
            yield from ((path, name) for name in value.unsettled)
        for field in config_fields(type(value)):
            yield from _unsettled(getattr(value, field.name), (*path, str(field.alias)))
