"""Checks whether the components of a run go together, before anything is built.

A config class may have a method ``validate_in_run(run, planned)`` (see
:class:`arb_ternary.optim.protocol.Planned`), which yields options that contradict each other or the
run. Options that do nothing in the run are found by their conditions (``active_when``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from arb_ternary.config.choice import Choice
from arb_ternary.config.errors import Fault, Path
from arb_ternary.config.fields import config_fields, unused_options
from arb_ternary.optim.protocol import PART_NOUNS, Planned
from arb_ternary.specs import OptimizerSpec, TrainedPart
from arb_ternary_train.auto_rate import auto_rate_faults
from arb_ternary_train.config import RunConfig


def find_contradictions(run: RunConfig) -> list[Fault]:
    """Return the faults of components that do not go together, each at the option in question."""
    return [*_faults(run, (), run, planned_parts(run)), *auto_rate_faults(run)]


def policy_notes(run: RunConfig) -> list[str]:
    """Return what the step policies of ``run`` say about it before it begins, a sentence each.

    The options of a policy that has something to say about a phase have
    ``note_in_phase(run, phase, planned) -> str | None``.
    """
    notes = []
    for index, phase in enumerate(run.phases):
        policy = getattr(phase.options, "policy", None)
        tell = getattr(getattr(policy, "options", None), "note_in_phase", None)
        note = None if tell is None else tell(run, phase, planned_parts(run))
        if note is not None:
            notes.append(f"phases[{index}]: {note}")
    return notes


def planned_parts(run: RunConfig) -> Planned | None:
    """Return what ``run`` trains over all its phases; None if its model's options do not say.

    The options of a phase that changes the model have ``planned_in(run, planned) -> Planned``. It
    returns what the phase trains of a model that has the parts ``planned``, and as ``idle`` what it
    leaves frozen.
    """
    tell = getattr(run.model.options, "planned", None)
    if tell is None:
        return None
    there: Planned = tell()
    trained: frozenset[TrainedPart] = frozenset()
    for phase in run.phases:
        change = getattr(phase.options, "planned_in", None)
        within = there if change is None else change(run, there)
        trained |= within.kinds
        there = attrs.evolve(within, kinds=within.kinds | within.idle, idle=frozenset())
    return attrs.evolve(there, kinds=trained, idle=there.kinds - trained)


def _faults(value: Any, path: Path, run: RunConfig, planned: Planned | None) -> Iterator[Fault]:
    """Yield the faults of a value in the config and of everything inside it.

    Args:
        value: a component, a config object, a list, or anything else.
        path: its path in the config.
        run: the config.
        planned: what the run trains, as far as ``value`` is concerned.
    """
    if isinstance(value, Choice):
        yield from _untrained_parts(value, path, run, planned)
        value = value.options
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _faults(item, (*path, index), run, planned)
    elif attrs.has(type(value)):
        for key, message in unused_options(value, run, planned):
            yield Fault((*path, key), message)
        check = getattr(value, "validate_in_run", None)
        if check is not None:
            for key, message in check(run, planned):
                yield Fault((*path, key) if key else path, message)
        narrow = getattr(value, "planned_for", None)
        for field in config_fields(type(value)):
            inner = planned
            if narrow is not None and planned is not None:
                inner = narrow(field.name, planned)
            yield from _faults(getattr(value, field.name), (*path, str(field.alias)), run, inner)


def _untrained_parts(
    choice: Choice[Any], path: Path, run: RunConfig, planned: Planned | None
) -> Iterator[Fault]:
    """Yield a fault for each kind of part that an optimizer is given and cannot train.

    What phases freeze is known by name only when the model is built; the optimizer checks it then.
    """
    if planned is None or not isinstance(choice.spec, OptimizerSpec):
        return
    if all(getattr(phase.options, "freeze", None) for phase in run.phases):
        return
    for kind in sorted(planned.kinds - choice.spec.accepts):
        yield Fault(
            path,
            f"{choice.name!r} cannot train {PART_NOUNS[kind]}, and the model has some",
            "Use `optimizer: {name: split, ternary: ..., float: ...}`, or a model without those "
            "parts.",
        )
