"""Options of the phase ``progressive``."""

from __future__ import annotations

# ruff: noqa: RUF009  # _loop makes attrs fields
from typing import Any

import attrs
from attrs import frozen

from arb_ternary.config.options import non_negative, option, optional, positive
from arb_ternary.specs import TrainedPart
from arb_ternary_progressive.growth_config import GrowthConfig
from arb_ternary_train.options import LoopOptions
from arb_ternary_train.precision import AmpName
from arb_ternary_train.schedules import ScheduleName
from arb_ternary_train.standard import EVAL_EVERY

__all__ = ["ProgressivePhaseConfig"]


def _loop(name: str) -> Any:
    """The option ``name`` as the training loop has it: default, help and rule."""
    found = attrs.fields_dict(LoopOptions)[name]
    return attrs.field(
        default=found.default, validator=found.validator, converter=found.converter, metadata=dict(found.metadata)
    )


@frozen(kw_only=True)
class ProgressivePhaseConfig(GrowthConfig):
    """Options of the phase ``progressive``: how the model grows, and how each stack is trained."""

    target_stacks: int = option(4, "stacks of the finished model", validator=positive)
    epochs_per_stack: int | None = option(
        None, "passes over the training text for each stack; null = 1, or steps_per_stack", validator=optional(positive)
    )
    steps_per_stack: int | None = option(
        None, "optimizer steps for each stack; null = epochs_per_stack", validator=optional(positive)
    )
    train_first: bool = option(
        True, "train the stack that the model begins with; false = it is the trunk, as it stands"
    )

    batch_size: int = _loop("batch_size")
    block_size: int = _loop("block_size")
    lr: float | None = _loop("lr")
    min_lr: float | None = _loop("min_lr")
    min_rate: float = _loop("min_rate")
    warmup_steps: int = option(
        0, "steps over which rates rise linearly to their peak, for each stack", validator=non_negative
    )
    lr_schedule: ScheduleName = option(
        "cosine",
        "how rates fall after the warm-up, for each stack: cosine, linear, sqrt, two_stage, constant; none = nothing "
        "touches them",
    )
    grad_clip: float | None = _loop("grad_clip")
    gradient_accumulation_steps: int = _loop("gradient_accumulation_steps")
    use_amp: bool = _loop("use_amp")
    amp_dtype: AmpName = _loop("amp_dtype")
    activation_checkpointing: bool = _loop("activation_checkpointing")
    activation_checkpoint_threshold: int | None = _loop("activation_checkpoint_threshold")
    num_workers: int = _loop("num_workers")
    pin_memory: bool = _loop("pin_memory")
    max_skipped: int = _loop("max_skipped")

    log_every: int = option(10, "steps between lines on the screen", validator=positive)
    eval_every: int = option(200, EVAL_EVERY, validator=non_negative)
    eval_batches: int | None = option(
        8, "batches of validation tokens in such an evaluation; null = all", validator=optional(positive)
    )

    def __attrs_post_init__(self) -> None:
        if self.epochs_per_stack is not None and self.steps_per_stack is not None:
            raise ValueError("'epochs_per_stack' has no effect beside 'steps_per_stack'; give one of them")
        if self.target_stacks > self.max_stacks:
            raise ValueError(
                f"'target_stacks' must be at most 'max_stacks'; {self.target_stacks} is more than {self.max_stacks}"
            )
        for key, message in self.contradictions():
            raise ValueError(f"'{key}': {message}")
        self.loop_options(self.steps_per_stack or max(1, self.warmup_steps))

    def added_parts(self, *, followed: bool) -> frozenset[TrainedPart]:
        """See :class:`arb_ternary_train.protocols.AddsParts`.

        Without ``new_stack_precision`` a new stack has what the model has already.
        """
        adapters: TrainedPart = "ternary" if self.adapter_dtype == "ternary" else "float"
        found: set[TrainedPart] = {adapters} if self.qlora_enabled else set()
        if self.target_stacks > 1:
            stored: dict[str | None, TrainedPart] = {
                "full": "float", "half": "float", "bfloat16": "float", "ternary": "ternary", "qlora": adapters
            }  # fmt: skip
            if self.new_stack_precision in stored:
                found.add(stored[self.new_stack_precision])
            # In a frozen trunk the second adapters learn only after the phase.
            if self.progressive_qlora and (self.trunk_strategy == "qlora" or not self.enabled or followed):
                found.add(adapters)
        return frozenset(found)

    def loop_options(self, steps: int) -> LoopOptions:
        """The options of the training loop of one stack, of so many optimizer steps.

        Raises:
            ValueError: they contradict each other.
        """
        shared = {field.name for field in attrs.fields(ProgressivePhaseConfig)}
        known = {field.name for field in attrs.fields(LoopOptions)}
        return LoopOptions(steps=steps, **{name: getattr(self, name) for name in shared & known})
