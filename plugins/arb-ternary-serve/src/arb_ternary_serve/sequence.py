"""A sequence: the options of its caller, the events that are reported, the engine's state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from attrs import define, field, frozen
from torch import Tensor

from arb_ternary.errors import UsageProblem
from arb_ternary_serve.block_pool import BEGINNING
from arb_ternary_text.models.generate import (
    check_sampling,
    draw_token,
    next_token_probabilities,
    ranked_tokens,
    seeded_generator,
)

#: Why a sequence ended: one of its stop ids was drawn, or it has as many tokens as were asked for.
Finish = Literal["stop", "length"]


def _as_set(ids: Iterable[int]) -> frozenset[int]:
    return frozenset(ids)


@frozen
class Options:
    """How a sequence is continued.

    Attributes:
        max_new_tokens: largest number of tokens to draw. 0 with ``prompt_logprobs_from`` only reads
            the prompt, without its last id.
        temperature: divides the logits; 0 takes the most likely token (the first of equals).
        top_k: draw among the ``top_k`` most likely tokens only; None = all.
        top_p: draw among the most likely tokens that together reach this probability, after
            ``top_k``; None = all.
        seed: seed of the draws; None = a different one every time.
        stop: ids that end the sequence.
        logprobs: report the log probability of each token and of so many likeliest ones; None =
            none.
        prompt_logprobs_from: report the same for the tokens of the prompt from this position on,
            1 or more; None = for none of them. What stands before it may be a known beginning,
            which is not read again, but for the last id.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: frozenset[int] = field(default=frozenset(), converter=_as_set)
    logprobs: int | None = None
    prompt_logprobs_from: int | None = None

    def check(self) -> None:
        """Check the values.

        Raises:
            UsageProblem: one is out of range.
        """
        check_sampling(self.temperature, self.top_k, self.top_p)
        for name in ("max_new_tokens", "logprobs"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UsageProblem(f"{name}: must be at least 0, not {value}")
        if self.prompt_logprobs_from is None:
            return
        if self.logprobs is None:
            raise UsageProblem(
                "prompt_logprobs_from: needs logprobs, the number of likeliest tokens to report",
                "Set logprobs=0 for the tokens of the prompt alone.",
            )
        if self.prompt_logprobs_from < 1:
            raise UsageProblem(
                f"prompt_logprobs_from: must be at least 1, not {self.prompt_logprobs_from}",
                "Nothing precedes the first token, so it has no probability.",
            )


@frozen
class TokenLogprobs:
    """Natural logarithms of probabilities at temperature 1, among all tokens.

    Attributes:
        token: the id that was drawn, or stands in the prompt.
        logprob: its log probability.
        top: ids and log probabilities of the likeliest tokens, the likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@frozen
class Event:
    """The outcome of a step for a sequence.

    Attributes:
        handle: which sequence.
        token: the id that was drawn; None if the sequence ended without one: at a stop id, or if
            none was asked for.
        finished: why the sequence has ended; None if it goes on.
        logprobs: those of ``token``, or of the stop id that was drawn, if they were asked for.
        prompt_logprobs: those of the tokens of the prompt, if they were asked for, with the first
            event of a sequence.
    """

    handle: int
    token: int | None
    finished: Finish | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@define(eq=False)
class SequenceState:
    """A sequence that is being continued.

    Attributes:
        handle: which sequence.
        ids: the prompt, then what was drawn.
        options: how it is continued.
        prompt_length: number of ids of the prompt.
        seat: its row in the tables of blocks.
        blocks: what its keys and values are in, for all positions that it can have.
        read: number of positions whose keys and values are in the cache.
        learnt: number of blocks that were made known.
        serial: the serial of what the last of them holds.
        prompt_logprobs: those of the tokens of the prompt that were read.
        generator: makes the draws.
    """

    handle: int
    ids: list[int]
    options: Options
    prompt_length: int
    seat: int = -1
    blocks: list[int] = field(factory=list)
    read: int = 0
    learnt: int = 0
    serial: int = BEGINNING
    prompt_logprobs: list[TokenLogprobs] = field(factory=list)
    generator: torch.Generator = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.generator = seeded_generator(self.options.seed)

    @property
    def unread(self) -> int:
        """Number of ids that the model has to read.

        If nothing is drawn, the last id is predicted, and predicts nothing.
        """
        needed = len(self.ids)
        if self.options.max_new_tokens == 0:
            needed = max(1, needed - 1)
        return needed - self.read

    @property
    def reusable(self) -> int:
        """Number of ids of the prompt whose keys and values suffice: no logits are wanted there."""
        rest = len(self.ids) if self.options.max_new_tokens else max(1, len(self.ids) - 1)
        if self.options.prompt_logprobs_from is not None:
            rest = min(rest, self.options.prompt_logprobs_from)
        return rest - 1

    def draw(self, logits_V: Tensor) -> int:
        """Draw the next id."""
        options = self.options
        if options.temperature == 0:
            return int(logits_V.argmax())
        probability_V = next_token_probabilities(
            logits_V, options.temperature, options.top_k, options.top_p
        )
        return draw_token(probability_V, self.generator)

    def logprobs_of(self, token: int, logits_V: Tensor) -> TokenLogprobs | None:
        """Return the log probabilities that are reported for ``token``, if any are."""
        if self.options.logprobs is None:
            return None
        logprob_V = logits_V.detach().to(device="cpu", dtype=torch.float64).log_softmax(dim=0)
        top: Sequence[int] = ()
        if self.options.logprobs:
            top = ranked_tokens(logprob_V, self.options.logprobs).tolist()
        ranked = tuple((each, float(logprob_V[each])) for each in top)
        return TokenLogprobs(token, float(logprob_V[token]), ranked)
