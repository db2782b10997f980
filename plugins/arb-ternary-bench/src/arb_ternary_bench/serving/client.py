"""Requests to a server, all at once, and how long their answers took."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any, Final

from attrs import frozen

from arb_ternary.errors import ArbError

#: Seconds without a byte after which a server is taken for dead.
_PATIENCE: Final = 900.0


@frozen
class Round:
    """Answers to requests that were sent together.

    Attributes:
        tokens_per_second: tokens of all answers over the time from the first request to the end of
            the last answer; prompts are read within it.
        first_token: median over the answers of the seconds to the first token.
        last_first_token: the same, the largest.
    """

    tokens_per_second: float
    first_token: float
    last_first_token: float


def ask_together(origin: str, prompts: Sequence[Sequence[int]], new_tokens: int) -> Round:
    """Send prompts at once, read the greedy answers as they come.

    Args:
        origin: scheme, host and port of a server of the OpenAI API.
        prompts: ids of each prompt.
        new_tokens: tokens of each answer.

    Raises:
        ArbError: an answer is refused, or has fewer tokens.
    """
    return asyncio.run(_together(origin, prompts, new_tokens))


async def _together(origin: str, prompts: Sequence[Sequence[int]], new_tokens: int) -> Round:
    import httpx2

    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=origin, limits=limits, timeout=_PATIENCE) as client:
        started = time.monotonic()
        firsts = await asyncio.gather(*(_first(client, ids, new_tokens) for ids in prompts))
        seconds = time.monotonic() - started
    waits = [first - started for first in firsts]
    rate = len(prompts) * new_tokens / seconds
    return Round(rate, statistics.median(waits), max(waits))


async def _first(client: Any, prompt: Sequence[int], new_tokens: int) -> float:
    """Read one answer to its end; return when its first token came."""
    body = {
        "prompt": list(prompt),
        "max_tokens": new_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first: float | None = None
    drawn = 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            text = (await answer.aread()).decode(errors="replace")
            raise ArbError(f"{client.base_url}: {answer.status_code}: {text[:200]}")
        async for line in answer.aiter_lines():
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if first is None and chunk.get("choices"):
                first = time.monotonic()
            usage = chunk.get("usage") or {}
            drawn = usage.get("completion_tokens", drawn)
    if first is None or drawn != new_tokens:
        raise ArbError(f"{client.base_url}: an answer has {drawn} tokens instead of {new_tokens}")
    return first
