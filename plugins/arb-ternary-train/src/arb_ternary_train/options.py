"""Options of training on batches of tokens: those that every phase has that does so, and those of
``standard``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
from attrs import frozen
from attrs.converters import optional as optional_converter

from arb_ternary.config.choice import Choice
from arb_ternary.config.fields import without_effect
from arb_ternary.config.options import Rule, fraction, non_negative, option, optional, positive
from arb_ternary.optim.protocol import Planned
from arb_ternary.specs import OptimizerSpec, PolicySpec
from arb_ternary_train.schedules import ScheduleName

if TYPE_CHECKING:
    from arb_ternary_train.config import RunConfig

DtypeName = Literal["float32", "bfloat16", "float16"]
AmpName = Literal["bfloat16", "float16"]

#: Help of ``eval_every``, for every phase that has it.
EVAL_EVERY: Final = (
    "steps between evaluations; the one at the end of the run takes no more tokens than it was "
    "trained on, and 16,384 at least; 0 = never, not at the end either"
)

# : Micro-batches of a step, of whose votes each has random numbers of its own: 2**20 casts, 256 of
# them a micro-batch.
step_size: Final = Rule(
    "1 to 4096", lambda value: 1 <= value <= 4096, {"minimum": 1, "maximum": 4096}
)
#: Where in a phase something happens, at least once.
_shares: Final = Rule(
    "a list of shares between 0 and 1, at least one",
    lambda value: len(value) > 0 and all(0 < share < 1 for share in value),
    {"minItems": 1, "items": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}},
)
#: Patterns of names, at least one.
_patterns: Final = Rule(
    "a list of at least one pattern", lambda value: len(value) > 0 and all(value), {"minItems": 1}
)
_factors: Final = Rule(
    "factors greater than 0 by patterns of names; what is not to learn belongs into 'freeze'",
    lambda value: bool(value) and all(0 < factor < math.inf for factor in value.values()),
    {"minProperties": 1, "additionalProperties": {"exclusiveMinimum": 0}},
)


@frozen(kw_only=True)
class LoopOptions:
    """What a training loop needs to know. A batch is ``batch_size`` samples of ``block_size``
    predictions each.
    """

    steps: int = option(1000, "optimizer steps", validator=positive)
    batch_size: int = option(16, "samples in a micro-batch", validator=positive)
    block_size: int = option(128, "predictions in a sample, in tokens", validator=positive)
    lr: float | None = option(
        None,
        "peak learning rate of float parameters; null = the optimizer's own",
        validator=optional(positive),
    )
    min_lr: float | None = option(
        None,
        "learning rate of float parameters at the last step; null = min_rate times the peak",
        validator=optional(non_negative),
    )
    min_rate: float = option(
        0.05,
        "rate of ternary modules at the last step, as a fraction of their own",
        validator=fraction,
    )
    warmup_steps: int = option(
        0, "steps over which rates rise linearly to their peak", validator=non_negative
    )
    lr_schedule: ScheduleName = option(
        "cosine",
        "how rates fall after the warm-up: cosine, linear, sqrt, two_stage, constant; none = "
        "nothing touches them",
    )
    grad_clip: float | None = option(
        None,
        "largest norm of the gradient of all float parameters together; null = any",
        validator=optional(positive),
    )
    gradient_accumulation_steps: int = option(
        1,
        "micro-batches a step: float gradients are averaged, votes are cast once for each",
        validator=step_size,
    )
    use_amp: bool = option(False, "run the forward pass under torch.autocast")
    amp_dtype: AmpName = option(
        "bfloat16", "number format of autocast; float16 only on cuda and without ternary modules"
    )
    dtype: DtypeName = option("float32", "number format of float parameters and activations")
    compile_model: bool = option(False, "compile the forward pass with torch.compile")
    activation_checkpointing: bool = option(
        False, "recompute activations in the backward pass to save memory"
    )
    activation_checkpoint_threshold: int | None = option(
        None,
        "fewest tokens in a batch for which activations are recomputed; null = always",
        validator=optional(non_negative),
    )
    preserve_state: bool = option(
        False,
        "read each row as one continuous text and keep what the model remembers of it from batch "
        "to batch",
    )
    num_workers: int = option(
        0, "threads that read batches ahead; 0 = none", validator=non_negative
    )
    pin_memory: bool = option(
        False, "page-locked memory for batches on their way to an accelerator"
    )
    max_skipped: int = option(
        100,
        "give up after so many micro-batches in a row without a finite loss",
        validator=positive,
    )
    freeze: tuple[str, ...] | None = option(
        None,
        "what does not learn in this phase: patterns of names of modules or parameters, such as "
        "embedding or blocks.0.*; null = nothing is frozen",
        validator=optional(_patterns),
        converter=optional_converter(tuple),
    )
    rate_factors: dict[str, float] | None = option(
        None,
        "what the rates of ternary modules and float parameters are multiplied by, by such "
        "patterns; of several that name a part all count; null = none",
        validator=optional(_factors),
    )
    policy: Choice[PolicySpec] | None = option(
        None,
        "what decides, step by step, how the loop goes on, and may change optimizer and rates; "
        "null = nothing",
    )

    def __attrs_post_init__(self) -> None:
        if self.lr_schedule == "none" and self.warmup_steps:
            raise ValueError("'warmup_steps' has no effect with 'lr_schedule': none; use constant")
        if self.lr_schedule == "none" and self.policy is not None:
            raise ValueError("'policy' has no say in rates with 'lr_schedule': none; use constant")
        if self.lr_schedule in ("constant", "none") and self.min_lr is not None:
            raise ValueError(f"'min_lr' has no effect with 'lr_schedule': {self.lr_schedule}")
        if self.warmup_steps > self.steps:
            raise ValueError(
                f"'warmup_steps' must be at most 'steps'; {self.warmup_steps} is more than "
                f"{self.steps}"
            )
        if self.activation_checkpoint_threshold is not None and not self.activation_checkpointing:
            raise ValueError(
                "'activation_checkpoint_threshold' has no effect without 'activation_checkpointing'"
            )

    @property
    def order(self) -> Literal["random", "sequential"]:
        """The order in which samples are read."""
        return "sequential" if self.preserve_state else "random"

    def validate_in_run(self, run: RunConfig, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """Options that ``run`` refuses, or in which they do nothing; see
        ``arb_ternary.optim.protocol.Planned``.
        """
        return loop_contradictions(self, run, planned)


@frozen(kw_only=True)
class StandardConfig(LoopOptions):
    """Options of the phase ``standard``."""

    log_every: int = option(
        10, "steps between lines on the screen; the metrics file has every step", validator=positive
    )
    eval_every: int = option(200, EVAL_EVERY, validator=non_negative)
    eval_batches: int | None = option(
        8,
        "batches of validation tokens in such an evaluation; null = all",
        validator=optional(positive),
    )
    init_from: str | None = option(
        None,
        "run directory or checkpoint whose weights the phase starts from; null = the model as it "
        "is",
    )
    init_skip: tuple[str, ...] | None = option(
        None,
        "what init_from does not give: patterns of names of modules or tensors, such as head, that "
        "stay as they are and may have other shapes; null = it gives all",
        validator=optional(_patterns),
        converter=optional_converter(tuple),
    )

    batch_doublings: tuple[float, ...] | None = option(
        None,
        "shares of the steps, such as 0.5 for the middle: from each of them on a micro-batch has "
        "twice the samples; null = all have batch_size",
        validator=optional(_shares),
        converter=optional_converter(tuple),
    )

    def validate_in_run(self, run: RunConfig, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """See :class:`LoopOptions`."""
        yield from super().validate_in_run(run, planned)
        if self.batch_doublings is not None and self.preserve_state:
            yield (
                "batch_doublings",
                "does not go with preserve_state, which reads each row of a batch as one "
                "continuous text; leave one of them out",
            )

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.init_skip is not None and self.init_from is None:
            raise ValueError("'init_skip' has no effect without 'init_from'")


def loop_contradictions(
    options: Any, run: RunConfig, planned: Planned | None
) -> Iterator[tuple[str, str]]:
    """Option and what is wrong with it, for the ``options`` of any phase that has those of
    :class:`LoopOptions`.
    """
    if planned is not None and "float" not in planned.kinds:
        yield from without_effect(
            options, "the model has no float parameters", "lr", "min_lr", "grad_clip"
        )
    elif options.min_lr is not None and planned is not None and planned.kinds == {"float"}:
        yield from without_effect(
            options, "'min_lr' says where the rate of float parameters ends", "min_rate"
        )
    if options.lr_schedule in ("constant", "none"):
        reason = f"no rate falls with 'lr_schedule': {options.lr_schedule}"
        yield from without_effect(options, reason, "min_rate")
    if options.lr is not None:
        yield from _second_rates(run.optimizer, options.lr)
    if options.grad_clip is not None and getattr(run.optimizer.options, "defers", False):
        text = (
            f"{run.optimizer.name!r} decides over sums of several gradients, and clipping would "
            "act on a partial sum"
        )
        yield "grad_clip", text
    if getattr(options, "eval_every", 1) == 0:
        yield from without_effect(options, "'eval_every': 0 evaluates never", "eval_batches")
    yield from _number_formats(options, run, planned)
    if run.device == "cpu":
        yield from without_effect(options, "batches stay on the cpu", "pin_memory")
    sized = getattr(run.data.options, "sized_samples", False)
    if sized:
        reason = f"the samples of the data {run.data.name!r} have a size of their own"
        yield from without_effect(options, reason, "block_size")
    model = run.model.options
    longest = getattr(model, "max_length", None)
    window = getattr(model, "sliding_window", None)
    if longest is not None and window is None and not sized and options.block_size > longest:
        yield (
            "block_size",
            f"{options.block_size} exceeds the context of the model: max_length is {longest}",
        )
    if getattr(options, "preserve_state", False) and getattr(model, "causal", True) is False:
        yield (
            "preserve_state",
            "the model is not causal, and keeps nothing of earlier batches; set causal to true",
        )


def _number_formats(
    options: Any, run: RunConfig, planned: Planned | None
) -> Iterator[tuple[str, str]]:
    on_cuda = run.device.startswith("cuda")
    if not options.use_amp:
        yield from without_effect(options, "'use_amp' is false", "amp_dtype")
    elif options.amp_dtype == "float16" and not on_cuda:
        yield (
            "amp_dtype",
            f"float16 needs loss scaling, which works on cuda, not on {run.device}; use bfloat16",
        )
    elif options.amp_dtype == "float16" and planned is not None and planned.kinds - {"float"}:
        yield (
            "amp_dtype",
            "float16 scales the loss, and votes are cast before a step can be rejected; use "
            "bfloat16",
        )
    if getattr(options, "dtype", "float32") == "float16" and run.device == "cpu":
        yield "dtype", "float16 training does not work on cpu; use bfloat16 or float32"


def _second_rates(optimizer: Choice[OptimizerSpec], lr: float) -> Iterator[tuple[str, str]]:
    """A rate of float parameters beside ``lr`` in the optimizer that trains them."""
    names = (
        [field.name for field in attrs.fields(type(optimizer.options))]
        if optimizer.options is not None
        else []
    )
    nested = [
        value for name in names if isinstance(value := getattr(optimizer.options, name), Choice)
    ]
    for choice in nested:
        yield from _second_rates(choice, lr)
    if "float" in optimizer.spec.accepts and not nested and "lr" in optimizer.given:
        own = f"{optimizer.options.lr} in the optimizer {optimizer.name!r}"
        yield (
            "lr",
            f"the rate of float parameters is given twice: {lr} here, and {own}; keep one of them",
        )
