"""Options of the phase ``benchmark``. Imported without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from attrs import frozen

from arb_ternary.config.options import Rule, non_negative, option, optional, positive
from arb_ternary_upcycle.verification.config import TEACHER_HELP, held_out_contradictions

Measure = Literal["perplexity", "latency", "memory"]

_counts = Rule(
    "one or more whole numbers of at least 1, none of them twice",
    lambda value: bool(value) and min(value) >= 1 and len(set(value)) == len(value),
    {"minItems": 1, "uniqueItems": True, "items": {"minimum": 1}},
)
_several = Rule(
    "one or more whole numbers of at least 2, none of them twice: the first token is the prompt's",
    lambda value: bool(value) and min(value) >= 2 and len(set(value)) == len(value),
    {"minItems": 1, "uniqueItems": True, "items": {"minimum": 2}},
)
_some = Rule(
    "one or more of perplexity, latency and memory, each once",
    lambda value: bool(value) and len(set(value)) == len(value),
    {"minItems": 1, "uniqueItems": True},
)


@frozen(kw_only=True)
class BenchmarkConfig:
    """Options of the phase ``benchmark``. Sizes of samples that are ``null`` are those of the run's
    evaluations.
    """

    no_training: ClassVar[bool] = True

    measure: tuple[Measure, ...] = option(
        ("perplexity", "latency", "memory"),
        "what is measured; latency and memory need all of the teacher in memory, in float32",
        validator=_some,
    )
    teacher: Path | None = option(None, TEACHER_HELP)
    batches: int | None = option(
        16,
        "batches of held-out samples for the perplexity; null = all",
        validator=optional(positive),
    )
    batch_size: int | None = option(
        None, "samples in such a batch; null = as the run evaluates", validator=optional(positive)
    )
    block_size: int | None = option(
        None,
        "predictions in such a sample, in tokens; null = as the run evaluates",
        validator=optional(positive),
    )
    prompt_lengths: tuple[int, ...] = option((128,), "tokens of prompts", validator=_counts)
    generation_lengths: tuple[int, ...] = option(
        (32,), "tokens that follow a prompt", validator=_several
    )
    batch_sizes: tuple[int, ...] = option((1,), "sequences at a time", validator=_counts)
    warmup_runs: int = option(
        3, "passes before the timed ones, of each combination of sizes", validator=non_negative
    )
    timed_runs: int = option(
        10, "timed passes of each combination, teacher and student in turn", validator=positive
    )

    def validate_in_run(self, run: Any, planned: Any) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        if "perplexity" in self.measure:
            yield from held_out_contradictions(run, self.block_size)
        longest, window = (
            getattr(run.model.options, name, None) for name in ("max_length", "sliding_window")
        )
        needed = max(self.prompt_lengths) + max(self.generation_lengths)
        if (
            {"latency", "memory"} & set(self.measure)
            and longest is not None
            and window is None
            and needed > longest
        ):
            yield (
                "prompt_lengths",
                f"{max(self.prompt_lengths)} tokens and {max(self.generation_lengths)} after them "
                f"exceed the context of the model: max_length is {longest}",
            )

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """Every combination of prompt, generation and batch."""
        return [
            (prompt, generation, batch)
            for prompt in self.prompt_lengths
            for generation in self.generation_lengths
            for batch in self.batch_sizes
        ]
