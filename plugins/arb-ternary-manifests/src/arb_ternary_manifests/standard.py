"""``trainer.standard``: training from random weights, or further training, in the phase
``standard``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from arb_ternary.config.errors import Fault, Faulty
from arb_ternary.specs import TrainedPart
from arb_ternary_manifests.language_model import decoder_section, model_choice
from arb_ternary_manifests.train_keys import ADAMW_KEYS, TrainSection

#: Keys that only float parameters use.
_FLOAT_KEYS: Final = ("lr", "min_lr", "grad_clip", *ADAMW_KEYS)
#: Key of ``train:`` for the rate of ternary weights, and the optimizer that has it.
VOTE_RATE: Final = "vote_rate"
_VOTES: Final[Mapping[str, Any]] = {"name": "scaled_votes"}
#: The data of a target that names none.
_DATA: Final = "shakespeare"


@frozen(kw_only=True)
class TargetRun:
    """A run of a target, as its trainer gets it.

    A trainer returns the settings of a config of ``arb train``: at least ``model``, ``optimizer``
    and ``phases``. The plan adds ``name``, ``seed`` and ``checks``, and the target's ``config``,
    which takes precedence.

    Attributes:
        section: the run's ``train:``.
        first: the ``train:`` of the target's first run; the same object as ``section`` in that run.
        steps: ``steps`` of the run; None if it has none.
        model: the ``model:`` section that the target's system stands for; None without a system.
        config: the target's ``config``.
        files: folder for files that the target's runs share, such as a tokenizer.
        dry: whether nothing will be trained, so that only sizes matter.
        cache: what the trainer found out for earlier runs of the target; empty at the first.
        notes: sentences for the user; the trainer adds its own.
    """

    section: TrainSection
    first: TrainSection
    steps: int | None
    model: Mapping[str, Any] | None
    config: Mapping[str, Any]
    files: Path
    dry: bool
    cache: dict[str, Any]
    notes: list[str] = field(factory=list)

    def value(self, key: str) -> Any:
        """Return the value of a key of ``train:``; None if it has none."""
        return self.section.values.get(key)

    def refuse_written(self, keys: tuple[str, ...], reason: str) -> None:
        """Raise a fault for each of ``keys`` that the user wrote."""
        faults = [Fault(("train", key), reason) for key in keys if key in self.section.written]
        if faults:
            raise Faulty(*faults)


def run_settings(run: TargetRun) -> dict[str, Any]:
    """Return the settings of a run of ``trainer.standard``."""
    model = decoder_section({}) if run.model is None else run.model
    parts = trained_parts(model)
    settings = {
        "data": _DATA,
        "model": model,
        "phases": [phase_section(run, parts)],
        **optimizer_setting(run, parts),
    }
    if "device" in run.section.written:
        settings["device"] = run.value("device")
    return settings


def trained_parts(model: Mapping[str, Any]) -> frozenset[TrainedPart]:
    """Return which kinds of parts a model of this section has.

    They are assumed to be ternary and float if its options do not say.

    Raises:
        Faulty: the section is not a model; paths begin with ``model``.
    """
    planned = getattr(model_choice(model).options, "planned", None)
    if planned is None:
        return frozenset({"ternary", "float"})
    kinds: frozenset[TrainedPart] = planned().kinds
    return kinds


def phase_section(run: TargetRun, parts: frozenset[TrainedPart]) -> dict[str, Any]:
    """Return the section of the phase that trains a model with ``parts``.

    Defaults of the guide that would do nothing are left out. A key that the user wrote stays, or is
    a fault here, so that the user learns that it does nothing.

    Raises:
        Faulty: a key that the user wrote has no effect.
    """
    section = run.section
    options = {key: section.values[key] for key in section.values if key in section.phase_keys}
    if run.steps is not None:
        options["steps"] = run.steps

    # The guide writes the number format of autocast down even if autocast is off.
    unused = set() if options.get("use_amp") else {"amp_dtype"}
    if options.get("convergence_target") is None and options.get("convergence_max_steps") is None:
        unused.add("convergence_max_steps")
    if "float" not in parts:
        reason = (
            "has no effect because the model has no float parameters; remove it, or give the "
            "system `float_parts: [embedding, head, norms]`. Ternary weights learn at 'vote_rate'"
        )
        run.refuse_written(_FLOAT_KEYS, reason)
        unused.update(_FLOAT_KEYS)
    else:
        falls = options.get("lr_schedule") not in ("constant", "none")
        if not falls and not options.get("min_lr"):
            unused.add("min_lr")
        if "optimizer" in run.config:
            # The target's own optimizer has a rate, unless the user wrote another one here.
            unused.update({"lr", "grad_clip"} - section.written)

    kept = {key: value for key, value in options.items() if key not in unused}
    return {"name": section.phase, **kept}


def optimizer_setting(
    run: TargetRun, parts: frozenset[TrainedPart], votes: Mapping[str, Any] = _VOTES
) -> dict[str, Any]:
    """Return ``{"optimizer": ...}``: ``votes`` for what is ternary, AdamW for what is float.

    It is empty if the target's own config has an optimizer.

    Raises:
        Faulty: it has one, and the user wrote keys of another; or there is nothing ternary, and the
            user wrote a rate for it.
    """
    if "optimizer" in run.config:
        reason = "the target's config has an optimizer of its own; write it there"
        run.refuse_written((*ADAMW_KEYS, VOTE_RATE), reason)
        return {}
    values = run.section.values
    if values.get(VOTE_RATE) is not None:
        votes = {**votes, "lr": values[VOTE_RATE]}
    if "float" not in parts:
        return {"optimizer": dict(votes)}
    adamw = {"name": "adamw", **{key: values[key] for key in ADAMW_KEYS if key in values}}
    if parts == {"float"}:
        run.refuse_written((VOTE_RATE,), "has no effect because the model has no ternary weights")
        return {"optimizer": adamw}
    return {"optimizer": {"name": "split", "ternary": dict(votes), "float": adamw}}
