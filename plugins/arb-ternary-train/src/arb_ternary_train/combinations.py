"""Whether the components of a run go together, said before anything is built.

Options of a component are told the run that they are used in: a config class may have the method
``validate_in_run`` (see :class:`arb_ternary.optim.protocol.Planned`), whose findings are faults
of the config like any other.
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
from arb_ternary_train.auto_options import auto_option_faults
from arb_ternary_train.config import RunConfig


def find_contradictions(run: RunConfig) -> list[Fault]:
    """What is wrong with components beside each other, each fault at the option that is in the
    way.
    """
    return [*_faults(run, (), run, planned_parts(run)), *auto_option_faults(run)]


def planned_parts(run: RunConfig) -> Planned | None:
    """What ``run`` trains, over all its phases; None where the options of its model do not tell.

    The options of a phase that changes the model have ``planned_in(run, planned) -> Planned``: what
    it trains, and what it leaves frozen as ``idle``, of a model that has the parts ``planned``.
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
    if isinstance(value, Choice):
        if isinstance(value.spec, OptimizerSpec) and planned is not None:
            for kind in sorted(planned.kinds - value.spec.accepts):
                yield Fault(
                    path,
                    f"{value.name!r} cannot train {PART_NOUNS[kind]}, and the model has some",
                    "Use `optimizer: {name: split, ternary: ..., float: ...}`, or a model without "
                    "those parts.",
                )
        value = value.options
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _faults(item, (*path, index), run, planned)
    elif attrs.has(type(value)):
        for key, message in unused_options(value, run, planned):
            yield Fault((*path, key), message)
        check = getattr(value, "validate_in_run", None)
        for key, message in () if check is None else check(run, planned):
            yield Fault((*path, key) if key else path, message)
        narrow = getattr(value, "planned_for", None)
        for field in config_fields(type(value)):
            inner = planned if narrow is None or planned is None else narrow(field.name, planned)
            yield from _faults(getattr(value, field.name), (*path, str(field.alias)), run, inner)
