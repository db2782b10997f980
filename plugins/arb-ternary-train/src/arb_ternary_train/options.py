"""Options of training on batches: of every phase that does so, and of the phase ``standard``.

Each option is declared once, in :class:`LoopOptions`. A config class of another phase inherits from
it. One that needs only some of the options, or other defaults, declares them by
:func:`loop_option`::

    @frozen(kw_only=True)
    class DistillConfig:
        batch_size: int = loop_option("batch_size", 32)
        lr: float | None = loop_option("lr")
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
from attrs import frozen
from attrs.converters import optional as optional_converter

from arb_ternary.config.choice import Choice
from arb_ternary.config.options import (
    HELP,
    Condition,
    Rule,
    fraction,
    non_negative,
    option,
    optional,
    positive,
    trains,
    unless,
    when,
)
from arb_ternary.optim.protocol import Planned
from arb_ternary.specs import OptimizerSpec, PolicySpec
from arb_ternary_train.openmp import MAX_THREADS
from arb_ternary_train.schedules import SCHEDULES, ScheduleName

if TYPE_CHECKING:
    from arb_ternary_train.config import RunConfig

DtypeName = Literal["float32", "bfloat16", "float16"]
AmpName = Literal["bfloat16", "float16"]

#: Micro-batches per step. Each has random numbers of its own for its votes: 2**20 casts, 256 per
#: micro-batch.
step_size: Final = Rule(
    "1 to 4096", lambda value: 1 <= value <= 4096, {"minimum": 1, "maximum": 4096}
)
_shares: Final = Rule(
    "a list of shares between 0 and 1, at least one",
    lambda value: len(value) > 0 and all(0 < share < 1 for share in value),
    {"minItems": 1, "items": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}},
)
_patterns: Final = Rule(
    "a list of at least one pattern", lambda value: len(value) > 0 and all(value), {"minItems": 1}
)
_factors: Final = Rule(
    "factors greater than 0 by patterns of names; what is not to learn belongs into 'freeze'",
    lambda value: bool(value) and all(0 < factor < math.inf for factor in value.values()),
    {"minProperties": 1, "additionalProperties": {"exclusiveMinimum": 0}},
)


# --- when options do something


def _min_rate_is_used(options: Any, run: Any, plan: Planned | None) -> bool:
    """Return whether a rate that is trained ends at ``min_rate``."""
    only_floats = plan is not None and plan.kinds == {"float"}
    return options.min_lr is None or not only_floats


def _is_on_accelerator(options: Any, run: Any, plan: Any) -> bool:
    return run is None or run.device != "cpu"


def _has_block_size(options: Any, run: Any, plan: Any) -> bool:
    return run is None or not getattr(run.data.options, "sized_samples", False)


_HAS_FLOATS: Final = trains("float", reason="the model has no float parameters")
_RATE_FALLS: Final = unless("lr_schedule", "constant", "none")
_EVALUATES: Final = when("eval_every", reason="no evaluation is made with 'eval_every': 0")


@frozen(kw_only=True, slots=False)  # a phase may have a second base class, with slots
class LoopOptions:
    """Options of a training loop, and how often a phase reports and evaluates.

    A batch has ``batch_size`` samples of ``block_size`` predictions each.
    """

    steps: int = option(1000, "optimizer steps", validator=positive)
    batch_size: int = option(16, "samples per micro-batch", validator=positive)
    block_size: int = option(
        128,
        "predictions per sample, in tokens",
        validator=positive,
        active_when=Condition(_has_block_size, "the samples of the data have a size of their own"),
    )
    lr: float | None = option(
        None,
        "peak learning rate of float parameters; null = the optimizer's own",
        validator=optional(positive),
        active_when=_HAS_FLOATS,
    )
    min_lr: float | None = option(
        None,
        "learning rate of float parameters at the last step; null = min_rate times the peak",
        validator=optional(non_negative),
        active_when=(_HAS_FLOATS, _RATE_FALLS),
    )
    min_rate: float = option(
        0.05,
        "rate of ternary modules at the last step, as a fraction of their own",
        validator=fraction,
        active_when=(
            Condition(_min_rate_is_used, "'min_lr' says where the rate of float parameters ends"),
            _RATE_FALLS,
        ),
    )
    warmup_steps: int = option(
        0,
        "steps over which rates rise linearly to their peak; all steps if there are fewer",
        validator=non_negative,
        active_when=unless("lr_schedule", "none"),
    )
    lr_schedule: ScheduleName = option(
        "cosine",
        f"how rates fall after the warm-up: {', '.join(SCHEDULES[:-1])}; none = rates are not set",
    )
    grad_clip: float | None = option(
        None,
        "largest norm of the gradient of all float parameters together; null = any",
        validator=optional(positive),
        active_when=_HAS_FLOATS,
    )
    gradient_accumulation_steps: int = option(
        1,
        "micro-batches per step, which is that of one batch: each is weighted by its predictions; "
        "votes are cast once for each",
        validator=step_size,
    )
    use_amp: bool = option(False, "run the forward pass under torch.autocast")
    amp_dtype: AmpName = option(
        "bfloat16",
        "number format of autocast; float16 only on cuda and without ternary modules",
        active_when=when("use_amp"),
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
        active_when=when("activation_checkpointing"),
    )
    preserve_state: bool = option(
        False,
        "read each row as one continuous text and keep what the model remembers of it from batch "
        "to batch",
    )
    num_workers: int = option(
        0,
        "threads that read batches ahead; 0 = none",
        validator=non_negative,
        largest=MAX_THREADS,
    )
    pin_memory: bool = option(
        False,
        "page-locked memory for batches on their way to an accelerator",
        active_when=Condition(_is_on_accelerator, "batches stay on the cpu"),
    )
    max_skipped: int = option(
        100,
        "give up after this number of micro-batches in a row without a finite loss",
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
        "factors on the rates of ternary modules and float parameters, by such patterns; if "
        "several name a part, all count; null = none",
        validator=optional(_factors),
    )
    policy: Choice[PolicySpec] | None = option(
        None,
        "what decides, step by step, how the loop continues, and may change optimizer and rates; "
        "null = nothing",
    )
    log_every: int = option(
        10, "steps between lines on the screen; the metrics file has every step", validator=positive
    )
    eval_every: int = option(
        200,
        "steps between evaluations; the one at the end of the run takes no more tokens than it was "
        "trained on, and 16,384 at least; 0 = never, not at the end either",
        validator=non_negative,
    )
    eval_batches: int | None = option(
        8,
        "batches of validation tokens in such an evaluation; null = all",
        validator=optional(positive),
        active_when=_EVALUATES,
    )

    def __attrs_post_init__(self) -> None:
        if self.lr_schedule == "none" and self.policy is not None:
            raise ValueError(
                "'policy' cannot change rates with 'lr_schedule': none, which does not set them; "
                "use constant"
            )

    @property
    def order(self) -> Literal["random", "sequential"]:
        """The order in which samples are read."""
        return "sequential" if self.preserve_state else "random"

    def validate_in_run(self, run: RunConfig, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """Yield the options that do not go with ``run``; see ``Planned``."""
        if self.lr is not None:
            yield from _second_rates(run.optimizer, self.lr)
        if self.grad_clip is not None and getattr(run.optimizer.options, "defers", False):
            yield (
                "grad_clip",
                f"{run.optimizer.name!r} decides over sums of several gradients, and clipping "
                "would act on a partial sum",
            )
        yield from _number_formats(self, run, planned)

        model = run.model.options
        longest: Any = getattr(model, "max_length", None)
        limited = longest is not None and getattr(model, "sliding_window", None) is None
        if limited and _has_block_size(self, run, planned) and self.block_size > longest:
            yield (
                "block_size",
                f"{self.block_size} exceeds the context of the model: max_length is {longest}",
            )
        if self.preserve_state and getattr(model, "causal", True) is False:
            yield (
                "preserve_state",
                "the model is not causal, and keeps nothing of earlier batches; set causal to true",
            )


@frozen(kw_only=True)
class StandardConfig(LoopOptions):
    """Options of the phase ``standard``."""

    init_from: str | None = option(
        None,
        "run directory or checkpoint whose weights the phase starts from; null = the model as it "
        "is",
    )
    init_skip: tuple[str, ...] | None = option(
        None,
        "what is not taken from init_from: patterns of names of modules or tensors, such as head, "
        "that stay as they are and may have other shapes; null = everything is taken",
        validator=optional(_patterns),
        converter=optional_converter(tuple),
        active_when=when("init_from"),
    )
    batch_doublings: tuple[float, ...] | None = option(
        None,
        "shares of the steps, such as 0.5 for the middle, from each of which on a micro-batch has "
        "twice the samples; null = all have batch_size",
        validator=optional(_shares),
        converter=optional_converter(tuple),
    )

    def validate_in_run(self, run: RunConfig, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """Yield the options that do not go with ``run``; see ``Planned``."""
        yield from super().validate_in_run(run, planned)
        if self.batch_doublings is not None and self.preserve_state:
            yield (
                "batch_doublings",
                "does not go with preserve_state, which reads each row of a batch as one "
                "continuous text; leave one of them out",
            )


def loop_option(name: str, default: Any = attrs.NOTHING, help: str = "") -> Any:  # noqa: A002
    """Declare the option ``name`` of :class:`LoopOptions` in another config class.

    Type, validator and conditions are those of :class:`LoopOptions`.

    Args:
        name: the option.
        default: another default.
        help: another help text.
    """
    declared = attrs.fields_dict(LoopOptions)[name]
    metadata = dict(declared.metadata)
    if help:
        metadata[HELP] = help
    return attrs.field(
        default=declared.default if default is attrs.NOTHING else default,
        validator=declared.validator,
        converter=declared.converter,
        metadata=metadata,
    )


def _number_formats(
    options: LoopOptions, run: RunConfig, planned: Planned | None
) -> Iterator[tuple[str, str]]:
    """Yield the number formats that device or model do not support."""
    if options.use_amp and options.amp_dtype == "float16":
        if not run.device.startswith("cuda"):
            yield (
                "amp_dtype",
                f"float16 needs loss scaling, which works on cuda, not on {run.device}; use "
                "bfloat16",
            )
        elif planned is not None and planned.kinds - {"float"}:
            yield (
                "amp_dtype",
                "float16 scales the loss, and votes are cast before a step can be rejected; use "
                "bfloat16",
            )
    if options.dtype == "float16" and run.device == "cpu":
        yield "dtype", "float16 training does not work on cpu; use bfloat16 or float32"


def _second_rates(optimizer: Choice[OptimizerSpec], lr: float) -> Iterator[tuple[str, str]]:
    """Yield a fault for ``lr`` if the optimizer of float parameters is given a rate as well."""
    nested: list[Choice[OptimizerSpec]] = []
    if optimizer.options is not None:
        for field in attrs.fields(type(optimizer.options)):
            value = getattr(optimizer.options, field.name)
            if isinstance(value, Choice):
                nested.append(value)
    for choice in nested:
        yield from _second_rates(choice, lr)
    if "float" in optimizer.spec.accepts and not nested and "lr" in optimizer.given:
        own = f"{optimizer.options.lr} in the optimizer {optimizer.name!r}"
        yield (
            "lr",
            f"the rate of float parameters is given twice: {lr} here, and {own}; keep one of them",
        )
