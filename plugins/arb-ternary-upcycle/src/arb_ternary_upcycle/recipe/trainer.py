"""``trainer.upcycle``: the first run of a target makes the student of a teacher and trains it, the
others go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from arb_ternary.config.errors import Fault, Faulty
from arb_ternary.config.fields import config_fields, default_of
from arb_ternary.errors import ArbError, EnvironmentProblem
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_train.manifest.protocol import TargetRun
from arb_ternary_train.manifest.standard import loop_settings, optimizer_settings, trained_parts
from arb_ternary_upcycle.recipe.keys import BLOCKWISE, GLOBAL, UpcycleKeys
from arb_ternary_upcycle.recipe.outline import TeacherOutline, absolute, read_outline
from arb_ternary_upcycle.recipe.phases import PREPARING, VOTES, ending, preparing
from arb_ternary_upcycle.recipe.student import student_section


def run_settings(keys: UpcycleKeys, run: TargetRun) -> Mapping[str, Any]:
    """The target of ``trainer.upcycle``.

    In a dry run of a target whose system says all of a student's sizes the teacher need not be
    here.
    """
    source = _source(keys, run)
    outline = _outline(source, run)
    if outline is None:
        model = dict(run.model or {})
        data = {"name": "shakespeare"}
    else:
        try:
            model = student_section(outline.config, run.model or {})
        except Faulty as error:
            at = ("train", "teacher_ckpt") if run.model is None else ()
            raise Faulty(
                *(Fault(at, fault.message, fault.hint) for fault in error.faults)
            ) from error
        data = {} if "data" in run.config else outline.data_in(run.files)
    parts = trained_parts(model)
    phases = [{"name": keys.phase, **loop_settings(keys, run, parts), **_own_options(keys, run)}]
    prepared = {name: getattr(keys, name) for name in PREPARING}
    if run.earlier:
        _refuse(run, PREPARING, "says how the student is made, which the target's first run does")
    else:
        if model.get("attention") != "decoupled":
            _refuse(
                run, ("surgery",), "has no effect because the student keeps the teacher's attention"
            )
        max_length = model.get("max_length", DecoderConfig().max_length)
        phases = [*preparing(absolute(source), model, max_length, prepared), *phases]
    settings: dict[str, Any] = {"device": keys.device, "model": model}
    if "data" not in run.config:
        settings["data"] = data
    phases += ending(keys.benchmark, keys.export)
    return {**settings, "phases": phases, **_with_votes(optimizer_settings(keys, run, parts))}


def _with_votes(settings: dict[str, Any]) -> dict[str, Any]:
    """An ``optimizer:`` of ``optimizer_settings`` with the votes of a student that knows something
    already.
    """
    optimizer = settings.get("optimizer")
    if optimizer == VOTES["name"]:
        return {"optimizer": dict(VOTES)}
    if isinstance(optimizer, dict) and optimizer["name"] == "split":
        return {"optimizer": {**optimizer, "ternary": dict(VOTES)}}
    return settings


def _source(keys: UpcycleKeys, run: TargetRun) -> str:
    """The teacher of the target."""
    first = run.earlier[0].keys.teacher_ckpt if run.earlier else keys.teacher_ckpt
    if first is None:
        raise Faulty(
            Fault(
                ("train", "teacher_ckpt") if "teacher_ckpt" in run.given else ("train",),
                "needs 'teacher_ckpt', the model that the student is made of: hf://org/name, a "
                "folder, a file or a run",
            )
        )
    if keys.teacher_ckpt not in (None, first):
        raise Faulty(
            Fault(("train", "teacher_ckpt"), f"must be that of the target's first run, {first}")
        )
    return str(first)


def _outline(source: str, run: TargetRun) -> TeacherOutline | None:
    """What is known of the teacher; None in a dry run where it is not here."""
    if "outline" not in run.shared:
        run.shared["outline"] = _read(source, run)
    found: TeacherOutline | None = run.shared["outline"]
    return found


def _read(source: str, run: TargetRun) -> TeacherOutline | None:
    try:
        return read_outline(source)
    except ArbError as error:
        if run.dry and run.model is not None and not isinstance(error, EnvironmentProblem):
            run.notes.append(
                f"{error.what}; what the system leaves open is counted as the decoder's defaults, "
                f"with 256 token ids"
            )
            return None
        missing = isinstance(error, EnvironmentProblem)
        fault = Fault(("train", "teacher_ckpt"), error.what, error.hint, environment=missing)
        raise Faulty(fault) from error


def _own_options(keys: UpcycleKeys, run: TargetRun) -> dict[str, Any]:
    """The keys that are options of the run's own phase; those of others may stand at their
    defaults.
    """
    usual = {str(option.alias): default_of(option) for option in config_fields(UpcycleKeys)}
    mine = {"blockwise": BLOCKWISE, "global": GLOBAL}.get(keys.phase, ())
    for phase, names in (("blockwise", BLOCKWISE), ("global", GLOBAL)):
        foreign = [
            name for name in names if phase != keys.phase and getattr(keys, name) != usual[name]
        ]
        if foreign:
            text = f"is of the phase {phase}, and this run's phase is {keys.phase}"
            raise Faulty(*(Fault(("train", name), text) for name in foreign))
    options = {name: getattr(keys, name) for name in mine if getattr(keys, name) != usual[name]}
    if options.get("convergence_target") is not None:
        options["convergence_max_steps"] = keys.convergence_max_steps
    return options


def _refuse(run: TargetRun, names: tuple[str, ...], why: str) -> None:
    if given := [name for name in names if name in run.given]:
        raise Faulty(*(Fault(("train", name), why) for name in given))
