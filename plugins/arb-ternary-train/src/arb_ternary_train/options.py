"""Options of training on batches of tokens, shared by every phase that does so."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from arb_ternary.config.options import fraction, non_negative, option, optional, positive
from arb_ternary_train.precision import AmpName, DtypeName
from arb_ternary_train.schedules import ScheduleName

__all__ = ["LoopOptions"]


@frozen(kw_only=True)
class LoopOptions:
    """What a training loop needs to know. A batch is ``batch_size`` samples of ``block_size`` predictions each."""

    steps: int = option(1000, "optimizer steps", validator=positive)
    batch_size: int = option(16, "samples in a micro-batch", validator=positive)
    block_size: int = option(128, "predictions in a sample, in tokens", validator=positive)
    lr: float | None = option(
        None, "peak learning rate of float parameters; null = the optimizer's own", validator=optional(positive)
    )
    min_lr: float | None = option(
        None,
        "learning rate of float parameters at the last step; null = min_rate times the peak",
        validator=optional(non_negative),
    )
    min_rate: float = option(
        0.05, "rate of ternary modules at the last step, as a fraction of their own", validator=fraction
    )
    warmup_steps: int = option(0, "steps over which rates rise linearly to their peak", validator=non_negative)
    lr_schedule: ScheduleName = option(
        "cosine",
        "how rates fall after the warm-up: cosine, linear, sqrt, two_stage, constant; none = nothing touches them",
    )
    grad_clip: float | None = option(
        None, "largest norm of the gradient of all float parameters together; null = any", validator=optional(positive)
    )
    gradient_accumulation_steps: int = option(
        1, "micro-batches a step: float gradients are averaged, votes are cast once for each", validator=positive
    )
    use_amp: bool = option(False, "run the forward pass under torch.autocast")
    amp_dtype: AmpName = option(
        "bfloat16", "number format of autocast; float16 only on cuda and without ternary modules"
    )
    dtype: DtypeName = option("float32", "number format of float parameters and activations")
    compile_model: bool = option(False, "compile the forward pass with torch.compile")
    activation_checkpointing: bool = option(False, "recompute activations in the backward pass to save memory")
    activation_checkpoint_threshold: int | None = option(
        None,
        "fewest tokens in a batch for which activations are recomputed; null = always",
        validator=optional(non_negative),
    )
    preserve_state: bool = option(
        False, "read each row as one continuous text and keep what the model remembers of it from batch to batch"
    )
    num_workers: int = option(0, "threads that read batches ahead; 0 = none", validator=non_negative)
    pin_memory: bool = option(False, "page-locked memory for batches on their way to an accelerator")
    max_skipped: int = option(
        100, "give up after so many micro-batches in a row without a finite loss", validator=positive
    )

    def __attrs_post_init__(self) -> None:
        if self.lr_schedule == "none" and self.warmup_steps:
            raise ValueError("'warmup_steps' has no effect with 'lr_schedule': none; use constant")
        if self.lr_schedule in ("constant", "none") and self.min_lr is not None:
            raise ValueError(f"'min_lr' has no effect with 'lr_schedule': {self.lr_schedule}")
        if self.warmup_steps > self.steps:
            raise ValueError(f"'warmup_steps' must be at most 'steps'; {self.warmup_steps} is more than {self.steps}")
        if self.activation_checkpoint_threshold is not None and not self.activation_checkpointing:
            raise ValueError("'activation_checkpoint_threshold' has no effect without 'activation_checkpointing'")

    @property
    def order(self) -> Literal["random", "sequential"]:
        """The order in which samples are read."""
        return "sequential" if self.preserve_state else "random"
