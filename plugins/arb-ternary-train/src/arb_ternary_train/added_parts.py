"""Parts that the phases of a run add to the model: what its optimizer will have to train, known before it is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import attrs

from arb_ternary.config.choice import Choice, OptimizerChoice, PhaseChoice
from arb_ternary.config.errors import Fault
from arb_ternary_train.config import RunConfig
from arb_ternary_train.protocols import AddsParts

__all__ = ["parts_added_by", "refused_parts"]

#: Options of ``split`` by what they train; an optimizer at any other option trains what the one around it does.
_SHARES: Final = {"ternary": frozenset({"ternary", "stored"}), "float": frozenset({"float"})}


def parts_added_by(phases: Sequence[PhaseChoice]) -> frozenset[str]:
    """Kinds of the parts that these phases, the last of a run, add to its model to be trained."""
    return frozenset(part for _, part in _added(phases))


def refused_parts(config: RunConfig) -> list[Fault]:
    """A fault for each optimizer of ``config`` that cannot train what a phase adds."""
    faults: dict[tuple[str | int, ...], Fault] = {}
    for index, part in _added(config.phases):
        for path, optimizer in _asked(("optimizer",), config.optimizer, part):
            if part not in optimizer.spec.accepts:
                message = f"{optimizer.name!r} cannot train {part} parts, and phases[{index}] adds some to the model"
                hint = "Use `optimizer: {name: split, ternary: ..., float: ...}`, or let the phase add other parts."
                faults.setdefault(path, Fault(path, message, hint=hint))
    return list(faults.values())


def _added(phases: Sequence[PhaseChoice]) -> Iterator[tuple[int, str]]:
    for index, phase in enumerate(phases):
        if isinstance(phase.options, AddsParts):
            for part in sorted(phase.options.added_parts(followed=index < len(phases) - 1)):
                yield index, part


def _asked(
    path: tuple[str | int, ...], optimizer: OptimizerChoice, part: str
) -> Iterator[tuple[tuple[str | int, ...], OptimizerChoice]]:
    """``optimizer`` and those inside it that a part of this kind is given to, with their places in the config."""
    yield path, optimizer
    options = optimizer.options
    for field in attrs.fields(type(options)) if attrs.has(type(options)) else ():
        inner = getattr(options, field.name)
        if isinstance(inner, Choice) and inner.kind == "optimizer" and part in _SHARES.get(field.name, {part}):
            yield from _asked((*path, field.name), inner, part)
