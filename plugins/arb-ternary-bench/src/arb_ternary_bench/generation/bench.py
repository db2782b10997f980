"""The generation bench: contenders read prompts and write tokens, one process at a time, in
turns.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from attrs import asdict, define, field, frozen

from arb_ternary.errors import ArbError
from arb_ternary_bench.generation.cases import Case, ClockName
from arb_ternary_bench.generation.child import measure_bandwidth, measure_contender
from arb_ternary_bench.generation.contenders import (
    LLAMA_CPP,
    Contender,
    missing,
    needed_bytes,
    obstacle,
)
from arb_ternary_bench.generation.gguf_file import file_bytes, write_random_gguf
from arb_ternary_bench.generation.llama_cpp import installed
from arb_ternary_bench.generation.shapes import GenerationShape, GroupSize
from arb_ternary_bench.kernels.facts import bench_facts, load_average
from arb_ternary_bench.steps.resident import available_bytes

FORMAT: Final = "arb-bench-generate"
VERSION: Final = 1
#: Whose rates others are compared with, by the key of the ratio.
_BASELINES: Final = {"tq2_0": "tq2_0", "bfloat16": "bfloat16"}
#: Disk that is left free when files are written.
_DISK_ROOM: Final = 1 << 30


@frozen(kw_only=True)
class GenerateBench:
    """What to measure.

    Attributes:
        shapes: of the models.
        contenders: names; see :class:`~arb_ternary_bench.generation.contenders.Contender`.
        prompts: tokens of a prompt.
        batches: sequences at a time.
        new_tokens: of each sequence.
        group_size: weights that share an exponent, on backends.
        threads: of every contender.
        seconds: for each case of a contender, in each round.
        rounds: in each of which every contender has a turn.
        limit: seconds; prompts that would take longer are left out.
        clock: ``processor`` only with one thread.
    """

    shapes: tuple[GenerationShape, ...]
    contenders: tuple[str, ...]
    prompts: tuple[int, ...] = (128, 512)
    batches: tuple[int, ...] = (1, 8)
    new_tokens: int = 128
    group_size: GroupSize = 128
    threads: int = 1
    seconds: float = 5.0
    rounds: int = 2
    limit: float = 120.0
    clock: ClockName = "wall"

    def cases(self) -> list[Case]:
        """The quicker ones first."""
        every = [
            Case(prompt=prompt, batch=batch, new_tokens=self.new_tokens)
            for prompt in self.prompts
            for batch in self.batches
        ]
        return sorted(every, key=lambda case: (case.prompt * case.batch, case.batch))

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends among the contenders."""
        found = [
            Contender(name=name, group_size=self.group_size, threads=1).backend
            for name in self.contenders
        ]
        return tuple(dict.fromkeys(backend for backend in found if backend is not None))


@define
class _Samples:
    """What the rounds gave for one contender in one case."""

    prompt_seconds: list[float] = field(factory=list)
    token_seconds: list[float] = field(factory=list)
    resident: int = 0

    def add(self, measured: Mapping[str, Any]) -> None:
        self.prompt_seconds += measured["prompt_seconds"]
        self.token_seconds += measured["token_seconds"]
        self.resident = max(self.resident, measured["resident_bytes"])


def run_generate_bench(
    bench: GenerateBench, *, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure everything; the content of ``result.json``.

    Raises:
        ArbError: a backend's process fails; others that fail are left out with the reason.
    """
    facts = {**bench_facts(bench.backends), "threads": bench.threads}
    library = installed()
    excluded: list[dict[str, str]] = []
    rates: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for shape in bench.shapes:
        rows += _measure_shape(bench, shape, excluded, rates, say)
    best = max((rate["bytes_per_second"] for rate in rates), default=None)
    for row in rows:
        row["of_read_bandwidth"] = None if best is None else row["bytes_per_second"] / best
    return {
        "format": FORMAT,
        "version": VERSION,
        "machine": {**facts, "load_average_at_end": load_average()},
        "llama_cpp": None if library is None else library[1],
        "new_tokens": bench.new_tokens,
        "group_size": bench.group_size,
        "seconds": bench.seconds,
        "rounds": bench.rounds,
        "clock": bench.clock,
        "read_bandwidth": best,
        "read_bandwidths": rates,
        "shapes": [
            {**asdict(shape), "weights": shape.weights(), "weights_read": shape.weights_read()}
            for shape in bench.shapes
        ],
        "excluded": excluded,
        "rows": rows,
    }


def _measure_shape(
    bench: GenerateBench,
    shape: GenerationShape,
    excluded: list[dict[str, str]],
    rates: list[dict[str, Any]],
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    cases = bench.cases()
    length = max(case.length for case in cases)
    samples = {(name, case): _Samples() for name in bench.contenders for case in cases}
    reasons: dict[tuple[str, Case], str] = {}
    held: dict[str, dict[str, int]] = {}
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="arb-bench-generate-"))
        )
        ready: dict[Contender, Path | None] = {}
        for name in bench.contenders:
            contender = Contender(name=name, group_size=bench.group_size, threads=bench.threads)
            reason = (
                missing(name)
                or obstacle(contender, shape)
                or _short_of(contender, shape, length, bench, folder)
            )
            if reason is None:
                ready[contender] = _file(contender, shape, length, folder)
                continue
            _leave_out(excluded, shape, contender, reason, say)
        for _ in range(bench.rounds if ready else 0):
            rates.append(
                measure_bandwidth(
                    bench.backends, bench.threads, min(bench.seconds, 1.0), bench.clock
                )
            )
            for contender, file in list(ready.items()):
                try:
                    measured = measure_contender(
                        contender,
                        shape,
                        cases,
                        seconds=bench.seconds,
                        limit=bench.limit,
                        clock=bench.clock,
                        file=file,
                    )
                except ArbError as error:
                    if contender.backend is not None:
                        raise
                    del ready[contender]
                    reason = (
                        f"{error.what}: "
                        f"{error.hint.splitlines()[-1] if error.hint else 'it says nothing'}"
                    )
                    _leave_out(excluded, shape, contender, reason, say)
                    continue
                held[contender.name] = {
                    key: measured[key] for key in ("base_bytes", "weight_bytes")
                }
                for case, one in zip(cases, measured["cases"], strict=True):
                    if "left_out" in one:
                        reasons[contender.name, case] = one["left_out"]
                    else:
                        samples[contender.name, case].add(one)
                say(f"{shape.name}, {contender.title}: {_summary(samples, contender, cases)}")
    rows = []
    for case in cases:
        found = {name: samples[name, case] for name in held if samples[name, case].prompt_seconds}
        rows += _rows(shape, case, found, held, bench)
        for name in held:
            if name not in found:
                where = f"{shape.name}, prompt {case.prompt}, batch {case.batch}"
                title = Contender(name=name, group_size=bench.group_size, threads=1).title
                excluded.append({"shape": where, "name": title, "reason": reasons[name, case]})
    return rows


def _leave_out(
    excluded: list[dict[str, str]],
    shape: GenerationShape,
    contender: Contender,
    reason: str,
    say: Callable[[str], None],
) -> None:
    excluded.append({"shape": shape.name, "name": contender.title, "reason": reason})
    say(f"{shape.name}, {contender.title}: left out: {reason}")


def _short_of(
    contender: Contender, shape: GenerationShape, length: int, bench: GenerateBench, folder: Path
) -> str | None:
    """What this machine has too little of."""
    needed = needed_bytes(contender, shape, length, max(bench.batches))
    free = available_bytes()
    if free is not None and needed > free:
        return (
            f"it takes about {needed / 2**30:.1f} GiB of memory; {free / 2**30:.1f} GiB are "
            f"available"
        )
    if contender.name in LLAMA_CPP:
        needed = file_bytes(shape, LLAMA_CPP[contender.name]) + _DISK_ROOM
        there = shutil.disk_usage(folder).free
        if needed > there:
            return (
                f"its file needs {needed / 2**30:.1f} GiB in {folder.parent}; "
                f"{there / 2**30:.1f} GiB are free"
            )
    return None


def _file(contender: Contender, shape: GenerationShape, length: int, folder: Path) -> Path | None:
    if contender.name not in LLAMA_CPP:
        return None
    path = folder / f"{contender.name}.gguf"
    write_random_gguf(path, shape, LLAMA_CPP[contender.name], length)
    return path


def _summary(
    samples: Mapping[tuple[str, Case], _Samples], contender: Contender, cases: Sequence[Case]
) -> str:
    parts = []
    for case in cases:
        found = samples[contender.name, case]
        if found.prompt_seconds:
            read = case.batch * case.prompt / statistics.median(found.prompt_seconds)
            written = case.batch / statistics.median(found.token_seconds)
            parts.append(
                f"{case.prompt} x {case.batch}: {read:,.1f} read, {written:,.1f} written a second"
            )
    return "; ".join(parts)


def _rows(
    shape: GenerationShape,
    case: Case,
    found: Mapping[str, _Samples],
    held: Mapping[str, Mapping[str, int]],
    bench: GenerateBench,
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, one in found.items():
        contender = Contender(name=name, group_size=bench.group_size, threads=bench.threads)
        prompt = statistics.median(one.prompt_seconds)
        token = statistics.median(one.token_seconds)
        read = case.batch * case.prompt
        rows.append(
            {
                "shape": shape.name,
                "prompt": case.prompt,
                "batch": case.batch,
                "contender": name,
                "name": contender.title,
                "prefill_tokens_per_second": read / prompt,
                "prefill_tokens_per_second_best": read / min(one.prompt_seconds),
                "decode_tokens_per_second": case.batch / token,
                "decode_tokens_per_second_best": case.batch / min(one.token_seconds),
                "first_token_seconds": prompt,
                "prompts_read": len(one.prompt_seconds),
                "passes": len(one.token_seconds),
                "weight_bytes": held[name]["weight_bytes"],
                "bytes_per_second": held[name]["weight_bytes"] / token,
                "resident_bytes": one.resident,
                "base_bytes": held[name]["base_bytes"],
            }
        )
    by_name = {row["contender"]: row for row in rows}
    for row in rows:
        for what in ("prefill", "decode"):
            key = f"{what}_tokens_per_second"
            row[f"{what}_ratio"] = {
                baseline: row[key] / by_name[name][key] if name in by_name else None
                for baseline, name in _BASELINES.items()
            }
    return rows
