"""One prompt length and batch: the prompt is read, then tokens are written one by one, each timed."""

from __future__ import annotations

import time
from typing import Any, Final, Protocol

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from arb_ternary_bench.steps.resident import resident_bytes

__all__ = ["Case", "Session", "measure_case", "warm_up"]

#: Tokens that are written at least, however long they take.
_LEAST_TOKENS: Final = 4


class Session(Protocol):
    """A model that reads and writes.

    ``weight_bytes``: of the weights that every pass reads whole.
    """

    weight_bytes: int

    def start(self, batch: int, length: int) -> None:
        """Forget what was read, and make room for ``batch`` sequences of ``length`` tokens."""

    def read(self, tokens_BS: NDArray[np.int64]) -> NDArray[np.int64]:
        """Read tokens of every sequence, and give the likeliest next token of each, ``[B]``."""


@frozen(kw_only=True)
class Case:
    """What is generated.

    Attributes:
        prompt: tokens of each sequence's prompt.
        batch: sequences.
        new_tokens: of each sequence; the first of them comes with the prompt.
    """

    prompt: int
    batch: int
    new_tokens: int

    @property
    def length(self) -> int:
        """Positions of a sequence."""
        return self.prompt + self.new_tokens


def warm_up(session: Session, vocabulary: int) -> None:
    """Touch every weight once, and let libraries start their threads."""
    session.start(1, 16)
    written = session.read(_tokens(1, 8, vocabulary, seed=0))
    for _ in range(2):
        written = session.read(written[:, None])


def measure_case(session: Session, case: Case, vocabulary: int, seconds: float) -> dict[str, Any]:
    """Repeat the case for about ``seconds``, at least once.

    A repetition that has no time left to write all its tokens stops early: later repetitions write fewer, and the
    first as many as fit in ``seconds``, at least a few.

    Returns:
        ``prompt_seconds`` (also the time to the first token) of every repetition; ``token_seconds`` of every pass that
        wrote a token of each sequence; ``resident_bytes`` after the last one; ``processor_seconds`` of all threads, for
        ``passes`` of the prompts and of single tokens.
    """
    prompts, tokens = [], []
    spent = {"prompt": 0.0, "tokens": 0.0}
    begin, repetition = time.perf_counter(), 0
    while repetition == 0 or time.perf_counter() - begin < seconds:
        tokens_BS = _tokens(case.batch, case.prompt, vocabulary, seed=1 + repetition)
        session.start(case.batch, case.length)
        clock, processor = time.perf_counter(), time.process_time()
        written = session.read(tokens_BS)
        prompts.append(time.perf_counter() - clock)
        spent["prompt"] += time.process_time() - processor
        processor, writing = time.process_time(), time.perf_counter()
        for number in range(1, case.new_tokens):
            clock = time.perf_counter()
            written = session.read(written[:, None])
            tokens.append(time.perf_counter() - clock)
            if number >= _LEAST_TOKENS and time.perf_counter() - writing > seconds:
                break
        spent["tokens"] += time.process_time() - processor
        repetition += 1
    return {
        "prompt_seconds": prompts,
        "token_seconds": tokens,
        "processor_seconds": spent,
        "resident_bytes": resident_bytes(),
    }


def _tokens(batch: int, count: int, vocabulary: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, vocabulary, (batch, count))
