"""The generation bench: contenders take turns to read prompts and to write tokens."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping
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
from arb_ternary_bench.machine import bench_facts, load_average
from arb_ternary_bench.memory import available_bytes

FORMAT: Final = "arb-bench-generate"
VERSION: Final = 1
#: Contenders whose rates the others are compared with.
_BASELINES: Final = ("tq2_0", "bfloat16")
#: Disk that is left free when files are written.
_DISK_ROOM: Final = 1 << 30

Say = Callable[[str], None]


@frozen(kw_only=True)
class GenerateBench:
    """Options of the generation bench.

    Attributes:
        shapes: of the models.
        contenders: names; see :class:`~arb_ternary_bench.generation.contenders.Contender`.
        prompts: tokens of a prompt.
        batches: sequences at a time.
        new_tokens: per sequence.
        group_size: weights that share an exponent, on backends.
        threads: of every contender.
        seconds: about how long each case of a contender takes in each round.
        rounds: every contender has one turn in each.
        limit: prompts that would take more seconds are left out.
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
        """Return all cases, the quicker ones first."""
        every = [
            Case(prompt=prompt, batch=batch, new_tokens=self.new_tokens)
            for prompt in self.prompts
            for batch in self.batches
        ]
        return sorted(every, key=lambda case: (case.prompt * case.batch, case.batch))

    def members(self) -> list[Contender]:
        """Return the contenders."""
        return [
            Contender(name=name, group_size=self.group_size, threads=self.threads)
            for name in self.contenders
        ]

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends among the contenders."""
        found = [each.backend for each in self.members()]
        return tuple(dict.fromkeys(backend for backend in found if backend is not None))


@define
class _Samples:
    """Results of all rounds for one contender in one case."""

    prompt_seconds: list[float] = field(factory=list)
    token_seconds: list[float] = field(factory=list)
    resident: int = 0
    #: Why the case was left out, if it was.
    left_out: str = ""

    def add(self, measured: Mapping[str, Any]) -> None:
        """Take in what one round gave."""
        if "left_out" in measured:
            self.left_out = measured["left_out"]
            return
        self.prompt_seconds += measured["prompt_seconds"]
        self.token_seconds += measured["token_seconds"]
        self.resident = max(self.resident, measured["resident_bytes"])


@define(eq=False)
class _Measured:
    """Results so far of one contender on one shape."""

    contender: Contender
    cases: dict[Case, _Samples]
    base_bytes: int = 0
    weight_bytes: int = 0

    def add(self, measured: Mapping[str, Any]) -> None:
        """Take in what one round gave."""
        self.base_bytes = measured["base_bytes"]
        self.weight_bytes = measured["weight_bytes"]
        for samples, one in zip(self.cases.values(), measured["cases"], strict=True):
            samples.add(one)

    def summary(self) -> str:
        """Describe the rates in one line."""
        parts = []
        for case, samples in self.cases.items():
            if samples.prompt_seconds:
                read = case.batch * case.prompt / statistics.median(samples.prompt_seconds)
                written = case.batch / statistics.median(samples.token_seconds)
                parts.append(
                    f"{case.prompt} x {case.batch}: {read:,.1f} read and {written:,.1f} written "
                    "per second"
                )
        return "; ".join(parts)

    def row(self, shape: GenerationShape, case: Case) -> dict[str, Any]:
        """Return the row of a case that was measured."""
        samples = self.cases[case]
        prompt = statistics.median(samples.prompt_seconds)
        token = statistics.median(samples.token_seconds)
        read = case.batch * case.prompt
        return {
            "shape": shape.name,
            "prompt": case.prompt,
            "batch": case.batch,
            "contender": self.contender.name,
            "name": self.contender.title,
            "prefill_tokens_per_second": read / prompt,
            "prefill_tokens_per_second_best": read / min(samples.prompt_seconds),
            "decode_tokens_per_second": case.batch / token,
            "decode_tokens_per_second_best": case.batch / min(samples.token_seconds),
            "first_token_seconds": prompt,
            "prompts_read": len(samples.prompt_seconds),
            "passes": len(samples.token_seconds),
            "weight_bytes": self.weight_bytes,
            "bytes_per_second": self.weight_bytes / token,
            "resident_bytes": samples.resident,
            "base_bytes": self.base_bytes,
        }


def run_generate_bench(bench: GenerateBench, *, say: Say = lambda _: None) -> dict[str, Any]:
    """Measure everything; return the content of ``result.json``.

    Raises:
        ArbError: a backend's process fails; others that fail are left out with the reason.
    """
    facts = {**bench_facts(bench.backends), "threads": bench.threads}
    library = installed()
    run = _Run(bench, say)
    for shape in bench.shapes:
        run.measure_shape(shape)
    best = max((rate["bytes_per_second"] for rate in run.rates), default=None)
    for row in run.rows:
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
        "read_bandwidths": run.rates,
        "shapes": [
            {**asdict(shape), "weights": shape.weights(), "weights_read": shape.weights_read()}
            for shape in bench.shapes
        ],
        "excluded": run.excluded,
        "rows": run.rows,
    }


@define(eq=False)
class _Run:
    """A run of the bench: what was measured so far, and what was left out."""

    bench: GenerateBench
    say: Say
    rows: list[dict[str, Any]] = field(factory=list)
    rates: list[dict[str, Any]] = field(factory=list)
    excluded: list[dict[str, str]] = field(factory=list)

    def measure_shape(self, shape: GenerationShape) -> None:
        """Measure every contender that can hold a shape."""
        bench = self.bench
        cases = bench.cases()
        with tempfile.TemporaryDirectory(prefix="arb-bench-generate-") as name:
            ready = self._ready(shape, Path(name))
            for _ in range(bench.rounds if ready else 0):
                seconds = min(bench.seconds, 1.0)
                rate = measure_bandwidth(bench.backends, bench.threads, seconds, bench.clock)
                self.rates.append(rate)
                for measured in list(ready):
                    if not self._take_turn(measured, shape, ready[measured]):
                        del ready[measured]

        for case in cases:
            found = [each for each in ready if each.cases[case].prompt_seconds]
            self.rows += _with_ratios([each.row(shape, case) for each in found])
            where = f"{shape.name}, prompt {case.prompt}, batch {case.batch}"
            for each in ready:
                if each not in found:
                    reason = each.cases[case].left_out
                    self.excluded.append(
                        {"shape": where, "name": each.contender.title, "reason": reason}
                    )

    def _ready(self, shape: GenerationShape, folder: Path) -> dict[_Measured, Path | None]:
        """Return the contenders that can take part, with the file of those that read one."""
        cases = self.bench.cases()
        length = max(case.length for case in cases)
        ready: dict[_Measured, Path | None] = {}
        for contender in self.bench.members():
            reason = (
                missing(contender.name)
                or obstacle(contender, shape)
                or _short_of(contender, shape, length, max(self.bench.batches), folder)
            )
            if reason is not None:
                self._leave_out(shape, contender, reason)
                continue
            file = None
            if contender.name in LLAMA_CPP:
                file = folder / f"{contender.name}.gguf"
                write_random_gguf(file, shape, LLAMA_CPP[contender.name], length)
            ready[_Measured(contender, {case: _Samples() for case in cases})] = file
        return ready

    def _take_turn(self, measured: _Measured, shape: GenerationShape, file: Path | None) -> bool:
        """Measure all cases of a contender once; False if it failed and is left out."""
        contender = measured.contender
        bench = self.bench
        try:
            found = measure_contender(
                contender,
                shape,
                list(measured.cases),
                seconds=bench.seconds,
                limit=bench.limit,
                clock=bench.clock,
                file=file,
            )
        except ArbError as error:
            if contender.backend is not None:
                raise
            self._leave_out(shape, contender, error.what)
            return False
        measured.add(found)
        self.say(f"{shape.name}, {contender.title}: {measured.summary()}")
        return True

    def _leave_out(self, shape: GenerationShape, contender: Contender, reason: str) -> None:
        self.excluded.append({"shape": shape.name, "name": contender.title, "reason": reason})
        self.say(f"{shape.name}, {contender.title}: left out: {reason}")


def _short_of(
    contender: Contender, shape: GenerationShape, length: int, batch: int, folder: Path
) -> str | None:
    """Return what this machine has too little of for a contender, or None."""
    needed = needed_bytes(contender, shape, length, batch)
    free = available_bytes()
    if free is not None and needed > free:
        return (
            f"it takes about {needed / 2**30:.1f} GiB of memory; {free / 2**30:.1f} GiB are "
            "available"
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


def _with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each row of a case how many times as fast it is as the baselines."""
    by_name = {row["contender"]: row for row in rows}
    for row in rows:
        for what in ("prefill", "decode"):
            key = f"{what}_tokens_per_second"
            ratios: dict[str, float | None] = dict.fromkeys(_BASELINES)
            for name in _BASELINES:
                if name in by_name:
                    ratios[name] = row[key] / by_name[name][key]
            row[f"{what}_ratio"] = ratios
    return rows
