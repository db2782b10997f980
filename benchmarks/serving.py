"""`arb serve` beside llama.cpp's server, on the same GGUF files of random ternary weights.

Both servers run at the same time and are asked in turns: some requests at once, each with a prompt
of its own, answered greedily and streamed over HTTP. Needs ``pip install xllamacpp gguf httpx2``.
"""

from __future__ import annotations

import json
import random
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx2
from attrs import frozen

from _generation.gguf_file import write_random_gguf
from _generation.shapes import SHAPES
from arb_ternary.config.options import option, positive
from arb_ternary.errors import ArbError, UsageProblem
from harness.child import Child, start_module
from harness.machine import describe, load_average, machine_facts
from harness.parallel import in_parallel
from harness.script import main, say
from harness.study import Study
from harness.table import Column, Record, ResultTable, number, ratio

#: Seconds in which a server has to be ready.
_READY: Final = 300.0
#: Seconds without a byte after which a server is taken for dead.
_PATIENCE: Final = 900.0


@frozen(kw_only=True)
class ServingOptions:
    """Options of the script."""

    shapes: tuple[str, ...] = option(("125m", "1b", "2b"), "shapes of generation.py")
    sequences: tuple[int, ...] = option((1, 4, 16, 32), "requests that are sent together")
    prompt: int = option(32, "tokens of a prompt", validator=positive)
    new_tokens: int = option(32, "tokens of an answer", validator=positive)
    rounds: int = option(3, "rounds of each server, in turns", validator=positive)
    threads: int = option(2, "threads of each server", validator=positive)

    @property
    def context(self) -> int:
        """Positions per sequence that a server has room for."""
        return 2 * (self.prompt + self.new_tokens)


# --- requests


def ask_together(
    origin: str, prompts: Sequence[Sequence[int]], new_tokens: int
) -> dict[str, float]:
    """Send prompts at once and read the greedy answers as they come.

    Args:
        origin: scheme, host and port of a server of the OpenAI API.
        prompts: ids of each prompt.
        new_tokens: tokens of each answer.

    Returns:
        ``tokens_per_second`` of all answers, from the first request to the end of the last answer;
        ``first_token``, the median of the seconds to the first token of an answer, and
        ``last_first_token``, the most.

    Raises:
        ArbError: an answer is refused, or has fewer tokens.
    """
    limits = httpx2.Limits(max_connections=None)
    with httpx2.Client(base_url=origin, limits=limits, timeout=_PATIENCE) as client:
        started = time.monotonic()
        ask = partial(_first_token, client, new_tokens)
        firsts = in_parallel(ask, prompts, len(prompts))
        seconds = time.monotonic() - started
    waits = [first - started for first in firsts]
    return {
        "tokens_per_second": len(prompts) * new_tokens / seconds,
        "first_token": statistics.median(waits),
        "last_first_token": max(waits),
    }


def _first_token(client: httpx2.Client, new_tokens: int, prompt: Sequence[int]) -> float:
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
    with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            text = answer.read().decode(errors="replace")
            raise ArbError(f"{client.base_url}: {answer.status_code}: {text[:200]}")
        for line in answer.iter_lines():
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


# --- servers


@contextmanager
def _running(command: list[str], file: Path, options: ServingOptions) -> Iterator[str]:
    """Run a server, a module with arguments, on a file; yield its origin."""
    port = str(_free_port())
    module, *arguments = command
    arguments += [str(file), "--port", port, "--threads", str(options.threads)]
    arguments += ["--max-sequences", str(max(options.sequences))]
    log = file.with_name(f"{module}.log")
    child = start_module(module, arguments, log, threads=options.threads)
    origin = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{origin}/health", child)
        yield origin
    finally:
        if child.process.returncode is None:
            child.process.terminate()
            child.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for(address: str, child: Child) -> None:
    limit = time.monotonic() + _READY
    while time.monotonic() < limit:
        try:
            httpx2.get(address).raise_for_status()
            return
        except httpx2.HTTPError:
            time.sleep(0.2)
        ended = child.poll()
        if ended is not None:
            raise ArbError(f"{child.title} ended with {ended.code}", child.log_tail())
    raise ArbError(f"{child.title}: not ready after {_READY:g} seconds", child.log_tail())


# --- the measurement


def run(options: ServingOptions, folder: Path) -> dict[str, Any]:
    """Start both servers for each shape, and ask them in turns."""
    for name in options.shapes:
        if name not in SHAPES:
            raise UsageProblem(f"shapes: there is no {name!r}", f"choose from {', '.join(SHAPES)}")
    folder.mkdir(parents=True, exist_ok=True)
    facts = machine_facts()
    rows: list[dict[str, Any]] = []
    for name in options.shapes:
        file = folder / f"{name}.gguf"
        if not file.exists():
            write_random_gguf(file, SHAPES[name], "TQ2_0", options.context, tokenizer=True)
        other = ["_serving.llama_server", "--context", str(options.context)]
        with (
            _running(["arb_ternary", "serve"], file, options) as ours,
            _running(other, file, options) as theirs,
        ):
            rows += _measured(name, {"ours": ours, "theirs": theirs}, options)
    return {
        "command": "python benchmarks/serving.py",
        "machine": {**facts, "threads": options.threads, "load_average_at_end": load_average()},
        "prompt": options.prompt,
        "new_tokens": options.new_tokens,
        "rounds": options.rounds,
        "rows": rows,
    }


def _measured(
    name: str, origins: dict[str, str], options: ServingOptions
) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of requests."""
    draw = random.Random(0)
    ids = range(300, SHAPES[name].vocabulary)

    def prompts(count: int) -> list[list[int]]:
        return [draw.choices(ids, k=options.prompt) for _ in range(count)]

    for origin in origins.values():
        ask_together(origin, prompts(1), options.new_tokens)
    for count in options.sequences:
        rounds: dict[str, list[dict[str, float]]] = {server: [] for server in origins}
        for _ in range(options.rounds):
            asked = prompts(count)
            for server, origin in origins.items():
                rounds[server].append(ask_together(origin, asked, options.new_tokens))
        row: dict[str, Any] = {"shape": name, "sequences": count}
        for server, each in rounds.items():
            row[server] = {key: statistics.median(one[key] for one in each) for key in each[0]}
            say(f"{name}, {count}, {server}: {row[server]['tokens_per_second']:.1f} tokens/s")
        yield row


def notes(result: Record) -> list[str]:
    """Return what was asked, and where."""
    return [
        f"Random weights, TQ2_0 files for both servers. Prompts of {result['prompt']} tokens, "
        f"answers of {result['new_tokens']}; tokens per second count the time in which prompts are "
        f"read. Medians of {result['rounds']} rounds. {describe(result['machine'])}"
    ]


TABLE = ResultTable(
    columns=(
        Column("weights", lambda row: SHAPES[row["shape"]].what),
        Column("requests", lambda row: str(row["sequences"])),
        Column("tokens/s", lambda row: number(row["ours"]["tokens_per_second"], 1)),
        Column("llama.cpp", lambda row: number(row["theirs"]["tokens_per_second"], 1)),
        Column(
            "ratio",
            lambda row: ratio(
                row["ours"]["tokens_per_second"] / row["theirs"]["tokens_per_second"]
            ),
        ),
        Column("first token, ms", lambda row: number(row["ours"]["first_token"], 0, 1e3)),
        Column("llama.cpp, ms", lambda row: number(row["theirs"]["first_token"], 0, 1e3)),
    ),
    records=lambda result: result["rows"],
    notes=notes,
)
STUDY = Study(name="serving", options=ServingOptions, run=run, table=TABLE)

if __name__ == "__main__":
    main(STUDY.command())
