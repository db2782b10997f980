"""Options of the phase ``progressive``."""

from __future__ import annotations

# ruff: noqa: RUF009  # _growth and _loop make attrs fields
from typing import Any, Literal

import attrs
from attrs import frozen

from arb_ternary.config.options import non_negative, option, optional, positive
from arb_ternary_progressive.config import AdapterDtype, AdapterOptions, Pattern, Precision, ProgressiveConfig
from arb_ternary_progressive.hidden_codec import CacheDtype
from arb_ternary_train.options import LoopOptions
from arb_ternary_train.precision import AmpName
from arb_ternary_train.schedules import ScheduleName

__all__ = ["ProgressivePhaseConfig"]


def _like(owner: type[Any], name: str) -> Any:
    """The option ``name`` as ``owner`` has it: default, help and rule."""
    found = attrs.fields_dict(owner)[name]
    return attrs.field(
        default=found.default, validator=found.validator, converter=found.converter, metadata=dict(found.metadata)
    )


def _growth(name: str) -> Any:
    return _like(ProgressiveConfig, name)


def _loop(name: str) -> Any:
    return _like(LoopOptions, name)


@frozen(kw_only=True)
class ProgressivePhaseConfig:
    """Options of the phase ``progressive``."""

    target_stacks: int = option(4, "stacks of the finished model", validator=positive)
    blocks_per_stack: int | None = option(
        None, "blocks of a new stack; null = as many as the model begins with", validator=optional(positive)
    )
    epochs_per_stack: int | None = option(
        None, "passes over the training text for each stack; null = 1, or steps_per_stack", validator=optional(positive)
    )
    steps_per_stack: int | None = option(
        None, "optimizer steps for each stack; null = epochs_per_stack", validator=optional(positive)
    )
    train_first: bool = option(
        True, "train the stack that the model begins with; false = it is the trunk, as it stands"
    )
    new_stack_precision: Precision | None = option(
        None,
        "what a new stack is stored in: full, half, bfloat16, nvfp4, ternary, qlora; null = ternary or full, as the "
        "model's own linears",
    )

    trunk_strategy: Literal["frozen", "qlora"] = _growth("trunk_strategy")
    max_stacks: int = _growth("max_stacks")
    building_mode: Literal["append", "prepend"] = _growth("building_mode")
    zero_residual: bool = _growth("zero_residual")
    qlora_enabled: bool = _growth("qlora_enabled")
    qlora_rank: int = _growth("qlora_rank")
    qlora_alpha: float = _growth("qlora_alpha")
    qlora_strategy: Literal["simplified", "progressive", "variable"] = _growth("qlora_strategy")
    qlora_rank_pattern: Pattern = _growth("qlora_rank_pattern")
    qlora_alpha_pattern: Pattern = _growth("qlora_alpha_pattern")
    qlora_configs: dict[int, AdapterOptions] | None = _growth("qlora_configs")
    qlora_base: Literal["nvfp4", "ternary"] = _growth("qlora_base")
    progressive_qlora: bool = _growth("progressive_qlora")
    progressive_qlora_rank: int = _growth("progressive_qlora_rank")
    progressive_qlora_alpha: float = _growth("progressive_qlora_alpha")
    adapter_dtype: AdapterDtype = _growth("adapter_dtype")
    cache_activations: bool = _growth("cache_activations")
    cache_bytes: int = _growth("cache_bytes")
    cache_folder: str | None = _growth("cache_folder")
    cache_dtype: CacheDtype = _growth("cache_dtype")
    time_interpretation: Literal["input", "depth"] = _growth("time_interpretation")
    time_embedding_dim: int = _growth("time_embedding_dim")
    time_encoding_type: Literal["sinusoidal", "learned"] = _growth("time_encoding_type")
    time_sampling: Literal["batch", "sample"] = _growth("time_sampling")
    stack_time_mapping: Literal["linear", "exponential", "custom", "time_per_stack"] = _growth("stack_time_mapping")
    custom_time_mapping: str | None = _growth("custom_time_mapping")
    time_per_stack: int = _growth("time_per_stack")
    num_time_steps: int = _growth("num_time_steps")

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
    eval_every: int = option(200, "steps between evaluations; 0 = only at the end of the run", validator=non_negative)
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
        for key, message in self.progressive().contradictions():
            raise ValueError(f"'{key}': {message}")
        self.loop_options(self.steps_per_stack or max(1, self.warmup_steps))

    def progressive(self, native: Precision = "full", **more: Any) -> ProgressiveConfig:
        """The options of growth, as a builder takes them.

        Args:
            native: the precision of new stacks where none is given.
            more: options that are not the phase's own.
        """
        shared = {field.name for field in attrs.fields(ProgressivePhaseConfig)}
        known = {field.name for field in attrs.fields(ProgressiveConfig)}
        special = {"blocks_per_stack", "new_stack_precision"}
        given = {name: getattr(self, name) for name in (shared & known) - special}
        precision = self.new_stack_precision or native
        if self.blocks_per_stack is not None:
            given["blocks_per_stack"] = self.blocks_per_stack
        return ProgressiveConfig(new_stack_precision=precision, **given, **more)

    def loop_options(self, steps: int) -> LoopOptions:
        """The options of the training loop of one stack, of so many optimizer steps.

        Raises:
            ValueError: they contradict each other.
        """
        shared = {field.name for field in attrs.fields(ProgressivePhaseConfig)}
        known = {field.name for field in attrs.fields(LoopOptions)}
        return LoopOptions(steps=steps, **{name: getattr(self, name) for name in shared & known})
