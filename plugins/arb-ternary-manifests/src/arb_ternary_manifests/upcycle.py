"""``trainer.upcycle``: a target's first run makes the student of a teacher and trains it.

Later runs train the student further.

This module needs ``arb-ternary-upcycle`` and is imported only if a target names the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from arb_ternary.config.errors import Fault, Faulty
from arb_ternary.errors import ArbError, EnvironmentProblem
from arb_ternary_manifests.standard import (
    TargetRun,
    optimizer_setting,
    phase_section,
    trained_parts,
)
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_upcycle.recipe.outline import TeacherOutline, absolute, read_outline
from arb_ternary_upcycle.recipe.phases import PREPARING, VOTES, ending, preparing
from arb_ternary_upcycle.recipe.student import assumed_section, student_section


def run_settings(run: TargetRun) -> dict[str, Any]:
    """Return the settings of a run of ``trainer.upcycle``.

    In a dry run the teacher may be missing if the target's system states all sizes of the student.
    """
    source = _teacher_source(run)
    outline = _cached_outline(source, run)
    model = _student_model(outline, run)
    parts = trained_parts(model)
    phases = [phase_section(run, parts)]
    if run.section is run.first:
        phases = [*_preparing_phases(source, model, run), *phases]
    else:
        run.refuse_written(
            PREPARING, "says how the student is made, which the target's first run does"
        )
    phases += ending(run.value("benchmark"), run.value("export"))

    settings: dict[str, Any] = {"model": model, "phases": phases}
    if "device" in run.section.written:
        settings["device"] = run.value("device")
    if outline is None:
        settings["data"] = {"name": "shakespeare"}
    elif "data" not in run.config:
        settings["data"] = outline.data_in(run.files)
    return {**settings, **optimizer_setting(run, parts, VOTES)}


def _teacher_source(run: TargetRun) -> str:
    """Return the teacher of the target, which its first run names."""
    first = run.first.values.get("teacher_ckpt")
    own = run.value("teacher_ckpt")
    if first is None:
        path = ("train", "teacher_ckpt") if "teacher_ckpt" in run.section.written else ("train",)
        text = (
            "needs 'teacher_ckpt', the model that the student is made of: hf://org/name, a folder, "
            "a file or a run"
        )
        raise Faulty(Fault(path, text))
    if own not in (None, first):
        text = f"must be that of the target's first run, {first}"
        raise Faulty(Fault(("train", "teacher_ckpt"), text))
    return str(first)


def _cached_outline(source: str, run: TargetRun) -> TeacherOutline | None:
    """Return the teacher's outline; None in a dry run if the teacher is missing."""
    if "outline" not in run.cache:
        run.cache["outline"] = _read_outline(source, run)
    outline: TeacherOutline | None = run.cache["outline"]
    return outline


def _read_outline(source: str, run: TargetRun) -> TeacherOutline | None:
    try:
        return read_outline(source)
    except ArbError as error:
        missing = isinstance(error, EnvironmentProblem)
        if run.dry and run.model is not None and not missing:
            run.notes.append(
                f"{error.what}; what the system leaves open is counted as the decoder's defaults, "
                f"with 256 token ids"
            )
            return None
        fault = Fault(("train", "teacher_ckpt"), error.what, error.hint, environment=missing)
        raise Faulty(fault) from error


def _student_model(outline: TeacherOutline | None, run: TargetRun) -> dict[str, Any]:
    own = dict(run.model or {})
    try:
        if outline is None:
            return assumed_section(own)
        return student_section(outline.config, own)
    except Faulty as error:
        path = ("train", "teacher_ckpt") if run.model is None else ()
        placed = [Fault(path, fault.message, fault.hint) for fault in error.faults]
        raise Faulty(*placed) from error


def _preparing_phases(source: str, model: Mapping[str, Any], run: TargetRun) -> list[Any]:
    """Return the phases that make the student."""
    if model.get("attention") != "decoupled":
        run.refuse_written(
            ("surgery",), "has no effect because the student keeps the teacher's attention"
        )
    max_length = model.get("max_length", DecoderConfig().max_length)
    options = {name: run.value(name) or {} for name in PREPARING}
    return preparing(absolute(source), model, max_length, options)
