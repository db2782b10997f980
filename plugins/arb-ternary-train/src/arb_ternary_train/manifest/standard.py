"""``trainer.standard``: training from random weights, or further training, in the phase
``standard``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

from arb_ternary.config.choice import ModelChoice
from arb_ternary.config.errors import Fault, Faulty
from arb_ternary.config.options import option
from arb_ternary.config.structure import structure_with_faults
from arb_ternary.config.yaml_document import Document
from arb_ternary.plugins.manager import manager
from arb_ternary.specs import TrainedPart, load_target
from arb_ternary_train.manifest.keys import StandardKeys, TrainKeys
from arb_ternary_train.manifest.protocol import TargetRun

#: Keys of ``train:`` that are options of a loop as they are.
_SAME: Final = (
    "batch_size",
    "block_size",
    "warmup_steps",
    "lr_schedule",
    "gradient_accumulation_steps",
    "use_amp",
    "dtype",
    "compile_model",
    "activation_checkpointing",
    "activation_checkpoint_threshold",
    "num_workers",
    "pin_memory",
)
#: Keys that decide the optimizer of float parameters.
_OPTIMIZER: Final = ("weight_decay", "beta1", "beta2")
#: Keys that only float parameters have use for.
_FLOAT: Final = ("lr", "min_lr", "grad_clip", *_OPTIMIZER)
#: The system of a target that names none, and the data.
_SYSTEM: Final = "language_model"
_DATA: Final = "shakespeare"


def run_settings(keys: StandardKeys, run: TargetRun) -> Mapping[str, Any]:
    """The target of ``trainer.standard``."""
    model = default_model() if run.model is None else run.model
    parts = trained_parts(model)
    phase = {"name": keys.phase, **loop_settings(keys, run, parts)}
    settings = {"device": keys.device, "data": _DATA, "model": model, "phases": [phase]}
    return {**settings, **optimizer_settings(keys, run, parts)}


def default_model() -> Mapping[str, Any]:
    """The ``model:`` section of the system of a target that names none."""
    spec = manager().registry.get("system", _SYSTEM).spec
    section: Mapping[str, Any] = load_target(f"system '{_SYSTEM}':", spec.target)({})
    return section


@frozen(kw_only=True)
class _Model:
    model: ModelChoice = option(help="the network")


def trained_parts(model: Mapping[str, Any]) -> frozenset[TrainedPart]:
    """Which kinds of parts a model of this section has; ternary and float where its options do not
    tell.

    Raises:
        Faulty: the section is no model; paths begin with ``model``.
    """
    choice, faults = structure_with_faults(
        _Model, Document({"model": dict(model)}), manager().registry
    )
    if faults or choice is None:
        raise Faulty(*faults)
    tell = getattr(choice.model.options, "planned", None)
    kinds: frozenset[TrainedPart] = (
        frozenset({"ternary", "float"}) if tell is None else tell().kinds
    )
    return kinds


def loop_settings(keys: TrainKeys, run: TargetRun, parts: frozenset[TrainedPart]) -> dict[str, Any]:
    """The options of a loop (``LoopOptions``) for a model that has ``parts``.

    A key that would do nothing is left out where it is at its default; where the user wrote it, it
    stays or is a fault here, so that the user hears of it.

    Raises:
        Faulty: a key that the user wrote has no effect.
    """
    loop: dict[str, Any] = {} if run.steps is None else {"steps": run.steps}
    loop |= {name: getattr(keys, name) for name in _SAME}
    if keys.use_amp:
        loop["amp_dtype"] = keys.amp_dtype
    if "float" not in parts:
        faults = [
            Fault(
                ("train", name),
                "has no effect because the model has no float parameters; remove it",
            )
            for name in _FLOAT
            if name in run.given
        ]
        if faults:
            raise Faulty(*faults)
        return loop
    if "optimizer" not in run.config or "lr" in run.given:
        loop["lr"] = keys.lr
    if keys.lr_schedule not in ("constant", "none") or ("min_lr" in run.given and keys.min_lr):
        loop["min_lr"] = keys.min_lr
    if keys.grad_clip is not None and ("optimizer" not in run.config or "grad_clip" in run.given):
        loop["grad_clip"] = keys.grad_clip
    return loop


def optimizer_settings(
    keys: TrainKeys, run: TargetRun, parts: frozenset[TrainedPart]
) -> dict[str, Any]:
    """The ``optimizer:`` of a config, by its key: votes for what is ternary, AdamW for what is
    float.

    Nothing where the target's own config has one.

    Raises:
        Faulty: it has one, and the user wrote keys that would decide another.
    """
    if "optimizer" in run.config:
        given = [name for name in _OPTIMIZER if name in run.given]
        if given:
            text = "the target's config has an optimizer of its own; write it there"
            raise Faulty(*(Fault(("train", name), text) for name in given))
        return {}
    adamw = {"name": "adamw", **{name: getattr(keys, name) for name in _OPTIMIZER}}
    if "float" not in parts:
        return {"optimizer": "scaled_votes"}
    return {"optimizer": adamw if parts == {"float"} else {"name": "split", "float": adamw}}
