"""The config of progressive training in Python: model, training, and the section ``training.progressive``.

Unlike the configs of runs these can be changed after they were made, option by option; every assignment is checked as
the file was. What options say of each other is checked by :meth:`StackWiseConfig.validate`, which whoever uses the
config calls.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs
from attrs import define
from attrs.validators import instance_of, optional

from arb_ternary.config.errors import Fault, raise_faults
from arb_ternary.config.loading import load_as
from arb_ternary.config.options import Rule, one_of, option
from arb_ternary.errors import ConfigError, UsageProblem, nearest

if TYPE_CHECKING:
    from arb_ternary_text.models.config import DecoderConfig

__all__ = [
    "PRECISIONS",
    "AdapterDtype",
    "AdapterOptions",
    "ModelConfig",
    "Pattern",
    "Precision",
    "ProgressiveConfig",
    "StackWiseConfig",
    "TrainingConfig",
]

Precision: TypeAlias = Literal["full", "half", "bfloat16", "nvfp4", "ternary", "qlora"]
AdapterDtype: TypeAlias = Literal["float32", "bfloat16", "float16", "ternary"]
Pattern: TypeAlias = Literal["constant", "increasing", "decreasing", "linear"]

#: What a stack can be stored in.
PRECISIONS: tuple[Precision, ...] = ("full", "half", "bfloat16", "nvfp4", "ternary", "qlora")
_PATTERNS: tuple[Pattern, ...] = ("constant", "increasing", "decreasing", "linear")

_count = Rule("a whole number of at least 1", lambda value: type(value) is int and value >= 1, {"minimum": 1})
_natural = Rule("a whole number of at least 0", lambda value: type(value) is int and value >= 0, {"minimum": 0})
_amount = Rule(
    "a number greater than 0",
    lambda value: type(value) in (int, float) and 0 < value < float("inf"),
    {"exclusiveMinimum": 0},
)
_boolean = instance_of(bool)
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_is_function = Rule(
    "a function, or its name as module:function",
    lambda value: callable(value) or (isinstance(value, str) and _TARGET.fullmatch(value) is not None),
    {"type": "string", "pattern": f"^(?:{_TARGET.pattern})$"},
)


@define(kw_only=True)
class AdapterOptions:
    """Rank and alpha of one stack's adapters."""

    rank: int = option(help="features between the two matrices", validator=_count)
    alpha: float = option(help="the adapter's output is scaled by alpha / rank", validator=_amount)


def _adapter_options(value: Any) -> Any:
    """The entries of ``qlora_configs``, which in Python may be plain mappings."""
    if not isinstance(value, Mapping):
        return value
    known = [attribute.name for attribute in attrs.fields(AdapterOptions)]
    made = {}
    for stack, entry in value.items():
        if type(stack) is not int or stack < 0:
            raise ValueError(f"'qlora_configs' has the stack {stack!r}; stacks are numbered from 0")
        if isinstance(entry, Mapping):
            for key in entry:
                if key not in known:
                    close = nearest(str(key), known)
                    hint = f"; did you mean '{close}'?" if close else f"; the keys here are {', '.join(known)}"
                    raise ValueError(f"'qlora_configs' has the unknown key {key!r} for stack {stack}{hint}")
            if absent := [key for key in known if key not in entry]:
                raise ValueError(f"'qlora_configs' lacks {' and '.join(absent)} for stack {stack}")
        made[stack] = AdapterOptions(**entry) if isinstance(entry, Mapping) else entry
    return made


def _is_fractions(_instance: Any, attribute: Any, value: Any) -> None:
    if value is None:
        return
    from arb_ternary_progressive.time import check_fractions

    try:
        check_fractions(value)
    except ValueError as error:
        raise ValueError(f"'{attribute.name}' {error}") from error


@define(kw_only=True)
class ProgressiveConfig:
    """How a rack grows: the section ``training.progressive``."""

    enabled: bool = option(
        True, "false = all stacks are made at once and trained end to end, at equal steps", validator=_boolean
    )

    # --- stacks and trunk ---
    trunk_strategy: Literal["frozen", "qlora"] = option(
        "frozen",
        "what learns in the stacks that were there before: nothing, or their adapters",
        validator=one_of("frozen", "qlora"),
    )
    new_stack_precision: Precision = option(
        "full",
        "what a new stack is stored in: full (float32), half (float16), bfloat16, nvfp4 (4 bits, frozen), ternary, "
        "qlora (frozen 4-bit or ternary base with adapters)",
        validator=one_of(*PRECISIONS),
    )
    blocks_per_stack: int = option(4, "blocks of a new stack", validator=_count)
    max_stacks: int = option(12, "most stacks of a rack", validator=_count)
    building_mode: Literal["append", "prepend"] = option(
        "append", "where a new stack goes: after the trunk or before it", validator=one_of("append", "prepend")
    )
    zero_residual: bool = option(
        True, "a new stack is the identity at birth, so that the loss does not jump", validator=_boolean
    )

    # --- adapters ---
    qlora_enabled: bool = option(False, "every stack gets an adapter when it is made", validator=_boolean)
    qlora_rank: int = option(16, "rank of a stack's adapter", validator=_count)
    qlora_alpha: float = option(32.0, "alpha of a stack's adapter", validator=_amount)
    qlora_strategy: Literal["simplified", "progressive", "variable"] = option(
        "simplified",
        "rank and alpha of the stacks: the same for all, by the patterns, or as qlora_configs says",
        validator=one_of("simplified", "progressive", "variable"),
    )
    qlora_rank_pattern: Pattern = option(
        "increasing",
        "rank of stack i with strategy progressive: constant, increasing (rank 2^i), decreasing (rank // 2^i, at least "
        "1), linear (rank + 8 i)",
        validator=one_of(*_PATTERNS),
    )
    qlora_alpha_pattern: Pattern = option(
        "constant", "alpha of stack i with strategy progressive, as the rank", validator=one_of(*_PATTERNS)
    )
    qlora_configs: dict[int, AdapterOptions] | None = option(
        None, "rank and alpha by stack, with strategy variable", converter=_adapter_options
    )
    qlora_base: Literal["nvfp4", "ternary"] = option(
        "nvfp4", "the frozen base of a stack of precision qlora", validator=one_of("nvfp4", "ternary")
    )
    progressive_qlora: bool = option(
        False, "every stack of the trunk gets a second adapter when a new stack arrives", validator=_boolean
    )
    progressive_qlora_rank: int = option(8, "rank of that second adapter", validator=_count)
    progressive_qlora_alpha: float = option(16.0, "alpha of that second adapter", validator=_amount)
    adapter_dtype: AdapterDtype = option(
        "float32", "what adapters are stored in", validator=one_of("float32", "bfloat16", "float16", "ternary")
    )

    # --- activation cache ---
    cache_activations: bool = option(True, "keep what a frozen trunk computed", validator=_boolean)
    cache_bytes: int = option(1 << 30, "most bytes of the cache", validator=_count)
    cache_folder: str | None = option(None, "where the cache lies on disk; null = in memory")
    cache_dtype: Literal["float32", "bfloat16", "int8"] = option(
        "float32",
        "number format of what a frozen trunk hands to the new stack in training, with a cache and without one",
        validator=one_of("float32", "bfloat16", "int8"),
    )

    # --- time and objective ---
    training_objective: Literal["mlm", "clm", "custom"] = option(
        "mlm",
        "what is predicted: hidden tokens, the next token, or the targets in the batch",
        validator=one_of("mlm", "clm", "custom"),
    )
    time_interpretation: Literal["input", "depth"] = option(
        "depth", "time is an input of the model, or the place of a stack", validator=one_of("input", "depth")
    )
    time_embedding_dim: int = option(512, "features of a time embedding, for time as input", validator=_count)
    time_encoding_type: Literal["sinusoidal", "learned"] = option(
        "sinusoidal", "how time is embedded, for time as input", validator=one_of("sinusoidal", "learned")
    )
    time_sampling: Literal["batch", "sample"] = option(
        "batch", "what shares a time, for time as input", validator=one_of("batch", "sample")
    )
    stack_time_mapping: Literal["linear", "exponential", "custom", "time_per_stack"] = option(
        "linear",
        "the time step of a stack, for time as depth",
        validator=one_of("linear", "exponential", "custom", "time_per_stack"),
    )
    custom_time_mapping: Any = option(
        None,
        "with stack_time_mapping custom: f(stack_idx, max_stacks, num_time_steps), or its name as module:function",
        validator=optional(_is_function),
    )
    time_per_stack: int = option(100, "time steps that a stack covers", validator=_count)
    num_time_steps: int = option(8, "number of time steps", validator=_count)
    time_step_fractions: list[float] | dict[int, float] | None = option(
        None, "share of tokens hidden at each time step; null = .15 to .85 evenly", validator=_is_fractions
    )
    mask_token_id: int | None = option(
        None, "what stands for a hidden token; null = the last id of the vocabulary", validator=optional(_natural)
    )
    seed: int = option(0, "seed of new stacks, masks and times", validator=_natural)

    def contradictions(self) -> list[tuple[str, str]]:
        """Options that do not go together: name and what is wrong."""
        found = []
        has_adapters = self.qlora_enabled or self.new_stack_precision == "qlora"
        if self.trunk_strategy == "qlora" and not (has_adapters or self.progressive_qlora):
            found.append(
                (
                    "trunk_strategy",
                    "qlora trains the adapters of the trunk, and there are none; set qlora_enabled or "
                    "progressive_qlora to true",
                )
            )
        if self.new_stack_precision == "nvfp4" and not self.qlora_enabled:
            found.append(
                (
                    "new_stack_precision",
                    "nvfp4 cannot learn without adapters; use qlora, or set qlora_enabled to true",
                )
            )
        if self.qlora_strategy == "variable" and has_adapters and not self.qlora_configs:
            found.append(("qlora_configs", "qlora_strategy variable needs the rank and alpha of every stack"))
        if self.qlora_configs and self.qlora_strategy != "variable":
            found.append(("qlora_configs", f"has no effect with qlora_strategy {self.qlora_strategy}; use variable"))
        if self.stack_time_mapping == "custom" and self.custom_time_mapping is None:
            found.append(("custom_time_mapping", "stack_time_mapping custom needs a function"))
        if self.custom_time_mapping is not None and self.stack_time_mapping != "custom":
            found.append(
                ("custom_time_mapping", f"has no effect with stack_time_mapping {self.stack_time_mapping}; use custom")
            )
        return found


@define(kw_only=True)
class ModelConfig:
    """The parts of the model that every stack shares: the section ``model``."""

    vocab_size: int = option(256, "token ids, the one that stands for a hidden token included", validator=_count)
    d_model: int = option(256, "features of the residual stream", validator=_count)
    d_ff: int | None = option(
        None, "hidden features of a feed-forward layer; null = as the activation asks", validator=optional(_count)
    )
    n_heads: int = option(4, "query heads", validator=_count)
    n_kv_heads: int | None = option(None, "key and value heads; null = n_heads", validator=optional(_count))
    max_length: int = option(512, "context: longest sequence, in tokens", validator=_count)
    causal: bool | None = option(
        None,
        "a position sees only itself and earlier ones; null = where the objective is clm",
        validator=optional(_boolean),
    )
    activation: Literal["relu2", "swiglu"] = option(
        "relu2", "feed-forward non-linearity", validator=one_of("relu2", "swiglu")
    )
    rotary_base: float = option(10000.0, "longest wavelength of the rotary embedding over 2 pi", validator=_amount)
    tie_embeddings: bool = option(False, "the head uses the embedding's weights", validator=_boolean)
    ends: Literal["full", "ternary"] | None = option(
        None,
        "what embedding and head are stored in; null = ternary where new stacks are ternary, else full",
        validator=optional(one_of("full", "ternary")),
    )
    learned_norms: bool = option(False, "pre-norms and the final norm have a learned gain", validator=_boolean)
    sub_norms: bool = option(True, "normalise also what enters the output and down projections", validator=_boolean)
    group_size: Literal[32, 64, 128, 256, "row"] = option(
        128, "weights of a row that share an exponent in ternary linears", validator=one_of(32, 64, 128, 256, "row")
    )
    activations: Literal["int8", "float"] = option(
        "float", "precision of what enters each linear", validator=one_of("int8", "float")
    )
    gradients: Literal["int8", "float"] = option(
        "float", "precision of the gradients that ternary modules multiply with", validator=one_of("int8", "float")
    )


@define(kw_only=True)
class TrainingConfig:
    """The section ``training``."""

    progressive: ProgressiveConfig = option(help="how the rack grows", factory=ProgressiveConfig)
    epochs_per_stack: int = option(1, "passes over the data for each stack", validator=_count)
    steps_per_stack: int | None = option(
        None,
        "optimizer steps for each stack, in place of whole passes; null = epochs_per_stack",
        validator=optional(_count),
    )
    lr: float = option(1e-3, "learning rate of float parameters", validator=_amount)
    rate: float = option(
        0.1,
        "rate of ternary modules: trits that a weight moves in a step whose gradient is one standard deviation",
        validator=_amount,
    )


class _NoComponents:
    """A registry for configs that name no components."""

    def get(self, kind: str, name: str, /) -> Any:
        raise UsageProblem(f"{kind} {name!r}: this config names no components")

    def names(self, kind: str, /) -> tuple[str, ...]:
        return ()


@define(kw_only=True)
class StackWiseConfig:
    """Model and training of a rack, from a file or from keywords."""

    model: ModelConfig = option(help="what every stack shares", factory=ModelConfig)
    training: TrainingConfig = option(help="how the rack is trained", factory=TrainingConfig)
    _origins: dict[Any, Any] = attrs.field(init=False, factory=dict, repr=False, eq=False)
    _source: str = attrs.field(init=False, default="", repr=False, eq=False)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> StackWiseConfig:
        """Read a YAML (or TOML, or JSON) file; ``overrides`` are ``"path=value"`` each.

        Raises:
            ConfigError: the file or its content is wrong; every fault is listed with file and line.
        """
        loaded = load_as(cls, path, overrides, registry=_NoComponents())
        loaded.config._origins = dict(loaded.origins)
        loaded.config._source = loaded.source
        return loaded.config

    def validate(self) -> None:
        """See that every option is right, by itself and beside the others.

        Raises:
            ConfigError: it is not; every fault is listed, with file and line where the config comes from a file.
        """
        faults = []
        sections: tuple[tuple[tuple[str, ...], Any], ...] = (
            (("model",), self.model),
            (("training",), self.training),
            (("training", "progressive"), self.training.progressive),
        )
        for where, section in sections:
            try:
                attrs.validate(section)
            except (ValueError, TypeError) as error:
                faults.append(Fault(where, str(error.args[0])))
        path = ("training", "progressive")
        faults += [Fault((*path, key), message) for key, message in self.training.progressive.contradictions()]
        if not faults:
            try:
                self.decoder_config()
            except (ValueError, ConfigError) as error:
                faults.append(Fault(("model",), str(error)))
        if faults:
            raise_faults(faults, self._origins, self._source)

    def decoder_config(self, default_precision: Precision | None = None) -> DecoderConfig:
        """What the parts of core are made with. Its ``float_parts`` are those of the ends: a stack has its own.

        Args:
            default_precision: of new stacks, where it is not ``new_stack_precision``.

        Raises:
            ValueError: options contradict each other.
        """
        from arb_ternary_text.models.config import DecoderConfig

        model, progressive = self.model, self.training.progressive
        precision = progressive.new_stack_precision if default_precision is None else default_precision
        ends = model.ends or ("ternary" if precision == "ternary" else "full")
        norms = ("norms",) if model.learned_norms else ()
        return DecoderConfig(
            width=model.d_model,
            layers=1,
            heads=model.n_heads,
            kv_heads=model.n_kv_heads,
            feed_forward=model.d_ff,
            activation=model.activation,
            causal=progressive.training_objective == "clm" if model.causal is None else model.causal,
            rotary_base=model.rotary_base,
            max_length=model.max_length,
            tie_embeddings=model.tie_embeddings,
            group_size=model.group_size,
            activations=model.activations,
            gradients=model.gradients,
            float_parts=("embedding", "head", *norms) if ends == "full" else (),
            learned_norms=model.learned_norms,
            sub_norms=model.sub_norms,
            zero_residual=progressive.zero_residual,
        )
