"""Options of the phase ``benchmark``. Imported without torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from attrs import frozen

from arb_ternary.config.options import Rule, non_negative, option, optional, positive
from arb_ternary_upcycle.stage_options import TEACHER_HELP, too_long

Measure = Literal["perplexity", "latency", "memory"]


def _distinct(least: int) -> Rule:
    return Rule(
        f"one or more different whole numbers of at least {least}",
        lambda value: bool(value) and min(value) >= least and len(set(value)) == len(value),
        {"minItems": 1, "uniqueItems": True, "items": {"minimum": least}},
    )


_some: Final = Rule(
    "one or more of perplexity, latency and memory, each once",
    lambda value: bool(value) and len(set(value)) == len(value),
    {"minItems": 1, "uniqueItems": True},
)


@frozen(kw_only=True)
class BenchmarkConfig:
    """Options of the phase ``benchmark``."""

    no_training: ClassVar[bool] = True

    measure: tuple[Measure, ...] = option(
        ("perplexity", "latency", "memory"),
        "what is measured; latency and memory need the whole teacher in memory, in float32",
        validator=_some,
    )
    teacher: Path | None = option(None, TEACHER_HELP)
    batches: int | None = option(
        16,
        "batches of held-out samples for the perplexity; null = all",
        validator=optional(positive),
    )
    batch_size: int | None = option(
        None,
        "samples in such a batch; null = as the run evaluates",
        validator=optional(positive),
    )
    block_size: int | None = option(
        None,
        "predictions in such a sample, in tokens; null = as the run evaluates",
        validator=optional(positive),
    )
    prompt_lengths: tuple[int, ...] = option(
        (128,),
        "tokens of a prompt",
        validator=_distinct(1),
    )
    generation_lengths: tuple[int, ...] = option(
        (32,),
        "tokens that are generated; the first of them comes with the prompt",
        validator=_distinct(2),
    )
    batch_sizes: tuple[int, ...] = option(
        (1,),
        "sequences at a time",
        validator=_distinct(1),
    )
    warmup_runs: int = option(
        3,
        "untimed repetitions before the timed ones, for each combination of sizes",
        validator=non_negative,
    )
    timed_runs: int = option(
        10,
        "timed repetitions of each combination, teacher and student in turn",
        validator=positive,
    )

    def validate_in_run(self, run: Any, planned: Any) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        if "perplexity" in self.measure:
            yield from too_long(run, self.block_size)
        model = run.model.options
        longest = getattr(model, "max_length", None)
        if longest is None or getattr(model, "sliding_window", None) is not None:
            return
        prompt = max(self.prompt_lengths)
        generated = max(self.generation_lengths)
        if self.runs_models and prompt + generated > longest:
            yield (
                "prompt_lengths",
                f"{prompt} tokens and {generated} after them exceed the context of the model: "
                f"max_length is {longest}",
            )

    @property
    def runs_models(self) -> bool:
        """Whether whole models generate text."""
        return bool({"latency", "memory"} & set(self.measure))

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """Every combination of prompt, generation and batch."""
        return list(product(self.prompt_lengths, self.generation_lengths, self.batch_sizes))
