"""`arb serve` beside llama.cpp's server, on the same GGUF files of random ternary weights.

Both servers run at the same time and are asked in turns: some requests at once, each with a prompt
of its own, answered greedily and streamed over HTTP. Needs the extras ``peers`` and ``studies`` and
the package ``arb-ternary-serve``.
"""

from __future__ import annotations

import random
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from attrs import asdict, frozen

from arb_ternary.config.options import option, positive
from arb_ternary.errors import ArbError, UsageProblem
from arb_ternary_bench.child import AnsweringChild, Child, start_arb
from arb_ternary_bench.generation.gguf_file import write_random_gguf
from arb_ternary_bench.generation.shapes import SHAPES
from arb_ternary_bench.machine import bench_facts, describe, load_average
from arb_ternary_bench.serving.client import Round, ask_together
from arb_ternary_bench.study import Session, Study
from arb_ternary_bench.table import Column, Record, ResultTable, number, ratio

#: Seconds in which a server has to be ready.
_READY: Final = 300.0


@frozen(kw_only=True)
class ServingOptions:
    """Options of the study."""

    shapes: tuple[str, ...] = option(("125m", "1b", "2b"), "shapes of `arb bench generate`")
    sequences: tuple[int, ...] = option((1, 4, 16, 32), "requests that are sent together")
    prompt: int = option(32, "tokens of a prompt", validator=positive)
    new_tokens: int = option(32, "tokens of an answer", validator=positive)
    rounds: int = option(3, "rounds of each server, in turns", validator=positive)
    threads: int = option(2, "threads of each server", validator=positive)


def run(options: ServingOptions, session: Session) -> dict[str, Any]:
    """Start both servers for each shape, and ask them in turns."""
    unknown = [name for name in options.shapes if name not in SHAPES]
    if unknown:
        raise UsageProblem(
            f"shapes: there is no {unknown[0]!r}", f"choose from {', '.join(SHAPES)}"
        )
    session.folder.mkdir(parents=True, exist_ok=True)
    facts = bench_facts([])
    rows: list[dict[str, Any]] = []
    for name in options.shapes:
        file = session.folder / f"{name}.gguf"
        if not file.exists():
            context = 2 * (options.prompt + options.new_tokens)
            write_random_gguf(file, SHAPES[name], "TQ2_0", context, tokenizer=True)
        with _ours(file, options, session) as ours, _theirs(file, options) as theirs:
            rows += _measured(name, {"ours": ours, "theirs": theirs}, options, session)
    return {
        "command": "python -m arb_ternary_bench.study serving",
        "machine": {**facts, "threads": options.threads, "load_average_at_end": load_average()},
        "prompt": options.prompt,
        "new_tokens": options.new_tokens,
        "rounds": options.rounds,
        "rows": rows,
    }


def _measured(
    name: str, origins: Mapping[str, str], options: ServingOptions, session: Session
) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of requests."""
    draw = random.Random(0)
    vocabulary = SHAPES[name].vocabulary

    def prompts(count: int) -> list[list[int]]:
        return [draw.choices(range(300, vocabulary), k=options.prompt) for _ in range(count)]

    for origin in origins.values():
        ask_together(origin, prompts(1), options.new_tokens)
    for count in options.sequences:
        found: dict[str, list[Round]] = {server: [] for server in origins}
        for _ in range(options.rounds):
            asked = prompts(count)
            for server, origin in origins.items():
                found[server].append(ask_together(origin, asked, options.new_tokens))
        medians = {server: _median(rounds) for server, rounds in found.items()}
        rates = [median["tokens_per_second"] for median in medians.values()]
        session.say(f"{name}, {count}: {rates[0]:.1f} and {rates[1]:.1f} tokens/s")
        yield {"shape": name, "sequences": count, **medians}


def _median(rounds: Sequence[Round]) -> dict[str, float]:
    each = [asdict(one) for one in rounds]
    return {key: statistics.median(one[key] for one in each) for key in each[0]}


@contextmanager
def _ours(file: Path, options: ServingOptions, session: Session) -> Iterator[str]:
    """Run ``arb serve``; yield its origin."""
    port = _free_port()
    most = max(options.sequences)
    command = ["serve", str(file), "--port", str(port)]
    command += ["--max-sequences", str(most), "--threads", str(options.threads)]
    child = start_arb(command, options.threads, session.folder / "serve.log")
    origin = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{origin}/health", child)
        yield origin
    finally:
        if child.running:
            child.stop()
            child.wait()


@contextmanager
def _theirs(file: Path, options: ServingOptions) -> Iterator[str]:
    """Run llama.cpp's server; yield its origin."""
    request = {
        "file": str(file),
        "sequences": max(options.sequences),
        "context": 2 * (options.prompt + options.new_tokens),
        "threads": options.threads,
        "port": _free_port(),
    }
    module = "arb_ternary_bench.serving.llama_server"
    started = AnsweringChild.start(
        module, request, title="llama.cpp's server", threads=options.threads
    )
    with started as child:
        yield child.receive()["origin"]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _wait_for(address: str, child: Child) -> None:
    import httpx2

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
STUDY = Study(options=ServingOptions, run=run, table=TABLE)
