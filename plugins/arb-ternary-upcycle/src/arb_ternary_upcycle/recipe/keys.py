"""The keys of ``train:`` that ``trainer.upcycle`` has. Imported without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import frozen

from arb_ternary.config.options import non_negative, option, optional, positive
from arb_ternary_train.manifest.keys import TrainKeys

#: Keys that are options of the phase ``blockwise``, and of ``global``, by the same names.
BLOCKWISE = (
    "distill_target",
    "convergence_target",
    "convergence_patience",
    "convergence_max_steps",
    "cache_teacher_outputs",
    "blockwise_autotune_enabled",
    "blockwise_autotune_mode",
    "blockwise_autotune_plateau_patience",
    "blockwise_autotune_lr_decay",
    "blockwise_autotune_min_lr",
    "blockwise_autotune_log_every",
)
GLOBAL = ("kd_weight", "kd_temperature", "force")


@frozen(kw_only=True)
class UpcycleKeys(TrainKeys):
    """Keys of ``train:`` of ``trainer.upcycle``; what is not said here is said of the phases'
    options.
    """

    phase: Literal["standard", "blockwise", "global"] = option(
        "standard", "how the student is trained"
    )
    teacher_ckpt: str | None = option(
        None,
        "the teacher: hf://org/name, a folder of transformers, a GGUF file, or a run; a target's "
        "first run needs it",
    )
    distill_target: Literal["residual", "attention"] = option(
        "residual", "blockwise: what a block learns to give"
    )
    convergence_target: float | None = option(
        None,
        "blockwise: L1 distance at which a block is done; null = after its steps",
        validator=optional(positive),
    )
    convergence_patience: int = option(
        100, "blockwise: steps without improvement that end a block", validator=positive
    )
    convergence_max_steps: int | None = option(
        None,
        "blockwise: most steps of a block; null = steps of the run",
        validator=optional(positive),
    )
    cache_teacher_outputs: bool = option(
        False, "blockwise: compute what the blocks before give only once"
    )
    blockwise_autotune_enabled: bool = option(
        False, "blockwise: watch each block for spikes and plateaus"
    )
    blockwise_autotune_mode: Literal["monitor", "active"] = option(
        "monitor", "blockwise: say what would be done, or lower the rates"
    )
    blockwise_autotune_plateau_patience: int = option(
        100, "blockwise: steps without improvement that are a plateau", validator=positive
    )
    blockwise_autotune_lr_decay: float = option(
        0.5, "blockwise: factor of the rates", validator=positive
    )
    blockwise_autotune_min_lr: float = option(
        1e-6, "blockwise: no rate is lowered below it", validator=non_negative
    )
    blockwise_autotune_log_every: int = option(
        50, "blockwise: steps between its lines", validator=positive
    )
    kd_weight: float = option(
        0.0,
        "global: weight of the divergence from the teacher's predictions",
        validator=non_negative,
    )
    kd_temperature: float = option(
        1.0, "global: temperature of both sides of that divergence", validator=positive
    )
    force: bool = option(False, "global: start whatever the student's loss is")
    load_teacher: Mapping[str, Any] = option(
        factory=dict, help="further options of the phase load_teacher"
    )
    fold_rotate: Mapping[str, Any] = option(factory=dict, help="options of the phase fold_rotate")
    surgery: Mapping[str, Any] = option(factory=dict, help="options of the phase surgery")
    projection: Mapping[str, Any] = option(factory=dict, help="options of the phase projection")
    benchmark: Mapping[str, Any] | None = option(
        None, "options of the phase benchmark, which is then the run's next; null = none"
    )
    export: Mapping[str, Any] | None = option(
        None, "options of the phase export, which is then the last; null = none"
    )
