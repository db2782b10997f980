"""The kernel bench: every cell in turn, its contenders checked, then timed in turns beside the
machine's own limits.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

import torch
from attrs import asdict, frozen

from arb_ternary.errors import ArbError
from arb_ternary_bench.kernels.cache import Cache, last_level_cache
from arb_ternary_bench.kernels.cells import Cell, Contender
from arb_ternary_bench.kernels.facts import bench_facts, load_average
from arb_ternary_bench.kernels.gpu import (
    SPACING,
    as_graph,
    check_device,
    gpu_clock,
    gpu_facts,
    on_device,
    second_level_cache,
    small,
)
from arb_ternary_bench.kernels.gpu_probes import copy_probe, matrix_probe
from arb_ternary_bench.kernels.operands import Operands
from arb_ternary_bench.kernels.ops import OPS
from arb_ternary_bench.kernels.peers import Peer, list_peers, peer_contender
from arb_ternary_bench.kernels.probes import Probe, peak_probe, read_probe
from arb_ternary_bench.kernels.record import cell_record
from arb_ternary_bench.kernels.timing import Clock, measure, processor_clock

FORMAT: Final = "arb-bench-kernels"
VERSION: Final = 1

Group = int | Literal["row"]


@frozen(kw_only=True)
class KernelBench:
    """What to measure.

    Attributes:
        backends: names.
        shapes: ``(N, K)``.
        rows: values of ``M``.
        groups: group sizes.
        ops: names from :data:`~arb_ternary_bench.kernels.ops.OPS`.
        caches: ``hot``, ``cold``, or both.
        peers: that take part.
        threads: of every contender; None leaves torch's number.
        seconds: for each contender of a cell, about.
        cache_bytes: of the last-level cache; None asks the system.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
    """

    backends: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    groups: tuple[Group, ...]
    ops: tuple[str, ...]
    caches: tuple[str, ...] = ("hot", "cold")
    peers: tuple[Peer, ...] = ()
    threads: int | None = None
    seconds: float = 0.5
    cache_bytes: int | None = None
    device: str = "cpu"

    def cells(self, cache_bytes: int, threads: int) -> Iterator[Cell]:
        """All cells, in the order of the table."""
        for op in self.ops:
            for out_features, in_features in self.shapes:
                for group in self.groups:
                    for rows in self.rows if OPS[op].uses_rows else (1,):
                        for cache in self.caches:
                            yield Cell(
                                op=op,
                                rows=rows,
                                out_features=out_features,
                                in_features=in_features,
                                group_size=in_features
                                if group == "row"
                                else min(group, in_features),
                                cold=cache == "cold",
                                cache_bytes=cache_bytes,
                                threads=threads,
                                device=self.device,
                            )


@contextmanager
def with_threads(threads: int | None) -> Iterator[int]:
    """torch with this many threads; yields how many there are."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


@frozen
class _Limits:
    """Probes of what the machine can do, and how calls are timed on it."""

    reading: Probe
    int8: Probe
    bfloat16: Probe | None

    @property
    def all(self) -> tuple[Probe, ...]:
        return tuple(
            probe for probe in (self.reading, self.int8, self.bfloat16) if probe is not None
        )


def _limits(bench: KernelBench, cache_bytes: int) -> _Limits:
    if bench.device == "cpu":
        return _Limits(read_probe(bench.backends, cache_bytes), peak_probe(bench.backends), None)
    products = (matrix_probe(bench.device, dtype) for dtype in (torch.int8, torch.bfloat16))
    return _Limits(copy_probe(bench.device, cache_bytes), *products)


def _clock(cell: Cell) -> tuple[Clock, float]:
    """Times a call, and what it takes itself."""
    if cell.device == "cpu":
        return processor_clock, 0.0
    return gpu_clock(cell.device, cold=cell.cold, cache_bytes=cell.cache_bytes), SPACING


def _cache_of(device: str) -> Cache:
    return last_level_cache() if device == "cpu" else second_level_cache(device)


def run_kernel_bench(
    bench: KernelBench, *, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure everything; the content of ``result.json``.

    Raises:
        ArbError: a backend's kernel gives a wrong result.
        EnvironmentProblem: the device is not there.
    """
    check_device(bench.device)
    cache = _cache_of(bench.device)
    cache_bytes = cache.nbytes if bench.cache_bytes is None else bench.cache_bytes
    seed = secrets.randbits(32)
    with with_threads(bench.threads) as threads, torch.no_grad(), on_device(bench.device):
        facts = bench_facts(bench.backends)
        limits = _limits(bench, cache_bytes)
        cells = []
        for number, cell in enumerate(bench.cells(cache_bytes, threads)):
            cells.append(_measure_cell(bench, cell, seed + number, limits, say))
    return {
        "format": FORMAT,
        "version": VERSION,
        "device": bench.device,
        "machine": {**facts, "gpu": gpu_facts(bench.device), "load_average_at_end": load_average()},
        "cache_bytes": cache_bytes,
        "cache_source": cache.source if bench.cache_bytes is None else "given",
        "seed": seed,
        "seconds": bench.seconds,
        "probes": {
            "read_bandwidth": limits.reading.how,
            "int8_peak": limits.int8.how,
            "bfloat16_peak": None if limits.bfloat16 is None else limits.bfloat16.how,
        },
        "peers": [asdict(listing) for listing in list_peers(bench.device)],
        "cells": cells,
    }


def _measure_cell(
    bench: KernelBench, cell: Cell, seed: int, limits: _Limits, say: Callable[[str], None]
) -> dict[str, Any]:
    contenders, excluded = _contenders(bench, cell, Operands(cell, seed))
    variants = [contender.variant for contender in contenders]
    clock, spacing = _clock(cell)
    probes = (probe.variant for probe in limits.all)
    timings = measure([*variants, *probes], bench.seconds, clock, spacing=spacing)
    floats = None if limits.bfloat16 is None else limits.bfloat16.variant
    record = cell_record(
        cell, contenders, excluded, timings, limits.reading.variant, limits.int8.variant, floats
    )
    best = min(
        (row for row in record["rows"] if row["role"] == "backend"),
        key=lambda row: row["seconds_min"],
    )
    say(f"{cell.title}: {best['name']} {best['seconds_min'] * 1e6:,.1f} us")
    return record


def _contenders(
    bench: KernelBench, cell: Cell, operands: Operands
) -> tuple[list[Contender], list[dict[str, str]]]:
    """Who takes part, each checked, and who cannot, with reasons. A backend that is wrong ends the
    bench.
    """
    found = OPS[cell.op].contenders(cell, operands, bench.backends)
    excluded = []
    for peer in bench.peers if OPS[cell.op].peers else ():
        reason = peer.serves(cell)
        if reason is None:
            try:
                found.append(peer_contender(peer, cell, operands))
            except Exception as error:  # other people's code, which may refuse in any way
                reason = _refusal(error)
        if reason is not None:
            excluded.append({"name": peer.name, "reason": reason})
    taking_part: list[Contender] = []
    for contender in found:
        try:
            contender.check()
        except (ArbError, RuntimeError) as error:
            # torch's int8 product refuses shapes on a GPU with a RuntimeError; a backend that
            # raises one is at fault.
            if contender.role == "backend":
                raise
            excluded.append({"name": contender.variant.name, "reason": _refusal(error)})
        else:
            taking_part.append(contender)
    if cell.device != "cpu" and small(cell):
        taking_part = [as_graph(contender) for contender in taking_part]
    return taking_part, excluded


def _refusal(error: Exception) -> str:
    if isinstance(error, ArbError):
        return error.what
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
