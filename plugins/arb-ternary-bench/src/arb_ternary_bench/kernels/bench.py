"""The kernel bench: in every cell contenders are checked, then timed in turns with the limits."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, Final, Literal

import torch
from attrs import frozen

from arb_ternary.errors import ArbError
from arb_ternary_bench.kernels.cache import Cache, last_level_cache
from arb_ternary_bench.kernels.cells import Cell, Contender
from arb_ternary_bench.kernels.gpu import (
    SPACING,
    as_graph,
    check_device,
    copy_probe,
    gpu_clock,
    gpu_facts,
    matrix_probe,
    on_device,
    second_level_cache,
    small,
)
from arb_ternary_bench.kernels.operands import Operands
from arb_ternary_bench.kernels.ops import OPS
from arb_ternary_bench.kernels.peers import Peer, list_peers, peer_contender
from arb_ternary_bench.kernels.probes import Limits, peak_probe, read_probe
from arb_ternary_bench.kernels.record import cell_record
from arb_ternary_bench.kernels.timing import Clock, measure, processor_clock
from arb_ternary_bench.machine import bench_facts, load_average, with_threads

FORMAT: Final = "arb-bench-kernels"
VERSION: Final = 1

Group = int | Literal["row"]
Say = Callable[[str], None]


@frozen(kw_only=True)
class KernelBench:
    """Options of the kernel bench.

    Attributes:
        backends: names.
        shapes: ``(N, K)``.
        rows: values of ``M``.
        groups: group sizes.
        ops: names from :data:`~arb_ternary_bench.kernels.ops.OPS`.
        caches: ``hot``, ``cold``, or both.
        peers: other libraries that take part.
        threads: of every contender; None keeps torch's number.
        seconds: about how long each contender of a cell is timed.
        cache_bytes: size of the last-level cache; None asks the system.
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
        """Yield all cells, in the order of the table."""
        for op, (out_features, in_features), group in product(self.ops, self.shapes, self.groups):
            rows_of_op = self.rows if OPS[op].uses_rows else (1,)
            for rows, cache in product(rows_of_op, self.caches):
                yield Cell(
                    op=op,
                    rows=rows,
                    out_features=out_features,
                    in_features=in_features,
                    group_size=in_features if group == "row" else min(group, in_features),
                    cold=cache == "cold",
                    cache_bytes=cache_bytes,
                    threads=threads,
                    device=self.device,
                )


def _limits(bench: KernelBench, cache_bytes: int) -> Limits:
    if bench.device == "cpu":
        return Limits(read_probe(bench.backends, cache_bytes), peak_probe(bench.backends))
    return Limits(
        copy_probe(bench.device, cache_bytes),
        matrix_probe(bench.device, torch.int8),
        matrix_probe(bench.device, torch.bfloat16),
    )


def _clock(cell: Cell) -> tuple[Clock, float]:
    """Return what times a call, and how long that takes by itself."""
    if cell.device == "cpu":
        return processor_clock, 0.0
    return gpu_clock(cell.device, cold=cell.cold, cache_bytes=cell.cache_bytes), SPACING


def _cache_of(device: str) -> Cache:
    return last_level_cache() if device == "cpu" else second_level_cache(device)


def run_kernel_bench(bench: KernelBench, *, say: Say = lambda _: None) -> dict[str, Any]:
    """Measure everything; return the content of ``result.json``.

    Raises:
        ArbError: a backend's kernel gives a wrong result.
        EnvironmentProblem: the device is missing.
    """
    check_device(bench.device)
    cache = _cache_of(bench.device)
    cache_bytes = cache.nbytes if bench.cache_bytes is None else bench.cache_bytes
    seed = secrets.randbits(32)
    cells = []
    with with_threads(bench.threads) as threads, torch.no_grad(), on_device(bench.device):
        facts = bench_facts(bench.backends)
        limits = _limits(bench, cache_bytes)
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
        "probes": limits.how(),
        "peers": list_peers(bench.device),
        "cells": cells,
    }


def _measure_cell(
    bench: KernelBench, cell: Cell, seed: int, limits: Limits, say: Say
) -> dict[str, Any]:
    contenders, excluded = _contenders(bench, cell, Operands(cell, seed))
    variants = [contender.variant for contender in contenders] + limits.variants()
    clock, spacing = _clock(cell)
    timings = measure(variants, bench.seconds, clock, spacing=spacing)
    record = cell_record(cell, contenders, excluded, timings, limits)
    backends = [row for row in record["rows"] if row["role"] == "backend"]
    best = min(backends, key=lambda row: row["seconds_min"])
    say(f"{cell.title}: {best['name']} {best['seconds_min'] * 1e6:,.1f} us")
    return record


def _contenders(
    bench: KernelBench, cell: Cell, operands: Operands
) -> tuple[list[Contender], list[dict[str, str]]]:
    """Return who takes part, each checked, and who cannot, with reasons.

    A backend whose result is wrong ends the bench.
    """
    op = OPS[cell.op]
    found = op.contenders(cell, operands, bench.backends)
    excluded = []
    for peer in bench.peers if op.peers else ():
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
            # raises one is wrong.
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
