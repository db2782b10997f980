"""Options of growing a model: of the phase ``progressive``, and of the guide's config.

:class:`GrowthConfig` declares the options that both have; the guide's config is in
``stackwise``. Nothing here imports torch.
"""

from __future__ import annotations

# ruff: noqa: RUF009  # loop_option makes attrs fields
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import attrs
from attrs import define, frozen
from attrs.validators import instance_of, optional

from arb_ternary.config.options import (
    LARGEST_FLOAT,
    LARGEST_INT64,
    Condition,
    Rule,
    one_of,
    option,
    unless,
    when,
    whole,
)
from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import Planned
from arb_ternary.specs import TrainedPart
from arb_ternary_progressive.time import TimeMapping, time_step_for_stack
from arb_ternary_text.models.config import MAX_LAYERS, DecoderConfig, FloatPart
from arb_ternary_train.options import DtypeName, LoopOptions, loop_option
from arb_ternary_train.schedules import SCHEDULES, ScheduleName

if TYPE_CHECKING:
    from arb_ternary_train.config import RunConfig

Precision: TypeAlias = Literal["full", "half", "bfloat16", "nvfp4", "ternary", "qlora"]
Base: TypeAlias = Literal["nvfp4", "ternary"]
AdapterDtype: TypeAlias = Literal["float32", "bfloat16", "float16", "ternary"]
Pattern: TypeAlias = Literal["constant", "increasing", "decreasing", "linear"]
AdapterStrategy: TypeAlias = Literal["simplified", "progressive", "variable"]
TrunkStrategy: TypeAlias = Literal["frozen", "qlora"]
BuildingMode: TypeAlias = Literal["append", "prepend"]
CacheDtype: TypeAlias = Literal["float32", "bfloat16", "int8"]
TimeInterpretation: TypeAlias = Literal["input", "depth"]
TimeEncoding: TypeAlias = Literal["sinusoidal", "learned"]
TimeSampling: TypeAlias = Literal["batch", "sample"]

#: Formats that a stack can be stored in.
PRECISIONS: Final[tuple[Precision, ...]] = get_args(Precision)
#: Added by the pattern ``linear`` per stack.
LINEAR_STEP: Final = 8
#: Most features of an adapter or a time embedding.
_MOST_FEATURES: Final = 2**16
#: Most time steps: each may have an embedding.
MAX_TIME_STEPS: Final = 2**16

at_least_one = whole(1)
above_zero = Rule(
    "a number greater than 0",
    lambda value: type(value) in (int, float) and 0 < value < float("inf"),
    {"exclusiveMinimum": 0},
)
boolean = instance_of(bool)


def among(literal: Any) -> Rule:
    """Return the rule that a value is one of those of a ``Literal`` type.

    Files are checked by the type alone; the rule checks what Python code assigns.
    """
    return one_of(*get_args(literal))


_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def _names_function(value: Any) -> bool:
    return callable(value) or (isinstance(value, str) and _TARGET.fullmatch(value) is not None)


_is_function = Rule(
    "a function, or its name as module:function",
    _names_function,
    {"type": "string", "pattern": f"^(?:{_TARGET.pattern})$"},
)


# --- when options take effect


def _of_planned_stacks(holds: Callable[[Any], bool], reason: str) -> Condition:
    """Return a condition on the stacks that a phase makes.

    Outside a run it always holds: a builder may be asked for stacks of another precision, with
    other adapters or at another end than the config says.
    """
    return Condition(lambda options, run, plan: run is None or holds(options), reason)


def _differs_from_linear(options: Any) -> bool:
    if options.stack_time_mapping != "exponential":
        return True

    def steps(mapping: TimeMapping) -> list[int]:
        count = options.target_stacks
        return [
            time_step_for_stack(
                stack, final_depth=count, num_time_steps=options.num_time_steps, mapping=mapping
            )
            for stack in range(count)
        ]

    return steps("linear") != steps("exponential")


_grows = when("enabled", reason="all stacks are trained together ('enabled' is false)")
_cacheable = (
    _grows,
    unless(
        "trunk_strategy",
        "qlora",
        reason="the trunk changes with every step ('trunk_strategy' is qlora)",
    ),
    _of_planned_stacks(
        lambda options: options.building_mode == "append",
        "the trunk runs on what the new stack makes ('building_mode' is prepend)",
    ),
)
_caches = (*_cacheable, when("cache_activations"))
_stack_adapters = _of_planned_stacks(
    lambda options: options.has_stack_adapters, "no stack is made with an adapter"
)
_any_adapters = _of_planned_stacks(
    lambda options: options.has_stack_adapters or options.progressive_qlora,
    "no stack gets an adapter",
)
_same_size_rule = (unless("qlora_strategy", "variable"), _stack_adapters)
_pattern_rule = (when("qlora_strategy", "progressive"), _stack_adapters)
_second_adapters = when("progressive_qlora")
_time_is_input = when(
    "time_interpretation",
    "input",
    reason="time is the place of a stack ('time_interpretation': depth)",
)
_time_is_depth = _of_planned_stacks(
    lambda options: options.time_interpretation == "depth",
    "time is an input ('time_interpretation': input)",
)
#: Condition of the number of epochs per stack, which a number of steps replaces.
counts_epochs: Final = when(
    "steps_per_stack", None, reason="'steps_per_stack' says how long a stack is trained"
)


# --- options


@define(kw_only=True)
class AdapterOptions:
    """Rank and alpha of the adapters of one stack."""

    rank: int = option(
        help="features between the two matrices", validator=at_least_one, largest=_MOST_FEATURES
    )
    alpha: float = option(
        help="the adapter's output is scaled by alpha / rank", validator=above_zero
    )


def _adapter_options(value: Any) -> Any:
    """Convert the entries of ``qlora_configs``, which may be plain mappings in Python."""
    if not isinstance(value, Mapping):
        return value
    converted = {}
    for stack, entry in value.items():
        if type(stack) is not int or stack < 0:
            raise ValueError(f"'qlora_configs' has the stack {stack!r}; stacks are numbered from 0")
        if isinstance(entry, Mapping) and set(entry) != {"rank", "alpha"}:
            raise ValueError(
                f"'qlora_configs' must have the keys rank and alpha for stack {stack}, not "
                f"{', '.join(map(str, entry)) or 'none'}"
            )
        converted[stack] = AdapterOptions(**entry) if isinstance(entry, Mapping) else entry
    return converted


@define(kw_only=True)
class GrowthConfig:
    """Options of the growth of a model: of the phase ``progressive`` and of
    ``training.progressive``.
    """

    enabled: bool = option(
        True,
        "false = all stacks are made at once and trained end to end, for as many steps",
        validator=boolean,
    )

    # --- stacks and trunk
    trunk_strategy: TrunkStrategy = option(
        "frozen",
        "what learns in the stacks of the trunk: nothing (frozen), or their adapters (qlora)",
        validator=among(TrunkStrategy),
        active_when=_grows,
    )
    new_stack_precision: Precision | None = option(
        None,
        "format of a new stack: full (float32), half (float16), bfloat16, nvfp4 (4 bits, frozen), "
        "ternary, qlora (frozen 4-bit or ternary base with adapters); null = ternary or full, like "
        "the linears of the model",
        validator=optional(among(Precision)),
    )
    blocks_per_stack: int | None = option(
        None,
        "blocks of a new stack; null = as many as the first stack has",
        validator=optional(at_least_one),
        largest=MAX_LAYERS,
    )
    max_stacks: int = option(
        12, "most stacks of a rack", validator=at_least_one, largest=MAX_LAYERS
    )
    building_mode: BuildingMode = option(
        "append",
        "where a new stack goes: after the trunk or before it",
        validator=among(BuildingMode),
    )
    zero_residual: bool = option(
        True,
        "a new stack starts as the identity, so that the loss does not jump",
        validator=boolean,
    )

    # --- adapters
    qlora_enabled: bool = option(False, "every stack is made with an adapter", validator=boolean)
    qlora_rank: int = option(
        16,
        "rank of a stack's adapter",
        validator=at_least_one,
        active_when=_same_size_rule,
        largest=_MOST_FEATURES,
    )
    qlora_alpha: float = option(
        32.0, "alpha of a stack's adapter", validator=above_zero, active_when=_same_size_rule
    )
    qlora_strategy: AdapterStrategy = option(
        "simplified",
        "rank and alpha of the stacks: the same for all, by the patterns, or from qlora_configs",
        validator=among(AdapterStrategy),
        active_when=_stack_adapters,
    )
    qlora_rank_pattern: Pattern = option(
        "increasing",
        "rank of stack i with strategy progressive: constant, increasing (rank 2^i), decreasing "
        "(rank // 2^i, at least 1), linear (rank + 8 i)",
        validator=among(Pattern),
        active_when=_pattern_rule,
    )
    qlora_alpha_pattern: Pattern = option(
        "constant",
        "alpha of stack i with strategy progressive, like the rank",
        validator=among(Pattern),
        active_when=_pattern_rule,
    )
    qlora_configs: dict[int, AdapterOptions] | None = option(
        None,
        "rank and alpha by stack, with strategy variable",
        converter=_adapter_options,
        active_when=when("qlora_strategy", "variable"),
    )
    qlora_base: Base = option(
        "nvfp4",
        "the frozen base of a stack of precision qlora",
        validator=among(Base),
        active_when=_of_planned_stacks(
            lambda options: options.new_stack_precision == "qlora", "no stack is of precision qlora"
        ),
    )
    progressive_qlora: bool = option(
        False,
        "every stack of the trunk gets a second adapter when a new stack is added",
        validator=boolean,
    )
    progressive_qlora_rank: int = option(
        8,
        "rank of the second adapter",
        validator=at_least_one,
        active_when=_second_adapters,
        largest=_MOST_FEATURES,
    )
    progressive_qlora_alpha: float = option(
        16.0, "alpha of the second adapter", validator=above_zero, active_when=_second_adapters
    )
    adapter_dtype: AdapterDtype = option(
        "float32",
        "number format of adapters",
        validator=among(AdapterDtype),
        active_when=_any_adapters,
    )

    # --- activation cache
    cache_activations: bool = option(
        True,
        "keep the hidden states that a frozen trunk computes",
        validator=boolean,
        active_when=_cacheable,
    )
    cache_bytes: int = option(
        1 << 30,
        "most bytes of the cache",
        validator=at_least_one,
        active_when=_caches,
        largest=LARGEST_INT64,
    )
    cache_folder: str | None = option(
        None, "folder of the cache on disk; null = in memory", active_when=_caches
    )
    cache_dtype: CacheDtype = option(
        "float32",
        "number format of the hidden states that a frozen trunk passes to the new stack in "
        "training, with the cache and without",
        validator=among(CacheDtype),
        active_when=_cacheable,
    )

    # --- time
    time_interpretation: TimeInterpretation = option(
        "depth",
        "time is an input of the model, or the place of a stack",
        validator=among(TimeInterpretation),
    )
    time_embedding_dim: int = option(
        512,
        "features of a time embedding, for time as input",
        validator=at_least_one,
        active_when=_time_is_input,
        largest=_MOST_FEATURES,
    )
    time_encoding_type: TimeEncoding = option(
        "sinusoidal",
        "how time is embedded, for time as input",
        validator=among(TimeEncoding),
        active_when=_time_is_input,
    )
    time_sampling: TimeSampling = option(
        "batch",
        "draw one time per batch or one per sample, for time as input",
        validator=among(TimeSampling),
        active_when=_time_is_input,
    )
    stack_time_mapping: TimeMapping = option(
        "linear",
        "the time step of a stack, for time as depth",
        validator=among(TimeMapping),
        active_when=(
            _time_is_depth,
            _of_planned_stacks(
                _differs_from_linear, "every stack has the same time step as with linear"
            ),
        ),
    )
    custom_time_mapping: Any = option(
        None,
        "with stack_time_mapping custom: f(stack_idx, max_stacks, num_time_steps), or its name as "
        "module:function",
        validator=optional(_is_function),
        active_when=(when("stack_time_mapping", "custom"), _time_is_depth),
    )
    time_per_stack: int = option(
        100,
        "time steps that a stack covers",
        validator=at_least_one,
        active_when=(
            when(
                "stack_time_mapping",
                "time_per_stack",
                reason="it belongs to 'stack_time_mapping': time_per_stack, and the mapping is "
                "another",
            ),
            _time_is_depth,
        ),
    )
    num_time_steps: int = option(
        8, "number of time steps", validator=at_least_one, largest=MAX_TIME_STEPS
    )

    @property
    def has_stack_adapters(self) -> bool:
        """Whether new stacks are made with adapters."""
        return self.qlora_enabled or self.new_stack_precision == "qlora"

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each option that contradicts another, and what is wrong."""
        has_any = self.has_stack_adapters or self.progressive_qlora
        if self.trunk_strategy == "qlora" and not has_any:
            yield (
                "trunk_strategy",
                "qlora trains the adapters of the trunk, and there are none; set qlora_enabled or "
                "progressive_qlora to true",
            )
        if self.new_stack_precision == "nvfp4" and not self.qlora_enabled:
            yield (
                "new_stack_precision",
                "nvfp4 cannot learn without adapters; use qlora, or set qlora_enabled to true",
            )
        variable = self.qlora_strategy == "variable"
        if variable and self.has_stack_adapters and not self.qlora_configs:
            yield (
                "qlora_configs",
                "qlora_strategy variable needs the rank and alpha of every stack",
            )
        if self.stack_time_mapping == "custom" and self.custom_time_mapping is None:
            yield "custom_time_mapping", "stack_time_mapping custom needs a function"
        sinusoidal = self.time_encoding_type == "sinusoidal"
        if self.time_interpretation == "input" and sinusoidal and self.time_embedding_dim % 2:
            yield (
                "time_embedding_dim",
                f"must be even for sinusoidal encoding, not {self.time_embedding_dim}",
            )

    def time_step(self, stack: int, final_depth: int) -> int:
        """Return the time step of stack ``stack``, in the order of building.

        Args:
            stack: index of the stack.
            final_depth: stacks of the finished rack.

        Raises:
            UsageProblem: there is no such stack.
            ConfigError: a custom mapping cannot be used.
        """
        return time_step_for_stack(
            stack,
            final_depth=final_depth,
            num_time_steps=self.num_time_steps,
            mapping=self.stack_time_mapping,
            custom=self.custom_time_mapping,
            time_per_stack=self.time_per_stack,
            max_stacks=self.max_stacks,
        )

    def adapter_size(self, stack: int) -> tuple[int, float]:
        """Return rank and alpha of the adapters that stack ``stack`` is made with.

        Raises:
            ConfigError: the strategy is ``variable`` and the stack has no entry.
        """
        if self.qlora_strategy == "simplified":
            return self.qlora_rank, self.qlora_alpha
        if self.qlora_strategy == "progressive":
            rank = pattern_value(self.qlora_rank, self.qlora_rank_pattern, stack)
            return int(rank), pattern_value(self.qlora_alpha, self.qlora_alpha_pattern, stack)
        entry = (self.qlora_configs or {}).get(stack)
        if entry is None:
            raise ConfigError(
                f"qlora_configs: there is no entry for stack {stack}",
                "With qlora_strategy variable every stack needs its own rank and alpha.",
            )
        return entry.rank, entry.alpha


def pattern_value(base: float, pattern: Pattern, stack: int) -> float:
    """Return the value of stack ``stack`` (0, 1, ...) in a pattern that starts at ``base``.

    ``increasing`` is ``base 2^i``, ``decreasing`` is ``base // 2^i`` (at least 1), ``linear`` is
    ``base + 8 i``. Whole numbers stay whole.
    """
    if pattern == "increasing":
        return base * (1 << stack)
    if pattern == "decreasing":
        return max(base // (1 << stack), 1)
    if pattern == "linear":
        return base + LINEAR_STEP * stack
    return base


def not_an_option(value: Any) -> Any:
    """Fix an option of :class:`LoopOptions`: no config can set it."""
    return attrs.field(init=False, default=value)


def block_options(options: Any) -> DecoderConfig | None:
    """Return the options of the blocks of a model.

    They are ``options`` themselves for a decoder, and their ``decoder`` for other models; None if
    the model has no such blocks.
    """
    found = options if isinstance(options, DecoderConfig) else getattr(options, "decoder", None)
    return found if isinstance(found, DecoderConfig) else None


@frozen(kw_only=True)
class ProgressivePhaseConfig(GrowthConfig, LoopOptions):
    """Options of the phase ``progressive``: how the model grows and how each stack is trained."""

    target_stacks: int = option(
        4, "stacks of the finished model", validator=at_least_one, largest=MAX_LAYERS
    )
    epochs_per_stack: int | None = option(
        None,
        "passes over the training text for each stack; null = 1, or steps_per_stack",
        validator=optional(at_least_one),
        active_when=counts_epochs,
    )
    steps_per_stack: int | None = option(
        None,
        "optimizer steps for each stack; null = epochs_per_stack",
        validator=optional(at_least_one),
    )
    train_first: bool = option(
        True, "train the stack that the model begins with; false = it is the trunk, unchanged"
    )
    warmup_steps: int = loop_option(
        "warmup_steps", help="steps over which rates rise linearly to their peak, for each stack"
    )
    lr_schedule: ScheduleName = loop_option(
        "lr_schedule",
        help=f"how rates fall after the warm-up, for each stack: {', '.join(SCHEDULES[:-1])}; "
        "none = rates are not set",
    )

    # What a growing model has no use for, or steps_per_stack says.
    steps: int = not_an_option(1)
    dtype: DtypeName = not_an_option("float32")
    compile_model: bool = not_an_option(False)
    preserve_state: bool = not_an_option(False)
    freeze: tuple[str, ...] | None = not_an_option(None)
    rate_factors: dict[str, float] | None = not_an_option(None)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.target_stacks > self.max_stacks:
            raise ValueError(
                f"'target_stacks' must be at most 'max_stacks'; {self.target_stacks} is more than "
                f"{self.max_stacks}"
            )
        for key, message in self.contradictions():
            raise ValueError(f"'{key}': {message}")
        self._check_patterns()
        if self.qlora_strategy == "variable" and self.qlora_configs:
            first = 0 if self.qlora_enabled else 1
            for stack in range(first, self.target_stacks):
                if stack not in self.qlora_configs:
                    raise ValueError(
                        f"'qlora_configs' has no entry for stack {stack}, and qlora_strategy is "
                        "variable"
                    )

    def _check_patterns(self) -> None:
        """Check that patterns which double with each stack stay in the range of numbers.

        Raises:
            ValueError: one does not.
        """
        if not self.has_stack_adapters or self.qlora_strategy != "progressive":
            return
        last = self.target_stacks - 1
        limits = (
            ("qlora_rank", self.qlora_rank, self.qlora_rank_pattern, _MOST_FEATURES),
            ("qlora_alpha", self.qlora_alpha, self.qlora_alpha_pattern, LARGEST_FLOAT),
        )
        for key, base, pattern, largest in limits:
            if pattern == "increasing" and math.log2(base) + last > math.log2(largest):
                raise ValueError(
                    f"'{key}_pattern': increasing doubles {base} with each of {self.target_stacks} "
                    f"stacks, to more than {largest:g}; use linear, or fewer stacks"
                )

    def loop_options(self, steps: int) -> LoopOptions:
        """Return the options of the training loop of one stack, of ``steps`` steps."""
        names = {field.name for field in attrs.fields(LoopOptions)} - {"steps"}
        return LoopOptions(steps=steps, **{name: getattr(self, name) for name in names})

    @property
    def steps_of_loop(self) -> int | None:
        """See ``arb_ternary_train.capabilities.has_own_loops``."""
        return self.steps_per_stack

    @property
    def trained_stacks(self) -> range:
        """The stacks that are trained if the model begins with one, in the order of building."""
        return range(0 if self.train_first else 1, self.target_stacks)

    @property
    def draws_sample_times(self) -> bool:
        """Whether each sample has a time of its own."""
        return self.time_interpretation == "input" and self.time_sampling == "sample"

    # --- what the phase trains

    def added_parts(self, *, followed: bool) -> frozenset[TrainedPart]:
        """Return the kinds of parts that the phase adds and trains.

        See :func:`arb_ternary_train.capabilities.parts_added_by`. Without ``new_stack_precision`` a
        new stack has the kinds that the model has already.
        """
        adapters: TrainedPart = "ternary" if self.adapter_dtype == "ternary" else "float"
        found: set[TrainedPart] = set()
        if self.qlora_enabled:
            found.add(adapters)
        if self.target_stacks == 1:
            return frozenset(found)

        precision = self.new_stack_precision
        if precision == "qlora":
            found.add(adapters)
        elif precision == "ternary":
            found.add("ternary")
        elif precision in ("full", "half", "bfloat16"):
            found.add("float")

        # In a frozen trunk the second adapters learn only after the phase.
        trunk_learns = self.trunk_strategy == "qlora" or not self.enabled
        if self.progressive_qlora and (trunk_learns or followed):
            found.add(adapters)
        return frozenset(found)

    def planned_in(self, run: RunConfig, planned: Planned) -> Planned:
        """Return what the phase trains and leaves frozen in a model with the parts ``planned``."""
        grown = self.added_parts(followed=False)
        blocks = block_options(run.model.options)
        if blocks is not None:
            grown |= self._grown_kinds(blocks)
        kinds = grown
        if self.train_first or not self.enabled:
            kinds |= planned.kinds

        added_later = self.added_parts(followed=True) - grown
        added = grown | added_later
        return attrs.evolve(
            planned,
            kinds=kinds,
            idle=(planned.kinds | added_later) - kinds,
            matrices=planned.matrices or "float" in added,
            exponents=planned.exponents or "ternary" in added,
        )

    def _grown_kinds(self, model: DecoderConfig) -> set[TrainedPart]:
        """Return the kinds that learn in new stacks without their adapters, and beside them."""
        if self.target_stacks == 1:
            return set()

        def kind(part: FloatPart) -> TrainedPart:
            return "float" if part in model.float_parts else "ternary"

        precision = self.new_stack_precision
        if precision is None:
            precision = "ternary" if kind("linears") == "ternary" else "full"
        found: set[TrainedPart] = set()
        if precision == "ternary":
            found |= {"ternary", kind("norms")}
        elif precision not in ("nvfp4", "qlora"):
            found.add("float")
        if model.float_vectors and precision not in ("nvfp4", "qlora"):
            found.add("float")

        # The end of the model on the new stack's side learns with it.
        appends = self.building_mode == "append"
        if appends and (model.learned_norms or "norms" in model.float_parts):
            found.add(kind("norms"))
        if not model.tied:
            found.add(kind("head" if appends else "embedding"))
        return found

    # --- the run around it

    def unsupported_when_distributed(self) -> Iterator[tuple[str, str]]:
        """Yield each option that several processes cannot use, and why."""
        if self.cache_folder is not None:
            yield (
                "cache_folder",
                "several ranks would write to one folder; null = each caches in its memory",
            )

    def validate_in_run(self, run: RunConfig, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """Yield the options that do not go with ``run``; see ``Planned``."""
        yield from super().validate_in_run(run, planned)
        model = run.model
        if isinstance(model.options, DecoderConfig) and type(model.options) is not DecoderConfig:
            yield (
                "",
                f"stacks are made of the blocks of model decoder; model {model.name!r} has others",
            )
        yield from self._check_times(run)

        growing = [each for each in run.phases if isinstance(each.options, ProgressivePhaseConfig)]
        phases = [each.options for each in growing]
        before = phases[: phases.index(self)]
        there = max((each.target_stacks for each in before), default=1)
        if there - int(self.train_first) >= self.target_stacks:
            remedy = "ask for more stacks"
            if there == 1:
                remedy += ", or set train_first to true"
            yield (
                "target_stacks",
                f"the model has {there} stacks already, so there is nothing to train; {remedy}",
            )

    def _check_times(self, run: RunConfig) -> Iterator[tuple[str, str]]:
        """Yield the options of time that do not agree with those of the masking."""
        masking = run.masking.options
        steps = getattr(masking, "num_time_steps", None)
        if steps not in (None, self.num_time_steps):
            yield (
                "num_time_steps",
                f"{self.num_time_steps} time steps, and masking {run.masking.name!r} hides by "
                f"{steps}; give both the same number",
            )
        if self.draws_sample_times and not getattr(masking, "draws_sample_times", False):
            yield (
                "time_sampling",
                f"a time per sample must come from the masking, and {run.masking.name!r} draws "
                "none; use masking: {name: time_step, time_interpretation: input, time_sampling: "
                "sample}, or batch",
            )
