"""The training bench: whole steps of decoders, every way of training in a process of its own."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

from attrs import asdict, define, field, frozen

from arb_ternary.backends.select import get_backend
from arb_ternary.errors import ArbError
from arb_ternary_bench.kernels.timing import Variant, measure
from arb_ternary_bench.machine import bench_facts, load_average
from arb_ternary_bench.memory import available_bytes
from arb_ternary_bench.training.child import Trainee, TrainProcess
from arb_ternary_bench.training.parts import CALLS
from arb_ternary_bench.training.sizes import TrainSize
from arb_ternary_bench.training.trainees import TrainWay

FORMAT: Final = "arb-bench-train"
VERSION: Final = 1
#: Clocks of a step: on the wall, or the time that its process had on processors.
CLOCKS: Final = ("wall", "processor")
#: How often processes that do not fit into memory together are started, one after the other.
_ROUNDS: Final = 2
#: What a process holds without a model, about, and what must stay free.
_PROCESS: Final = 450 << 20
_SPARE: Final = 1 << 30
#: Bytes per weight in training, gradients and copies within a step included.
_BYTES: Final[Mapping[str, float]] = {"votes": 2.5, "float": 22.0, "qat": 28.0}

Say = Callable[[str], None]


@frozen(kw_only=True)
class TrainBench:
    """Options of the training bench.

    Attributes:
        sizes: decoders.
        ways: of training.
        threads: numbers of threads, each measured.
        seconds: about how long each way is timed.
        profile: whether steps are split into parts, in further processes.
        clock: one of :data:`CLOCKS`.
    """

    sizes: tuple[TrainSize, ...]
    ways: tuple[TrainWay, ...]
    threads: tuple[int, ...] = (1, 2)
    seconds: float = 10.0
    profile: bool = True
    clock: str = "wall"

    def backends(self) -> tuple[str, ...]:
        """Return the backends whose votes take part."""
        return tuple(dict.fromkeys(way.backend for way in self.ways if way.backend is not None))

    def trainees(self, size: TrainSize, threads: int) -> list[Trainee]:
        """Return what is measured of a decoder."""
        return [Trainee(way=way, size=size, threads=threads) for way in self.ways]


def run_train_bench(bench: TrainBench, *, say: Say = lambda _: None) -> dict[str, Any]:
    """Measure everything; return the content of ``result.json``.

    Raises:
        ArbError: a way of training fails or does not learn. One that is compiled, or needs a plugin
            that is not installed, or more memory than there is, is left out with the reason.
    """
    facts = bench_facts(bench.backends())
    sets = {name: getattr(get_backend(name), "isa", None) for name in bench.backends()}
    cells = [
        _measure_cell(bench, size, threads, say)
        for size in bench.sizes
        for threads in bench.threads
    ]
    return {
        "format": FORMAT,
        "version": VERSION,
        "machine": {**facts, "instruction_sets": sets, "load_average_at_end": load_average()},
        "seconds": bench.seconds,
        "clock": bench.clock,
        "cells": cells,
    }


@define(eq=False)
class _Measured:
    """Results so far of one trainee."""

    trainee: Trainee
    facts: dict[str, Any] = field(factory=dict)
    least: list[float] = field(factory=list)
    medians: list[float] = field(factory=list)
    steps: int = 0
    wall: float = float("inf")
    processor: float = float("inf")
    peak_bytes: int = 0
    #: Why it is left out, or None.
    failure: str | None = None

    def timed(self, process: TrainProcess, clock: str) -> Callable[[int], float]:
        """Return a call that takes a step and returns its seconds."""

        def call(_copy: int) -> float:
            process.step()
            self.wall = min(self.wall, process.last["wall"])
            self.processor = min(self.processor, process.last["processor"])
            return process.last[clock]

        return call

    def row(self, split: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return its row of the result; ``split`` are the parts of a profiled step."""
        least = min(self.least)
        facts = self.facts
        way = self.trainee.way
        return {
            "name": way.name,
            "way": way.name,
            "role": way.role,
            "compiled": way.compiled,
            "what": way.what(),
            "seconds_min": least,
            "seconds_median": statistics.median(self.medians),
            "wall_seconds_min": self.wall,
            "processor_seconds_min": self.processor,
            "steps": self.steps,
            "tokens_per_second": self.trainee.size.tokens / least,
            "losses": facts["losses"],
            "parameters": facts["parameters"],
            "pure": facts["pure"],
            "base_bytes": facts["base_bytes"],
            "peak_bytes": self.peak_bytes,
            "state_bytes_per_parameter": facts["state_bytes"] / facts["parameters"],
            "parts": None if split is None else parts_of_step(split["parts"], least),
            "profile": split,
        }


def _measure_cell(bench: TrainBench, size: TrainSize, threads: int, say: Say) -> dict[str, Any]:
    """Measure one decoder with one number of threads."""
    title = f"{size.name}, {threads} threads"
    load = load_average()
    everyone = [_Measured(trainee) for trainee in bench.trainees(size, threads)]
    for each in everyone:
        each.failure = _obstacle(each.trainee)
    fitting = _remaining(everyone)
    together = sum(_needed(each.trainee) for each in fitting) <= _free()
    in_turns = "processes side by side"
    if not together:
        in_turns = f"one process at a time, {_ROUNDS} rounds"
    say(f"{title}: {len(fitting)} ways of training, {in_turns}")

    if together:
        _measure_group(fitting, bench, bench.seconds, say)
    else:
        for _ in range(_ROUNDS):
            for each in _remaining(fitting):
                _measure_group([each], bench, bench.seconds / _ROUNDS, say)

    rows = []
    for each in _remaining(everyone):
        split = None
        if bench.profile:
            split = TrainProcess.profiled(each.trainee)
            say(f"{title}: {each.trainee.way.name} profiled")
        rows.append(each.row(split))
    return {
        "size": size.name,
        "shape": asdict(size),
        "tokens": size.tokens,
        "threads": threads,
        "in_turns": in_turns,
        "load_average": load,
        "load_average_at_end": load_average(),
        "excluded": [
            {"name": each.trainee.way.name, "reason": each.failure}
            for each in everyone
            if each.failure is not None
        ],
        "rows": with_ratios(rows),
    }


def _remaining(group: Sequence[_Measured]) -> list[_Measured]:
    return [each for each in group if each.failure is None]


def _obstacle(trainee: Trainee) -> str | None:
    """Return why a trainee cannot take part here, or None."""
    try:
        trainee.way.config(trainee.size)
    except ArbError as error:
        if trainee.way.role == "votes":
            raise
        return str(error)
    needed = _needed(trainee)
    free = _free()
    if needed > free:
        return f"it takes about {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
    return None


def _needed(trainee: Trainee) -> float:
    size = trainee.size
    return _PROCESS + _BYTES[trainee.way.role] * size.weights() + size.activation_bytes()


def _free() -> float:
    free = available_bytes()
    return float("inf") if free is None else free - _SPARE


def _measure_group(group: Sequence[_Measured], bench: TrainBench, seconds: float, say: Say) -> None:
    """Start the processes of a group, time their steps in turns, and end them."""
    with ExitStack() as stack:
        running: list[tuple[_Measured, TrainProcess]] = []
        for each in group:
            try:
                process = stack.enter_context(TrainProcess(each.trainee))
            except ArbError as error:
                if not each.trainee.way.compiled:
                    raise
                each.failure = str(error)  # no compiler works here
                continue
            each.facts = process.facts
            running.append((each, process))

        variants = [
            Variant(
                name=each.trainee.way.name,
                call=each.timed(process, bench.clock),
                reports_seconds=True,
            )
            for each, process in running
        ]
        timings = measure(variants, seconds)
        for each, process in running:
            timing = timings[each.trainee.way.name]
            each.least.append(timing.least)
            each.medians.append(timing.median)
            each.steps += timing.calls
            each.peak_bytes = max(each.peak_bytes, process.peak_bytes())
            size = each.trainee.size.name
            say(f"{size}: {each.trainee.way.name} {timing.least * 1e3:,.1f} ms")


def parts_of_step(profiled: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return the parts of a step of ``seconds``, from those of a profiled one.

    The profiler's own cost falls on thousands of calls, and hardly on kernels: the parts keep their
    times, and calls are what is left of the step. If the profiled step was the shorter one, or
    nothing would be left, the machine was not equally fast for both: then all parts are scaled to
    the step.
    """
    computed = {part: each for part, each in profiled.items() if part != CALLS}
    total = sum(profiled.values())
    left = seconds - sum(computed.values())
    if 0 <= left <= profiled[CALLS]:
        return {**computed, CALLS: left}
    return {part: each * seconds / total for part, each in profiled.items()}


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each row how many times as fast it is as the best float way and as compiled QAT."""
    floats = [row["seconds_min"] for row in rows if row["role"] == "float"]
    qat = [row["seconds_min"] for row in rows if row["role"] == "qat" and row["compiled"]]
    fastest = min(floats, default=None)
    compiled = min(qat, default=None)
    return [
        {
            **row,
            "x_best_float": fastest and fastest / row["seconds_min"],
            "x_qat_compiled": compiled and compiled / row["seconds_min"],
        }
        for row in rows
    ]
