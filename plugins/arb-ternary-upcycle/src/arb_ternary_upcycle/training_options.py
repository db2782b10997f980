"""Options of the phases ``blockwise`` and ``global``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Literal

from attrs import frozen
from attrs.validators import and_, gt, in_, lt

from arb_ternary.config.fields import without_effect
from arb_ternary.config.options import non_negative, option, optional, positive
from arb_ternary.optim.protocol import Planned
from arb_ternary_train.options import EVAL_EVERY, LoopOptions, StandardConfig
from arb_ternary_upcycle.stage_options import FloatDtype

if TYPE_CHECKING:
    from arb_ternary_train.config import RunConfig

_TEACHER: Final = (
    "stage folder, or a run that has stages; null = the run's own stage prepared or else teacher, "
    "or that of the run it started from"
)
_TEACHER_MEMORY: Final = (
    "bytes of teacher blocks that stay in memory, in teacher_dtype; of the "
    "others one at a time is read from disk"
)
_TEACHER_DTYPE: Final = (
    "number format of the teacher's matrices in memory and of their products; "
    "its residual stream is float32"
)
#: 8 GiB.
_TEACHER_BYTES: Final = 8 << 30
_AUTOTUNE: Final = (
    "blockwise_autotune_mode",
    "blockwise_autotune_plateau_patience",
    "blockwise_autotune_lr_decay",
    "blockwise_autotune_min_lr",
    "blockwise_autotune_log_every",
)
_share = and_(gt(0.0), lt(1.0))


@frozen(kw_only=True)
class BlockwiseConfig(LoopOptions):
    """Options of the phase ``blockwise``; those of the loop hold for each block: ``steps`` are
    steps a block.
    """

    teacher: str | None = option(None, _TEACHER)
    teacher_memory: int = option(_TEACHER_BYTES, _TEACHER_MEMORY, validator=non_negative)
    teacher_dtype: FloatDtype = option(
        "float32", _TEACHER_DTYPE, validator=in_(("float32", "bfloat16"))
    )
    distill_target: Literal["residual", "attention"] = option(
        "residual",
        "what a block is to give as the teacher's does: the residual stream after it, or the "
        "update of its attention (then its feed-forward layer stays as it is)",
    )
    convergence_target: float | None = option(
        None,
        "a block is done when the running mean of its L1 distance is at most this; null = after "
        "its steps",
        validator=optional(positive),
    )
    convergence_patience: int = option(
        100,
        "with a convergence_target, a block is done also after so many steps without a lower "
        "running mean",
        validator=positive,
    )
    convergence_max_steps: int | None = option(
        2000,
        "with a convergence_target, a block is done after so many steps whatever its distance; "
        "null = steps",
        validator=optional(positive),
    )
    cache_teacher_outputs: bool = option(
        False,
        "keep what the blocks before give each sample, the teacher's and the student's, so that it "
        "is computed once",
    )
    cache_memory: int = option(
        1 << 30,
        "bytes of the cache in memory; what exceeds it lies in the run's directory",
        validator=non_negative,
    )
    blockwise_autotune_enabled: bool = option(
        False, "watch each block's distance for spikes and plateaus, and say what to do about them"
    )
    blockwise_autotune_mode: Literal["monitor", "active"] = option(
        "monitor", "monitor = only say it; active = lower the rates of floats and of votes"
    )
    blockwise_autotune_plateau_patience: int = option(
        100, "steps without a lower running mean that are a plateau", validator=positive
    )
    blockwise_autotune_lr_decay: float = option(
        0.5, "factor of the rates at a spike or plateau, until the next block", validator=_share
    )
    blockwise_autotune_min_lr: float = option(
        1e-6, "no rate is lowered below it", validator=non_negative
    )
    blockwise_autotune_log_every: int = option(
        50, "steps of a block between lines that say where autotuning stands", validator=positive
    )
    log_every: int = option(10, "steps between lines on the screen", validator=positive)
    eval_every: int = option(
        200,
        f"{EVAL_EVERY} (steps of a block; all of the model is evaluated)",
        validator=non_negative,
    )
    eval_batches: int | None = option(
        8,
        "batches of validation tokens in such an evaluation; null = all",
        validator=optional(positive),
    )

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.warmup_steps > self.steps_of_block:
            raise ValueError(
                f"'warmup_steps' must be at most 'convergence_max_steps'; {self.warmup_steps} is "
                f"more than {self.steps_of_block}"
            )

    @property
    def steps_of_block(self) -> int:
        """Most steps that a block takes, over which its rates fall."""
        if self.convergence_target is None or self.convergence_max_steps is None:
            return self.steps
        return self.convergence_max_steps

    @property
    def steps_of_loop(self) -> int:
        """See ``arb_ternary_train.protocols.PlansLoops``."""
        return self.steps_of_block

    def planned_steps(self, run: RunConfig) -> int:
        """Most steps of all blocks; see ``arb_ternary_train.protocols.PlansSteps``."""
        return self.steps_of_block * int(run.model.options.layers)

    def validate_in_run(self, run: RunConfig, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        yield from super().validate_in_run(run, planned)
        if self.preserve_state:
            yield (
                "preserve_state",
                "a block is trained on whole samples, and the teacher remembers nothing of earlier "
                "ones",
            )
        if self.compile_model:
            yield "compile_model", "the phase runs blocks, never the model as a whole"
        if self.convergence_target is None:
            reason = "'convergence_target' is null"
            yield from without_effect(self, reason, "convergence_patience", "convergence_max_steps")
        if not self.cache_teacher_outputs:
            yield from without_effect(self, "'cache_teacher_outputs' is false", "cache_memory")
        if not self.blockwise_autotune_enabled:
            yield from without_effect(self, "'blockwise_autotune_enabled' is false", *_AUTOTUNE)
        elif self.blockwise_autotune_mode == "active" and self.lr_schedule == "none":
            yield (
                "lr_schedule",
                "none leaves every rate alone, and autotuning is to lower them; use constant",
            )


@frozen(kw_only=True)
class GlobalConfig(StandardConfig):
    """Options of the phase ``global``."""

    teacher: str | None = option(None, _TEACHER)
    teacher_memory: int = option(_TEACHER_BYTES, _TEACHER_MEMORY, validator=non_negative)
    teacher_dtype: FloatDtype = option(
        "float32", _TEACHER_DTYPE, validator=in_(("float32", "bfloat16"))
    )
    kd_weight: float = option(
        0.0,
        "weight of the divergence from the teacher's predictions, added to the cross entropy; 0 = "
        "without",
        validator=non_negative,
    )
    kd_temperature: float = option(
        1.0,
        "logits of both are divided by it for the divergence, which is multiplied by its square",
        validator=positive,
    )
    force: bool = option(
        False, "start also where the student's held-out loss is more than 1.5 times the teacher's"
    )

    def validate_in_run(self, run: RunConfig, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        yield from super().validate_in_run(run, planned)
        if self.kd_weight == 0:
            yield from without_effect(self, "'kd_weight' is 0", "kd_temperature")
            if self.force:
                reason = "no teacher is asked with 'kd_weight': 0 and 'force': true"
                yield from without_effect(
                    self, reason, "teacher", "teacher_memory", "teacher_dtype"
                )
        elif self.preserve_state:
            yield (
                "preserve_state",
                "the teacher remembers nothing of earlier batches; set kd_weight to 0, or leave it "
                "out",
            )
