"""How a rack grows: the options that the phase ``progressive`` and training in Python have in
common.

They can be changed after they were made, where the class that has them allows it; every assignment
is checked as the file was. What options say of each other is said by
:meth:`GrowthConfig.contradictions`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import attrs
from attrs import define
from attrs.validators import instance_of, optional

from arb_ternary.config.fields import without_effect
from arb_ternary.config.options import Rule, one_of, option
from arb_ternary.errors import nearest

Precision: TypeAlias = Literal["full", "half", "bfloat16", "nvfp4", "ternary", "qlora"]
AdapterDtype: TypeAlias = Literal["float32", "bfloat16", "float16", "ternary"]
Pattern: TypeAlias = Literal["constant", "increasing", "decreasing", "linear"]

#: What a stack can be stored in.
PRECISIONS: tuple[Precision, ...] = ("full", "half", "bfloat16", "nvfp4", "ternary", "qlora")
_PATTERNS: tuple[Pattern, ...] = ("constant", "increasing", "decreasing", "linear")

#: Options of the adapters that stacks are made with, and of what a frozen trunk computed.
_ADAPTERS: Final = ("qlora_rank", "qlora_alpha", "qlora_rank_pattern", "qlora_alpha_pattern")
_CACHE: Final = ("cache_bytes", "cache_folder", "cache_activations", "cache_dtype")

at_least_one = Rule(
    "a whole number of at least 1", lambda value: type(value) is int and value >= 1, {"minimum": 1}
)
above_zero = Rule(
    "a number greater than 0",
    lambda value: type(value) in (int, float) and 0 < value < float("inf"),
    {"exclusiveMinimum": 0},
)
boolean = instance_of(bool)
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_is_function = Rule(
    "a function, or its name as module:function",
    lambda value: (
        callable(value) or (isinstance(value, str) and _TARGET.fullmatch(value) is not None)
    ),
    {"type": "string", "pattern": f"^(?:{_TARGET.pattern})$"},
)


@define(kw_only=True)
class AdapterOptions:
    """Rank and alpha of one stack's adapters."""

    rank: int = option(help="features between the two matrices", validator=at_least_one)
    alpha: float = option(
        help="the adapter's output is scaled by alpha / rank", validator=above_zero
    )


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
                    hint = (
                        f"; did you mean '{close}'?"
                        if close
                        else f"; the keys here are {', '.join(known)}"
                    )
                    raise ValueError(
                        f"'qlora_configs' has the unknown key {key!r} for stack {stack}{hint}"
                    )
            if absent := [key for key in known if key not in entry]:
                raise ValueError(f"'qlora_configs' lacks {' and '.join(absent)} for stack {stack}")
        made[stack] = AdapterOptions(**entry) if isinstance(entry, Mapping) else entry
    return made


@define(kw_only=True)
class GrowthConfig:
    """How a rack grows: what the phase ``progressive`` and the section ``training.progressive``
    both say.
    """

    enabled: bool = option(
        True,
        "false = all stacks are made at once and trained end to end, at equal steps",
        validator=boolean,
    )

    # --- stacks and trunk
    trunk_strategy: Literal["frozen", "qlora"] = option(
        "frozen",
        "what learns in the stacks that were there before: nothing, or their adapters",
        validator=one_of("frozen", "qlora"),
    )
    new_stack_precision: Precision | None = option(
        None,
        "what a new stack is stored in: full (float32), half (float16), bfloat16, nvfp4 (4 bits, "
        "frozen), ternary, qlora (frozen 4-bit or ternary base with adapters); null = ternary or "
        "full, as the model's own linears",
        validator=optional(one_of(*PRECISIONS)),
    )
    blocks_per_stack: int | None = option(
        None,
        "blocks of a new stack; null = as many as the first stack has",
        validator=optional(at_least_one),
    )
    max_stacks: int = option(12, "most stacks of a rack", validator=at_least_one)
    building_mode: Literal["append", "prepend"] = option(
        "append",
        "where a new stack goes: after the trunk or before it",
        validator=one_of("append", "prepend"),
    )
    zero_residual: bool = option(
        True,
        "a new stack is the identity at birth, so that the loss does not jump",
        validator=boolean,
    )

    # --- adapters
    qlora_enabled: bool = option(
        False, "every stack gets an adapter when it is made", validator=boolean
    )
    qlora_rank: int = option(16, "rank of a stack's adapter", validator=at_least_one)
    qlora_alpha: float = option(32.0, "alpha of a stack's adapter", validator=above_zero)
    qlora_strategy: Literal["simplified", "progressive", "variable"] = option(
        "simplified",
        "rank and alpha of the stacks: the same for all, by the patterns, or as qlora_configs says",
        validator=one_of("simplified", "progressive", "variable"),
    )
    qlora_rank_pattern: Pattern = option(
        "increasing",
        "rank of stack i with strategy progressive: constant, increasing (rank 2^i), decreasing "
        "(rank // 2^i, at least 1), linear (rank + 8 i)",
        validator=one_of(*_PATTERNS),
    )
    qlora_alpha_pattern: Pattern = option(
        "constant",
        "alpha of stack i with strategy progressive, as the rank",
        validator=one_of(*_PATTERNS),
    )
    qlora_configs: dict[int, AdapterOptions] | None = option(
        None, "rank and alpha by stack, with strategy variable", converter=_adapter_options
    )
    qlora_base: Literal["nvfp4", "ternary"] = option(
        "nvfp4",
        "the frozen base of a stack of precision qlora",
        validator=one_of("nvfp4", "ternary"),
    )
    progressive_qlora: bool = option(
        False,
        "every stack of the trunk gets a second adapter when a new stack arrives",
        validator=boolean,
    )
    progressive_qlora_rank: int = option(8, "rank of that second adapter", validator=at_least_one)
    progressive_qlora_alpha: float = option(
        16.0, "alpha of that second adapter", validator=above_zero
    )
    adapter_dtype: AdapterDtype = option(
        "float32",
        "what adapters are stored in",
        validator=one_of("float32", "bfloat16", "float16", "ternary"),
    )

    # --- activation cache
    cache_activations: bool = option(True, "keep what a frozen trunk computed", validator=boolean)
    cache_bytes: int = option(1 << 30, "most bytes of the cache", validator=at_least_one)
    cache_folder: str | None = option(None, "where the cache lies on disk; null = in memory")
    cache_dtype: Literal["float32", "bfloat16", "int8"] = option(
        "float32",
        "number format of what a frozen trunk hands to the new stack in training, with a cache and "
        "without one",
        validator=one_of("float32", "bfloat16", "int8"),
    )

    # --- time
    time_interpretation: Literal["input", "depth"] = option(
        "depth",
        "time is an input of the model, or the place of a stack",
        validator=one_of("input", "depth"),
    )
    time_embedding_dim: int = option(
        512, "features of a time embedding, for time as input", validator=at_least_one
    )
    time_encoding_type: Literal["sinusoidal", "learned"] = option(
        "sinusoidal",
        "how time is embedded, for time as input",
        validator=one_of("sinusoidal", "learned"),
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
        "with stack_time_mapping custom: f(stack_idx, max_stacks, num_time_steps), or its name as "
        "module:function",
        validator=optional(_is_function),
    )
    time_per_stack: int = option(100, "time steps that a stack covers", validator=at_least_one)
    num_time_steps: int = option(8, "number of time steps", validator=at_least_one)

    def contradictions(self) -> list[tuple[str, str]]:
        """Options that do not go together: name and what is wrong."""
        found = []
        has_adapters = self.qlora_enabled or self.new_stack_precision == "qlora"
        if self.trunk_strategy == "qlora" and not (has_adapters or self.progressive_qlora):
            found.append(
                (
                    "trunk_strategy",
                    "qlora trains the adapters of the trunk, and there are none; set qlora_enabled "
                    "or progressive_qlora to true",
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
            found.append(
                ("qlora_configs", "qlora_strategy variable needs the rank and alpha of every stack")
            )
        if self.qlora_configs and self.qlora_strategy != "variable":
            found.append(
                (
                    "qlora_configs",
                    f"has no effect with qlora_strategy {self.qlora_strategy}; use variable",
                )
            )
        if self.stack_time_mapping == "custom" and self.custom_time_mapping is None:
            found.append(("custom_time_mapping", "stack_time_mapping custom needs a function"))
        if self.custom_time_mapping is not None and self.stack_time_mapping != "custom":
            found.append(
                (
                    "custom_time_mapping",
                    f"has no effect with stack_time_mapping {self.stack_time_mapping}; use custom",
                )
            )
        if (self.time_interpretation, self.time_encoding_type) == (
            "input",
            "sinusoidal",
        ) and self.time_embedding_dim % 2:
            found.append(
                (
                    "time_embedding_dim",
                    f"must be even for sinusoidal encoding, not {self.time_embedding_dim}",
                )
            )
        return found

    def idle_options(self) -> list[tuple[str, str]]:
        """Options that do nothing beside the others where new stacks are as the options say: name,
        and why.
        """
        found: list[tuple[str, str]] = []
        if self.new_stack_precision != "qlora":
            found += without_effect(self, "no stack is of precision qlora", "qlora_base")
            if not self.qlora_enabled:
                found += without_effect(
                    self, "no stack is made with an adapter", *_ADAPTERS, "qlora_strategy"
                )
                if not self.progressive_qlora:
                    found += without_effect(self, "no stack gets an adapter", "adapter_dtype")
        if self.building_mode == "prepend":
            reason = "the trunk runs on what the new stack makes ('building_mode' is prepend)"
            found += without_effect(self, reason, *_CACHE)
        # An option may be idle for two reasons, and is named once.
        return list(dict([*found, *self.always_idle()]).items())

    def always_idle(self) -> list[tuple[str, str]]:
        """Options that do nothing beside the others whatever stacks a builder is asked for: name,
        and why.
        """
        found = self._cache_without_effect()
        if self.qlora_strategy != "progressive":
            idle = _ADAPTERS[2:] if self.qlora_strategy == "simplified" else _ADAPTERS
            found += without_effect(self, f"'qlora_strategy' is {self.qlora_strategy}", *idle)
        if not self.progressive_qlora:
            reason = "'progressive_qlora' is false"
            found += without_effect(
                self, reason, "progressive_qlora_rank", "progressive_qlora_alpha"
            )
        if self.stack_time_mapping != "time_per_stack":
            reason = f"'stack_time_mapping' is {self.stack_time_mapping}"
            found += without_effect(self, reason, "time_per_stack")
        if self.time_interpretation == "depth":
            reason = "time is the place of a stack ('time_interpretation': depth)"
            found += without_effect(
                self, reason, "time_embedding_dim", "time_encoding_type", "time_sampling"
            )
        return found

    def _cache_without_effect(self) -> list[tuple[str, str]]:
        if not self.enabled:
            reason = "all stacks are trained together ('enabled' is false)"
            return without_effect(self, reason, *_CACHE, "trunk_strategy")
        if self.trunk_strategy == "qlora":
            return without_effect(
                self, "the trunk changes with every step ('trunk_strategy' is qlora)", *_CACHE
            )
        if not self.cache_activations:
            return without_effect(
                self, "'cache_activations' is false", "cache_bytes", "cache_folder"
            )
        return []
