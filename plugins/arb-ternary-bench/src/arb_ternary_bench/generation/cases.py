"""A case: a prompt is read, then tokens are written one by one, each timed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Protocol

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from arb_ternary_bench.memory import resident_bytes

ClockName = Literal["wall", "processor"]
#: Seconds that pass, or that the threads of this process compute. With one thread the latter do not
#: depend on what else the machine does.
CLOCKS: Final[Mapping[ClockName, Callable[[], float]]] = {
    "wall": time.perf_counter,
    "processor": time.process_time,
}

#: The fewest tokens that are written, however long they take.
_LEAST_TOKENS: Final = 4


class Session(Protocol):
    """A model that reads and writes.

    Attributes:
        weight_bytes: bytes of the weights that every pass reads whole.
    """

    weight_bytes: int

    def start(self, batch: int, length: int) -> None:
        """Forget what was read, and make room for ``batch`` sequences of ``length`` tokens."""

    def read(self, tokens_BS: NDArray[np.int64]) -> NDArray[np.int64]:
        """Read tokens of every sequence and return the likeliest next token of each, ``[B]``."""


@frozen(kw_only=True)
class Case:
    """The tokens to generate.

    Attributes:
        prompt: tokens of each sequence's prompt.
        batch: number of sequences.
        new_tokens: new tokens per sequence; the first of them comes with the prompt.
    """

    prompt: int
    batch: int
    new_tokens: int

    @property
    def length(self) -> int:
        """Positions per sequence."""
        return self.prompt + self.new_tokens


def warm_up(session: Session, vocabulary: int) -> None:
    """Touch every weight once, and let libraries start their threads."""
    session.start(1, 16)
    written = session.read(_tokens(1, 8, vocabulary, seed=0))
    for _ in range(2):
        written = session.read(written[:, None])


def measure_case(
    session: Session, case: Case, vocabulary: int, seconds: float, clock: ClockName = "wall"
) -> dict[str, Any]:
    """Repeat the case for about ``seconds``, at least once.

    A repetition whose tokens take longer than that stops early, once it has written a few.

    Returns:
        ``prompt_seconds`` (also the time to the first token) of every repetition; ``token_seconds``
        of every pass that wrote a token of each sequence; ``resident_bytes`` after the last one.
        Both times are of ``clock``.
    """
    prompts: list[float] = []
    tokens: list[float] = []
    wall = CLOCKS["wall"]
    begin = wall()
    while not prompts or wall() - begin < seconds:
        once = measure_once(session, case, vocabulary, 1 + len(prompts), clock, seconds)
        prompts.append(once.prompt_seconds)
        tokens += once.token_seconds
    return {"prompt_seconds": prompts, "token_seconds": tokens, "resident_bytes": resident_bytes()}


@frozen
class Repetition:
    """Times of one repetition of a case, in seconds.

    Attributes:
        prompt_seconds: from the ids of the prompts to the ids of the first tokens.
        token_seconds: of every pass that wrote a further token of each sequence.
    """

    prompt_seconds: float
    token_seconds: list[float]


def measure_once(
    session: Session,
    case: Case,
    vocabulary: int,
    seed: int = 0,
    clock: ClockName = "wall",
    limit: float = math.inf,
) -> Repetition:
    """Read random prompts and write tokens once.

    Args:
        session: the model.
        case: sizes.
        vocabulary: number of token ids.
        seed: of the prompts.
        clock: that times are of.
        limit: seconds that pass after which no further token is written, once there are a few.
    """
    now = CLOCKS[clock]
    wall = CLOCKS["wall"]
    tokens_BS = _tokens(case.batch, case.prompt, vocabulary, seed)
    session.start(case.batch, case.length)
    before = now()
    written = session.read(tokens_BS)
    prompt_seconds = now() - before
    tokens: list[float] = []
    begin = wall()
    for number in range(1, case.new_tokens):
        before = now()
        written = session.read(written[:, None])
        tokens.append(now() - before)
        if number >= _LEAST_TOKENS and wall() - begin > limit:
            break
    return Repetition(prompt_seconds, tokens)


def _tokens(batch: int, count: int, vocabulary: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, vocabulary, (batch, count))
