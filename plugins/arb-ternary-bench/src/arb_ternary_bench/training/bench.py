"""The training bench: whole steps of decoders, every way of training in a process of its own, in
turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

from attrs import asdict, define, field, frozen

from arb_ternary.backends.select import get_backend
from arb_ternary.errors import ArbError
from arb_ternary_bench.kernels.facts import bench_facts, load_average
from arb_ternary_bench.kernels.timing import Variant, measure
from arb_ternary_bench.steps.resident import available_bytes
from arb_ternary_bench.training.parts import CALLS
from arb_ternary_bench.training.processes import Asked, TrainProcess
from arb_ternary_bench.training.sizes import TrainSize
from arb_ternary_bench.training.trainees import TrainWay

FORMAT: Final = "arb-bench-train"
VERSION: Final = 1
#: By what a step is timed: the clock on the wall, or the time that its process had on processors.
CLOCKS: Final = ("wall", "processor")
# : Turns in which processes that do not fit into the memory together are started, one after the
# other.
_ROUNDS: Final = 2
#: What a process holds without a model, about, and what must stay free.
_PROCESS: Final = 450 << 20
_SPARE: Final = 1 << 30
#: Bytes a weight in training, gradients and copies of a step included.
_BYTES: Final[Mapping[str, float]] = {"votes": 2.5, "float": 22.0, "qat": 28.0}


@frozen(kw_only=True)
class TrainBench:
    """What to measure.

    Attributes:
        sizes: decoders.
        ways: of training.
        threads: numbers of them, each measured.
        malloc: settings of memory, each measured: ``default``, ``kept``.
        seconds: that each way is timed for, about.
        profile: whether steps are split into parts, in further processes.
        clock: one of :data:`CLOCKS`.
    """

    sizes: tuple[TrainSize, ...]
    ways: tuple[TrainWay, ...]
    threads: tuple[int, ...] = (1, 2)
    malloc: tuple[str, ...] = ("default",)
    seconds: float = 10.0
    profile: bool = True
    clock: str = "wall"

    def backends(self) -> tuple[str, ...]:
        """Those whose votes take part."""
        return tuple(dict.fromkeys(way.backend for way in self.ways if way.backend is not None))


def run_train_bench(
    bench: TrainBench, *, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure everything; the content of ``result.json``.

    Raises:
        ArbError: a way of training fails or does not learn. One that is compiled, or needs a plugin
            that is not here, or more memory than there is, is left out with the reason.
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


@define
class _Measured:
    """What is known of one contender."""

    asked: Asked
    facts: dict[str, Any] = field(factory=dict)
    least: list[float] = field(factory=list)
    medians: list[float] = field(factory=list)
    steps: int = 0
    wall: float = float("inf")
    processor: float = float("inf")
    peak_bytes: int = 0
    split: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return (
            self.asked.way.name
            if self.asked.malloc == "default"
            else f"{self.asked.way.name}, malloc kept"
        )


def _measure_cell(
    bench: TrainBench, size: TrainSize, threads: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """One decoder with one number of threads."""
    load = load_average()
    excluded = []
    fitting = []
    for asked in _contenders(bench, size, threads):
        reason = _missing(asked)
        if reason is None:
            fitting.append(_Measured(asked))
        else:
            excluded.append({"name": asked.way.name, "reason": reason})
    alone = sum(map(_needed, (each.asked for each in fitting))) > _free()
    rounds = _ROUNDS if alone else 1
    groups = [[each] for each in fitting] if alone else [fitting]
    say(
        f"{size.name}, {threads} threads: {len(fitting)} ways of "
        f"training{', one at a time' if alone else ''}"
    )
    for _ in range(rounds):
        for group in groups:
            failed = _measure_group(group, bench, bench.seconds / rounds, say)
            excluded.extend(failed)
            left_out = {each["name"] for each in failed}
            fitting = [each for each in fitting if each.name not in left_out]
            groups = [[one for one in each if one.name not in left_out] for each in groups]
    for each in fitting if bench.profile else ():
        each.split = TrainProcess.profiled(each.asked)
        say(f"{size.name}, {threads} threads: {each.name} profiled")
    return {
        "size": size.name,
        "shape": asdict(size),
        "tokens": size.tokens,
        "threads": threads,
        "in_turns": "processes side by side"
        if not alone
        else f"one process at a time, {_ROUNDS} rounds",
        "load_average": load,
        "load_average_at_end": load_average(),
        "excluded": excluded,
        "rows": with_ratios([_row(each, bench.clock) for each in fitting]),
    }


def _contenders(bench: TrainBench, size: TrainSize, threads: int) -> Iterator[Asked]:
    for way in bench.ways:
        for malloc in bench.malloc:
            yield Asked(way=way, size=size, threads=threads, malloc=malloc)


def _missing(asked: Asked) -> str | None:
    """Why a contender cannot take part here; None where it can."""
    try:
        asked.way.config(asked.size)
    except ArbError as error:
        if asked.way.role == "votes":
            raise
        return str(error)
    needed = _needed(asked)
    free = _free()
    if needed > free:
        return f"it takes about {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
    return None


def _needed(asked: Asked) -> float:
    return _PROCESS + _BYTES[asked.way.role] * asked.size.weights() + asked.size.activation_bytes()


def _free() -> float:
    free = available_bytes()
    return float("inf") if free is None else free - _SPARE


def _measure_group(
    group: Sequence[_Measured], bench: TrainBench, seconds: float, say: Callable[[str], None]
) -> list[dict[str, str]]:
    """Start the processes of a group, time their steps in turns, and end them; who is left out, and
    why.
    """
    excluded: list[dict[str, str]] = []
    with ExitStack() as stack:
        running: list[tuple[_Measured, TrainProcess]] = []
        for each in group:
            try:
                process = stack.enter_context(TrainProcess(each.asked))
            except ArbError as error:
                if not each.asked.way.compiled:
                    raise
                excluded.append({"name": each.name, "reason": str(error)})
                continue
            each.facts = process.facts
            running.append((each, process))
        variants = [
            Variant(name=each.name, call=_timed(each, process, bench.clock), reports_seconds=True)
            for each, process in running
        ]
        timings = measure(variants, seconds)
        for each, process in running:
            timing = timings[each.name]
            each.least.append(timing.least)
            each.medians.append(timing.median)
            each.steps += timing.calls
            each.peak_bytes = max(each.peak_bytes, process.peak_bytes())
            say(
                f"{each.asked.size.name}, {each.asked.threads} threads: {each.name} "
                f"{timing.least * 1e3:,.1f} ms"
            )
    return excluded


def _timed(each: _Measured, process: TrainProcess, clock: str) -> Callable[[int], float]:
    def call(i: int) -> float:
        process.step(i)
        each.wall = min(each.wall, process.last["wall"])
        each.processor = min(each.processor, process.last["processor"])
        return process.last[clock]

    return call


def _row(each: _Measured, clock: str) -> dict[str, Any]:
    least = min(each.least)
    facts = each.facts
    asked = each.asked
    split = each.split
    return {
        "name": each.name,
        "way": asked.way.name,
        "malloc": asked.malloc,
        "role": asked.way.role,
        "compiled": asked.way.compiled,
        "what": asked.way.what(),
        "seconds_min": least,
        "seconds_median": statistics.median(each.medians),
        "wall_seconds_min": each.wall,
        "processor_seconds_min": each.processor,
        "steps": each.steps,
        "tokens_per_second": asked.size.tokens / least,
        "losses": facts["losses"],
        "parameters": facts["parameters"],
        "pure": facts["pure"],
        "base_bytes": facts["base_bytes"],
        "peak_bytes": each.peak_bytes,
        "state_bytes_per_parameter": facts["state_bytes"] / facts["parameters"],
        "parts": None if split is None else parts_of_step(split["parts"], least),
        "profile": split,
    }


def parts_of_step(profiled: Mapping[str, float], seconds: float) -> dict[str, float]:
    """The parts of a step of ``seconds``, from those of a profiled one.

    The profiler's own cost falls on calls, of which there are thousands, and hardly on kernels: the
    parts keep their times, and calls are what is left of the step. Where the profiled step was the
    shorter one, or nothing would be left, the machine was not equally fast for both: then all parts
    are scaled to the step.
    """
    computed = {part: each for part, each in profiled.items() if part != CALLS}
    total = sum(profiled.values())
    left = seconds - sum(computed.values())
    if 0 <= left <= profiled[CALLS]:
        return {**computed, CALLS: left}
    return {part: each * seconds / total for part, each in profiled.items()}


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each with how many times as fast it is as the fastest float way and as QAT through
    a compiler.
    """
    fastest = min((row["seconds_min"] for row in rows if row["role"] == "float"), default=None)
    qat = [row["seconds_min"] for row in rows if row["role"] == "qat" and row["compiled"]]
    compiled = min(qat, default=None)
    return [
        {
            **row,
            "x_best_float": fastest and fastest / row["seconds_min"],
            "x_qat_compiled": compiled and compiled / row["seconds_min"],
        }
        for row in rows
    ]
