"""The trainers that a target of a manifest can name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from attrs import frozen

from arb_ternary.config.errors import Fault, Faulty
from arb_ternary.config.fields import config_fields
from arb_ternary.config.options import option, optional, positive
from arb_ternary.errors import ArbError, nearest
from arb_ternary.plugins.manager import manager


def _vote_rate(default: str) -> Any:
    return option(
        None,
        "rate of ternary weights: trits that a weight moves in a step whose gradient is one "
        f"standard deviation; null = {default}",
        validator=optional(positive),
    )


@frozen(kw_only=True)
class StandardKeys:
    """Keys of ``train:`` that are not options of a phase, in ``trainer.standard``."""

    phase: Literal["standard"] = option("standard", "phase that trains")
    vote_rate: float | None = _vote_rate("0.1, for training from random weights")


@frozen(kw_only=True)
class UpcycleKeys:
    """Keys of ``train:`` that are not options of a phase, in ``trainer.upcycle``."""

    phase: Literal["standard", "blockwise", "global"] = option("standard", "phase that trains")
    vote_rate: float | None = _vote_rate("0.015, for a student, which starts trained")
    teacher_ckpt: str | None = option(
        None,
        "the teacher: hf://org/name, a folder of transformers, a GGUF file, or a run; required in "
        "a target's first run",
    )
    load_teacher: Mapping[str, Any] = option(
        factory=dict, help="further options of the phase load_teacher"
    )
    fold_rotate: Mapping[str, Any] = option(factory=dict, help="options of the phase fold_rotate")
    surgery: Mapping[str, Any] = option(factory=dict, help="options of the phase surgery")
    projection: Mapping[str, Any] = option(factory=dict, help="options of the phase projection")
    benchmark: Mapping[str, Any] | None = option(
        None, "options of the phase benchmark, which then follows training; null = no such phase"
    )
    export: Mapping[str, Any] | None = option(
        None, "options of the phase export, which then comes last; null = no such phase"
    )


@frozen(kw_only=True)
class Trainer:
    """How the runs of a target are trained.

    Attributes:
        name: ``NAME`` in a manifest's ``trainer: trainer.NAME``.
        keys: class of the keys of ``train:`` that are not options of a phase.
        settings: ``"module:function"`` from a ``TargetRun`` to the settings of a run's config. It
            is imported only if a target names the trainer.
    """

    name: str
    keys: type[Any]
    settings: str

    @property
    def phases(self) -> tuple[str, ...]:
        """Names of the phases that a run can choose; the first is the default."""
        types = {field.name: field.type for field in config_fields(self.keys)}
        return get_args(types["phase"])


TRAINERS: Final[Mapping[str, Trainer]] = MappingProxyType(
    {
        "standard": Trainer(
            name="standard",
            keys=StandardKeys,
            settings="arb_ternary_manifests.standard:run_settings",
        ),
        "upcycle": Trainer(
            name="upcycle",
            keys=UpcycleKeys,
            settings="arb_ternary_manifests.upcycle:run_settings",
        ),
    }
)


def find_trainer(reference: str) -> Trainer:
    """Return the trainer that ``reference``, ``trainer.NAME``, names.

    Raises:
        Faulty: there is no such trainer, or the distribution that it needs is not installed.
    """
    prefix, _, name = reference.partition(".")
    known = ", ".join(f"trainer.{each}" for each in TRAINERS)
    if prefix != "trainer" or not name:
        text = f"must be the name of a trainer, trainer.NAME, not {reference!r}"
        raise Faulty(Fault((), text, f"available: {known}"))
    if name not in TRAINERS:
        close = nearest(name, list(TRAINERS))
        advice = f"did you mean 'trainer.{close}'?" if close else f"available: {known}"
        raise Faulty(Fault((), f"no trainer is called {name!r}", advice))
    trainer = TRAINERS[name]
    problem = missing_phase(trainer)
    if problem is not None:
        text = f"{reference} cannot be used: {problem.what}"
        raise Faulty(Fault((), text, problem.hint, environment=True))
    return trainer


def missing_phase(trainer: Trainer) -> ArbError | None:
    """Return why a phase of ``trainer`` cannot be used; None if all can be."""
    registry = manager().registry
    for phase in trainer.phases:
        if registry.find("phase", phase) is None:
            return registry.problem("phase", phase)
    return None
