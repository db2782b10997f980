"""Options of the phase ``progressive``."""

from __future__ import annotations

# ruff: noqa: RUF009  # loop_option makes attrs fields
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from arb_ternary.config.choice import Choice
from arb_ternary.config.fields import without_effect
from arb_ternary.config.options import option, optional, positive
from arb_ternary.optim.protocol import Planned
from arb_ternary.specs import PolicySpec, TrainedPart
from arb_ternary_progressive.growth_config import GrowthConfig
from arb_ternary_progressive.time import time_step_for_stack
from arb_ternary_text.models.config import DecoderConfig, FloatPart
from arb_ternary_train.options import (
    AmpName,
    LoopOptions,
    loop_option,
    validate_loop_options,
)
from arb_ternary_train.schedules import SCHEDULES, ScheduleName

if TYPE_CHECKING:
    from arb_ternary_train.config import RunConfig


def block_options(options: Any) -> DecoderConfig | None:
    """The options of the blocks of a model with ``options``: those of a decoder, or the ``decoder``
    in them.
    """
    found = options if isinstance(options, DecoderConfig) else getattr(options, "decoder", None)
    return found if isinstance(found, DecoderConfig) else None


@frozen(kw_only=True)
class ProgressivePhaseConfig(GrowthConfig):
    """Options of the phase ``progressive``: how the model grows, and how each stack is trained."""

    target_stacks: int = option(4, "stacks of the finished model", validator=positive)
    epochs_per_stack: int | None = option(
        None,
        "passes over the training text for each stack; null = 1, or steps_per_stack",
        validator=optional(positive),
    )
    steps_per_stack: int | None = option(
        None,
        "optimizer steps for each stack; null = epochs_per_stack",
        validator=optional(positive),
    )
    train_first: bool = option(
        True, "train the stack that the model begins with; false = it is the trunk, as it stands"
    )

    batch_size: int = loop_option("batch_size")
    block_size: int = loop_option("block_size")
    lr: float | None = loop_option("lr")
    min_lr: float | None = loop_option("min_lr")
    min_rate: float = loop_option("min_rate")
    warmup_steps: int = loop_option(
        "warmup_steps", help="steps over which rates rise linearly to their peak, for each stack"
    )
    lr_schedule: ScheduleName = loop_option(
        "lr_schedule",
        help=f"how rates fall after the warm-up, for each stack: {', '.join(SCHEDULES[:-1])}; "
        f"none = rates are not set",
    )
    grad_clip: float | None = loop_option("grad_clip")
    gradient_accumulation_steps: int = loop_option("gradient_accumulation_steps")
    use_amp: bool = loop_option("use_amp")
    amp_dtype: AmpName = loop_option("amp_dtype")
    activation_checkpointing: bool = loop_option("activation_checkpointing")
    activation_checkpoint_threshold: int | None = loop_option("activation_checkpoint_threshold")
    num_workers: int = loop_option("num_workers")
    pin_memory: bool = loop_option("pin_memory")
    max_skipped: int = loop_option("max_skipped")
    policy: Choice[PolicySpec] | None = loop_option("policy")

    log_every: int = loop_option("log_every")
    eval_every: int = loop_option("eval_every")
    eval_batches: int | None = loop_option("eval_batches")

    def __attrs_post_init__(self) -> None:
        if self.epochs_per_stack is not None and self.steps_per_stack is not None:
            raise ValueError(
                "'epochs_per_stack' has no effect beside 'steps_per_stack'; give one of them"
            )
        if self.target_stacks > self.max_stacks:
            raise ValueError(
                f"'target_stacks' must be at most 'max_stacks'; {self.target_stacks} is more than "
                f"{self.max_stacks}"
            )
        for key, message in self.contradictions():
            raise ValueError(f"'{key}': {message}")
        if self.qlora_strategy == "variable" and self.qlora_configs:
            first = 0 if self.qlora_enabled else 1
            for stack in range(first, self.target_stacks):
                if stack not in self.qlora_configs:
                    raise ValueError(
                        f"'qlora_configs' has no entry for stack {stack}, and qlora_strategy is "
                        f"variable"
                    )
        self.loop_options(self.steps_per_stack or max(1, self.warmup_steps))

    def unsupported_when_distributed(self) -> Iterator[tuple[str, str]]:
        """Yield each option that several processes cannot train, and why."""
        if self.cache_folder is not None:
            yield (
                "cache_folder",
                "several ranks would write to one folder; null = each caches in its memory",
            )

    @property
    def steps_of_loop(self) -> int | None:
        """See ``arb_ternary_train.capabilities.has_own_loops``."""
        return self.steps_per_stack

    def added_parts(self, *, followed: bool) -> frozenset[TrainedPart]:
        """See :class:`arb_ternary_train.capabilities.parts_added_by`.

        Without ``new_stack_precision`` a new stack has what the model has already.
        """
        adapters: TrainedPart = "ternary" if self.adapter_dtype == "ternary" else "float"
        found: set[TrainedPart] = {adapters} if self.qlora_enabled else set()
        if self.target_stacks > 1:
            stored: dict[str | None, TrainedPart] = {
                "full": "float",
                "half": "float",
                "bfloat16": "float",
                "ternary": "ternary",
                "qlora": adapters,
            }
            if self.new_stack_precision in stored:
                found.add(stored[self.new_stack_precision])
            # In a frozen trunk the second adapters learn only after the phase.
            if self.progressive_qlora and (
                self.trunk_strategy == "qlora" or not self.enabled or followed
            ):
                found.add(adapters)
        return frozenset(found)

    @property
    def trained_stacks(self) -> range:
        """The stacks that are trained where the model begins with one, in the order of building."""
        return range(0 if self.train_first else 1, self.target_stacks)

    def planned_in(self, run: RunConfig, planned: Planned) -> Planned:
        """What the phase trains of a model with the parts ``planned``, and what it leaves
        frozen.
        """
        grown = self.added_parts(followed=False)
        blocks = block_options(run.model.options)
        if blocks is not None:
            grown |= self._grown_kinds(blocks)
        frozen = self.added_parts(followed=True) - grown
        kinds = grown | (planned.kinds if self.train_first or not self.enabled else frozenset())
        return attrs.evolve(
            planned,
            kinds=kinds,
            idle=(planned.kinds | frozen) - kinds,
            matrices=planned.matrices or "float" in grown | frozen,
            exponents=planned.exponents or "ternary" in grown | frozen,
        )

    def _grown_kinds(self, model: DecoderConfig) -> set[TrainedPart]:
        """What learns in new stacks, adapters aside, and at the end of the model where they are
        put.
        """
        if self.target_stacks == 1:
            return set()

        def kind(part: FloatPart) -> TrainedPart:
            return "float" if part in model.float_parts else "ternary"

        found: set[TrainedPart] = set()
        precision = self.new_stack_precision or (
            "ternary" if kind("linears") == "ternary" else "full"
        )
        if precision == "ternary":
            found |= {"ternary", kind("norms")}
        elif precision not in ("nvfp4", "qlora"):
            found.add("float")
        if model.float_vectors and precision not in ("nvfp4", "qlora"):
            found.add("float")
        if self.building_mode == "append" and (model.learned_norms or "norms" in model.float_parts):
            found.add(kind("norms"))
        if not model.tied:
            found.add(kind("head" if self.building_mode == "append" else "embedding"))
        return found

    def validate_in_run(self, run: RunConfig, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        yield from validate_loop_options(self, run, planned)
        yield from self.idle_options()
        model = run.model
        if isinstance(model.options, DecoderConfig) and type(model.options) is not DecoderConfig:
            yield (
                "",
                f"stacks are made of the blocks of model decoder; model {model.name!r} has others",
            )
        yield from self._time_contradictions(run)
        before = [
            each.options for each in run.phases if isinstance(each.options, ProgressivePhaseConfig)
        ]
        there = max((each.target_stacks for each in before[: before.index(self)]), default=1)
        if there - int(self.train_first) >= self.target_stacks:
            text = (
                f"the model has {there} stacks already, so that there is nothing to train; ask "
                f"for more stacks"
            )
            yield "target_stacks", text if there > 1 else f"{text}, or set train_first to true"

    def _time_contradictions(self, run: RunConfig) -> Iterator[tuple[str, str]]:
        from arb_ternary_progressive.masking_config import TimeStepConfig

        masking = run.masking.options
        by_time = isinstance(masking, TimeStepConfig)
        if by_time and masking.num_time_steps != self.num_time_steps:
            yield (
                "num_time_steps",
                f"{self.num_time_steps} time steps, and masking {run.masking.name!r} hides by "
                f"{masking.num_time_steps}; give both the same number",
            )
        drawn = by_time and (masking.time_interpretation, masking.time_sampling) == (
            "input",
            "sample",
        )
        if self.time_interpretation == "input":
            if self.time_sampling == "sample" and not drawn:
                yield (
                    "time_sampling",
                    f"a time for each sample must come from the masking, and {run.masking.name!r} "
                    f"draws none; use "
                    "masking: {name: time_step, time_interpretation: input, time_sampling: "
                    "sample}, or batch",
                )
            reason = "time is an input ('time_interpretation': input)"
            yield from without_effect(
                self, reason, "stack_time_mapping", "time_per_stack", "custom_time_mapping"
            )
        elif self.stack_time_mapping == "exponential":
            count = self.target_stacks
            steps = self.num_time_steps
            linear, grown = (
                [
                    time_step_for_stack(i, final_depth=count, num_time_steps=steps, mapping=way)
                    for i in range(count)
                ]
                for way in ("linear", "exponential")
            )
            if linear == grown:
                reason = "every stack has the time step that linear gives it"
                yield from without_effect(self, reason, "stack_time_mapping")

    def loop_options(self, steps: int) -> LoopOptions:
        """The options of the training loop of one stack, of so many optimizer steps.

        Raises:
            ValueError: they contradict each other.
        """
        shared = {field.name for field in attrs.fields(ProgressivePhaseConfig)}
        known = {field.name for field in attrs.fields(LoopOptions)}
        return LoopOptions(steps=steps, **{name: getattr(self, name) for name in shared & known})
