"""The keys of ``train:`` in a manifest that every trainer has."""

from __future__ import annotations

from typing import Literal

from attrs import frozen
from attrs.validators import ge, lt

from arb_ternary.config.options import non_negative, option, optional, positive
from arb_ternary_train.config import is_device
from arb_ternary_train.options import AmpName, DtypeName, step_size
from arb_ternary_train.schedules import ScheduleName

_decay = [ge(0.0), lt(1.0)]


@frozen(kw_only=True)
class TrainKeys:
    """Keys of ``train:`` that every trainer has; its own class adds ``phase``, and what else it
    needs.
    """

    batch_size: int = option(32, "samples in a micro-batch", validator=positive)
    block_size: int = option(512, "predictions in a sample, in tokens", validator=positive)
    lr: float = option(3e-4, "peak learning rate of float parameters", validator=positive)
    device: str = option(
        "cpu", "where the model lives: cpu, cuda, cuda:N or mps", validator=is_device
    )
    dtype: DtypeName = option("float32", "number format of float parameters and activations")
    weight_decay: float = option(0.01, "decay of float matrices, of AdamW", validator=non_negative)
    beta1: float = option(0.9, "decay of AdamW's first moment", validator=_decay)
    beta2: float = option(0.95, "decay of AdamW's second moment", validator=_decay)
    grad_clip: float | None = option(
        1.0,
        "largest norm of the gradient of all float parameters together; null = any",
        validator=optional(positive),
    )
    warmup_steps: int = option(
        0, "steps over which rates rise linearly to their peak", validator=non_negative
    )
    lr_schedule: ScheduleName = option(
        "cosine", "how rates fall after the warm-up; none = nothing touches them"
    )
    min_lr: float = option(
        0.0, "learning rate of float parameters at the last step", validator=non_negative
    )
    use_amp: bool = option(False, "run the forward pass under torch.autocast")
    amp_dtype: AmpName = option(
        "bfloat16",
        "number format of autocast, with use_amp; float16 only on cuda and without ternary modules",
    )
    compile_model: bool = option(False, "compile the forward pass with torch.compile")
    gradient_accumulation_steps: int = option(1, "micro-batches a step", validator=step_size)
    activation_checkpointing: bool = option(
        False, "recompute activations in the backward pass to save memory"
    )
    activation_checkpoint_threshold: int | None = option(
        None,
        "fewest tokens in a batch for which activations are recomputed; null = always",
        validator=optional(non_negative),
    )
    num_workers: int = option(
        0, "threads that read batches ahead; 0 = none", validator=non_negative
    )
    pin_memory: bool = option(
        False, "page-locked memory for batches on their way to an accelerator"
    )


@frozen(kw_only=True)
class StandardKeys(TrainKeys):
    """Keys of ``train:`` of ``trainer.standard``."""

    phase: Literal["standard"] = option("standard", "what the run does")
