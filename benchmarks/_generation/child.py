"""One contender in a process of its own: it reads prompts and writes tokens, each pass timed."""

from __future__ import annotations

import time
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from _generation.shapes import SHAPES, GenerationShape
from harness.child import answer, ask
from harness.memory import resident_bytes

_MODULE: Final = "_generation.child"
#: llama.cpp's types by the names of their contenders.
LLAMA_CPP: Final = {"tq2_0": "TQ2_0", "tq1_0": "TQ1_0"}
#: The contender that is the same decoder in torch.
BFLOAT16: Final = "bfloat16"
#: The fewest tokens that are written, however long they take.
_LEAST_TOKENS: Final = 4


class Session(Protocol):
    """A model that reads and writes."""

    def start(self, batch: int, length: int) -> None:
        """Forget what was read, and make room for ``batch`` sequences of ``length`` tokens."""

    def read(self, tokens_BS: NDArray[np.int64]) -> NDArray[np.int64]:
        """Read tokens of every sequence and return the likeliest next token of each, ``[B]``."""


def measure_contender(
    contender: str,
    shape: str,
    cases: list[tuple[int, int]],
    *,
    new_tokens: int,
    threads: int,
    seconds: float,
    file: str,
) -> list[dict[str, Any]]:
    """Load a contender in a process and measure the cases in their order.

    Args:
        contender: a backend, one of :data:`LLAMA_CPP`, or :data:`BFLOAT16`.
        shape: the name of the model's shape.
        cases: tokens of a prompt, and sequences.
        new_tokens: per sequence; the first of them comes with the prompt.
        threads: that it computes with.
        seconds: about how long each case takes.
        file: the weights, for llama.cpp.

    Returns:
        what :func:`measure_case` returns of each case, and ``base_bytes``: the resident memory
        before there was a model.

    Raises:
        ArbError: the process failed.
    """
    request = {
        "contender": contender,
        "shape": shape,
        "cases": cases,
        "new_tokens": new_tokens,
        "threads": threads,
        "seconds": seconds,
        "file": file,
    }
    found: list[dict[str, Any]] = ask(_MODULE, request, title=contender, threads=threads)["cases"]
    return found


def measure_case(
    session: Session, prompt: int, batch: int, new_tokens: int, vocabulary: int, seconds: float
) -> dict[str, Any]:
    """Repeat a case for about ``seconds``, at least once.

    A repetition whose tokens take longer than that stops early, once it has written a few.

    Returns:
        ``prompt_seconds`` (also the time to the first token) of every repetition; ``token_seconds``
        of every pass that wrote a token of each sequence; ``resident_bytes`` after the last one.
    """
    prompts: list[float] = []
    tokens: list[float] = []
    begin = time.perf_counter()
    while not prompts or time.perf_counter() - begin < seconds:
        ids = np.random.default_rng(len(prompts)).integers(0, vocabulary, (batch, prompt))
        session.start(batch, prompt + new_tokens)
        before = time.perf_counter()
        written = session.read(ids)
        writing = time.perf_counter()
        prompts.append(writing - before)
        for number in range(1, new_tokens):
            before = time.perf_counter()
            written = session.read(written[:, None])
            after = time.perf_counter()
            tokens.append(after - before)
            if number >= _LEAST_TOKENS and after - writing > seconds:
                break
    return {"prompt_seconds": prompts, "token_seconds": tokens, "resident_bytes": resident_bytes()}


def open_session(
    contender: str, shape: GenerationShape, length: int, threads: int, file: str = ""
) -> Session:
    """Load a contender's file, or make its weights, for sequences of ``length`` tokens."""
    if contender in LLAMA_CPP:
        from _generation.llama_cpp import LlamaCpp

        return LlamaCpp(file, shape, threads)
    import torch

    from _generation.decoders import DecoderSession, bfloat16_decoder, ternary_decoder

    torch.set_num_threads(threads)
    if contender == BFLOAT16:
        return DecoderSession(bfloat16_decoder(shape, length), "float")
    return DecoderSession(ternary_decoder(shape, length, contender), "bfloat16")


def respond(request: dict[str, Any]) -> dict[str, Any]:
    """Measure in the process what was asked for."""
    contender = request["contender"]
    threads = request["threads"]
    new_tokens = request["new_tokens"]
    if contender not in LLAMA_CPP:
        # What libraries load and allocate on their first use is not part of the model.
        small = SHAPES["tiny"]
        measure_case(open_session(contender, small, 16, threads), 8, 1, 3, small.vocabulary, 0.0)
    base = resident_bytes()

    shape = SHAPES[request["shape"]]
    length = max(prompt for prompt, _ in request["cases"]) + new_tokens
    session = open_session(contender, shape, length, threads, request["file"])
    measure_case(session, 8, 1, 3, shape.vocabulary, 0.0)  # touches every weight once
    cases = []
    for prompt, batch in request["cases"]:
        found = measure_case(
            session, prompt, batch, new_tokens, shape.vocabulary, request["seconds"]
        )
        cases.append({**found, "base_bytes": base})
    return {"cases": cases}


if __name__ == "__main__":
    answer(respond)
