"""Requests of tasks, which the engine of ``arb-ternary-serve`` computes together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from tqdm import tqdm

from arb_ternary_chat.model import Model
from arb_ternary_serve.engine import Engine
from arb_ternary_serve.sequence import Event, Options

#: Sequences that run together.
_TOGETHER: Final = 16
#: Sequences that the engine knows of, so that none is missing when one ends.
_AHEAD: Final = 4 * _TOGETHER
#: Largest number of ids of prompts that a step reads.
_CHUNK: Final = 256
#: Memory for keys and values, if a single sequence does not need more.
_CACHE_BYTES: Final = 1 << 30


class Work(NamedTuple):
    """A sequence that the engine continues.

    Attributes:
        ids: the prompt.
        options: how it is continued.
    """

    ids: list[int]
    options: Options


class Score(NamedTuple):
    """How likely a continuation is.

    Attributes:
        log_likelihood: sum over its tokens, in nats.
        greedy: whether each token is the most likely one.
    """

    log_likelihood: float
    greedy: bool


def make_engine(model: Model) -> Engine:
    """Return an engine that holds at least one sequence of the whole context."""
    causal = model.causal
    cache = causal.new_cache(1)
    with torch.no_grad():
        causal(torch.zeros(1, 1, dtype=torch.int64, device=model.device), cache)
    longest = causal.max_length
    if causal.sliding_window is not None:
        longest = max(longest, causal.sliding_window + _CHUNK, 2 * causal.sliding_window)
    # Blocks are whole.
    needed = 2 * (longest + _CHUNK) * cache.bytes_per_token()
    return Engine(
        causal,
        max_sequences=_TOGETHER,
        cache_bytes=max(_CACHE_BYTES, needed),
        chunk=_CHUNK,
        cache="float",  # what is measured is the model, and not a format of its cache
        device=model.device,
    )


def run_together(
    engine: Engine, works: Sequence[Work], receive: Callable[[int, Event], bool]
) -> None:
    """Continue sequences; those with the same beginning follow each other.

    Args:
        engine: the engine, which has nothing to do.
        works: the sequences.
        receive: called with the index of a sequence and an event of it; returns whether it goes on.
    """
    order = deque(sorted(range(len(works)), key=lambda index: works[index].ids))
    ahead = _AHEAD if engine.shares_while_running else 1
    index_of: dict[int, int] = {}
    # None: on a terminal only.
    progress = tqdm(total=len(works), desc="Computing", unit=" requests", disable=None)
    while order or index_of:
        while order and len(index_of) < ahead:
            index = order.popleft()
            index_of[engine.submit(*works[index])] = index
        for event in engine.step():
            goes_on = receive(index_of[event.handle], event)
            if event.finished is None and goes_on:
                continue
            if event.finished is None:
                engine.cancel(event.handle)
            del index_of[event.handle]
            progress.update()
    progress.close()


def score_all(
    engine: Engine, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], max_length: int
) -> list[Score]:
    """Score continuations behind contexts, at least one id of each.

    Of a longer context only what fits into the model's context is read. A continuation has at most
    as many ids as the model reads.
    """
    works = []
    for context, continuation in pairs:
        # The last id is predicted, and predicts nothing.
        ids = [*context, *continuation][-max_length - 1 :]
        first = len(ids) - len(continuation)
        options = Options(max_new_tokens=0, logprobs=1, prompt_logprobs_from=first)
        works.append(Work(ids, options))
    scores: dict[int, Score] = {}

    def receive(index: int, event: Event) -> bool:
        reported = event.prompt_logprobs or ()
        total = sum(each.logprob for each in reported)
        greedy = all(each.token == each.top[0][0] for each in reported)
        scores[index] = Score(total, greedy)
        return False

    run_together(engine, works, receive)
    return [scores[index] for index in range(len(works))]
