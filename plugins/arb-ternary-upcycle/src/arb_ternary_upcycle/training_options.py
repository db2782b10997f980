"""Options of the phases ``blockwise`` and ``global``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Literal

from attrs import frozen
from attrs.validators import and_, gt, lt

from arb_ternary.config.options import (
    LARGEST_INT64,
    Condition,
    non_negative,
    option,
    optional,
    positive,
    when,
)
from arb_ternary.optim.protocol import Planned
from arb_ternary_train.options import LoopOptions, StandardConfig, loop_option
from arb_ternary_upcycle.stage_options import FloatDtype

if TYPE_CHECKING:
    from arb_ternary_train.config import RunConfig

#: Options of ``TeacherOptions`` have no effect in a phase that reads no teacher.
_READS_TEACHER: Final = Condition(
    lambda options, run, plan: options.reads_teacher,
    "no teacher is needed with 'kd_weight': 0 and 'force': true",
)
_CONVERGES: Final = when("convergence_target")
_AUTOTUNES: Final = when("blockwise_autotune_enabled")
_share = and_(gt(0.0), lt(1.0))


@frozen(kw_only=True, slots=False)  # a second base class cannot have slots
class TeacherOptions:
    """The teacher of a phase that trains, and how it is held."""

    teacher: str | None = option(
        None,
        "stage folder, or a run that has stages; null = the run's own stage prepared or else "
        "teacher, or that of the run it started from",
        active_when=_READS_TEACHER,
    )
    teacher_memory: int = option(
        8 << 30,
        "bytes of teacher blocks that stay in memory, in teacher_dtype; the others are read from "
        "disk one at a time",
        validator=non_negative,
        active_when=_READS_TEACHER,
        largest=LARGEST_INT64,
    )
    teacher_dtype: FloatDtype = option(
        "float32",
        "number format of the teacher's matrices in memory and of their products; its residual "
        "stream is float32",
        active_when=_READS_TEACHER,
    )

    probe_tokens: int = option(
        4096,
        "held-out tokens on which the best state is chosen, and lower rates if the state gets "
        "worse; 0 = the last state stays, whatever it is",
        validator=non_negative,
    )

    @property
    def reads_teacher(self) -> bool:
        """Whether the phase reads a teacher at all."""
        return True


@frozen(kw_only=True)
class BlockwiseConfig(LoopOptions, TeacherOptions):
    """Options of the phase ``blockwise``; those of the loop, such as ``steps``, are per block."""

    distill_target: Literal["residual", "attention"] = option(
        "residual",
        "what a block learns to give as the teacher's does: the residual stream after it, or the "
        "update of its attention (its feed-forward layer then stays as it is)",
    )
    convergence_target: float | None = option(
        None,
        "a block is done when the running mean of its L1 distance is at most this; null = after "
        "its steps",
        validator=optional(positive),
    )
    convergence_patience: int = option(
        100,
        "with a convergence_target, a block is also done after this many steps without a lower "
        "running mean",
        validator=positive,
        active_when=_CONVERGES,
    )
    convergence_max_steps: int | None = option(
        2000,
        "with a convergence_target, a block is done after this many steps whatever its distance; "
        "null = steps",
        validator=optional(positive),
        active_when=_CONVERGES,
    )
    cache_teacher_outputs: bool = option(
        False,
        "keep the outputs of the earlier blocks for each sample, the teacher's and the student's, "
        "so that they are computed once",
    )
    cache_memory: int = option(
        1 << 30,
        "bytes of the cache in memory; the rest is in the run's directory",
        validator=non_negative,
        active_when=when("cache_teacher_outputs"),
        largest=LARGEST_INT64,
    )
    blockwise_autotune_enabled: bool = option(
        False, "watch each block's distance for spikes and plateaus"
    )
    blockwise_autotune_mode: Literal["monitor", "active"] = option(
        "monitor",
        "monitor = say what could be done about them; active = lower the rates of floats and votes",
        active_when=_AUTOTUNES,
    )
    blockwise_autotune_plateau_patience: int = option(
        100,
        "steps without a lower running mean that are a plateau",
        validator=positive,
        active_when=_AUTOTUNES,
    )
    blockwise_autotune_lr_decay: float = option(
        0.5,
        "factor of the rates at a spike or plateau, until the next block",
        validator=_share,
        active_when=_AUTOTUNES,
    )
    blockwise_autotune_min_lr: float = option(
        1e-6, "no rate is lowered below it", validator=non_negative, active_when=_AUTOTUNES
    )
    blockwise_autotune_log_every: int = option(
        50,
        "steps of a block between lines about the state of autotuning",
        validator=positive,
        active_when=_AUTOTUNES,
    )
    eval_every: int = loop_option(
        "eval_every",
        help="steps of a block between evaluations of the whole model; 0 = never, not at the end "
        "of the run either",
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
        """Most steps of a block, over which its rates fall."""
        if self.convergence_target is None or self.convergence_max_steps is None:
            return self.steps
        return self.convergence_max_steps

    @property
    def steps_of_loop(self) -> int:
        """See ``arb_ternary_train.capabilities.has_own_loops``."""
        return self.steps_of_block

    def planned_steps(self, run: RunConfig) -> int:
        """Most steps of all blocks; see ``arb_ternary_train.capabilities.planned_steps``."""
        return self.steps_of_block * int(run.model.options.layers)

    def validate_in_run(self, run: RunConfig, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        yield from super().validate_in_run(run, planned)
        if self.preserve_state:
            yield (
                "preserve_state",
                "a block is trained on whole samples, and the teacher keeps nothing of earlier "
                "ones; remove it",
            )
        if self.compile_model:
            yield "compile_model", "the phase runs blocks, never the whole model; remove it"
        lowers = self.blockwise_autotune_enabled and self.blockwise_autotune_mode == "active"
        if lowers and self.lr_schedule == "none":
            yield (
                "lr_schedule",
                "none leaves every rate alone, but autotuning lowers rates; use constant",
            )


@frozen(kw_only=True)
class GlobalConfig(StandardConfig, TeacherOptions):
    """Options of the phase ``global``."""

    kd_weight: float = option(
        0.0,
        "weight of the divergence from the teacher's predictions, added to the cross entropy; 0 = "
        "none",
        validator=non_negative,
    )
    kd_temperature: float = option(
        1.0,
        "for the divergence, both models' logits are divided by it; the divergence is multiplied "
        "by its square",
        validator=positive,
        active_when=when("kd_weight"),
    )
    force: bool = option(
        False,
        "start even if the student's held-out loss is more than 1.5 times the teacher's",
    )

    @property
    def reads_teacher(self) -> bool:
        """Whether the phase reads a teacher at all."""
        return self.kd_weight > 0 or not self.force

    def validate_in_run(self, run: RunConfig, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        yield from super().validate_in_run(run, planned)
        if self.kd_weight and self.preserve_state:
            yield (
                "preserve_state",
                "the teacher keeps nothing of earlier batches; set kd_weight to 0, or remove it",
            )
