"""The kernel bench: every cell in turn, its contenders checked, then timed in turns beside the machine's own limits."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

import torch
from attrs import asdict, frozen

from arb_ternary.errors import ArbError
from arb_ternary.run.kernel_bench.cache import last_level_cache
from arb_ternary.run.kernel_bench.cells import Cell, Contender
from arb_ternary.run.kernel_bench.facts import bench_facts, load_average
from arb_ternary.run.kernel_bench.operands import Operands
from arb_ternary.run.kernel_bench.ops import OPS
from arb_ternary.run.kernel_bench.peers import Peer, list_peers, peer_contender
from arb_ternary.run.kernel_bench.probes import Probe, peak_probe, read_probe
from arb_ternary.run.kernel_bench.record import cell_record
from arb_ternary.run.kernel_bench.timing import measure

__all__ = ["FORMAT", "VERSION", "KernelBench", "run_kernel_bench", "with_threads"]

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
        ops: names from :data:`~arb_ternary.run.kernel_bench.ops.OPS`.
        caches: ``hot``, ``cold``, or both.
        peers: that take part.
        threads: of every contender; None leaves torch's number.
        seconds: for each contender of a cell, about.
        cache_bytes: of the last-level cache; None asks the system.
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
                                group_size=in_features if group == "row" else min(group, in_features),
                                cold=cache == "cold",
                                cache_bytes=cache_bytes,
                                threads=threads,
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


def run_kernel_bench(bench: KernelBench, *, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure everything; the content of ``result.json``.

    Raises:
        ArbError: a backend's kernel gives a wrong result.
    """
    cache = last_level_cache()
    cache_bytes = cache.nbytes if bench.cache_bytes is None else bench.cache_bytes
    seed = secrets.randbits(32)
    with with_threads(bench.threads) as threads, torch.no_grad():
        facts = bench_facts(bench.backends)
        reading, peak = read_probe(bench.backends, cache_bytes), peak_probe(bench.backends)
        cells = []
        for number, cell in enumerate(bench.cells(cache_bytes, threads)):
            cells.append(_measure_cell(bench, cell, seed + number, reading, peak, say))
    return {
        "format": FORMAT,
        "version": VERSION,
        "machine": {**facts, "load_average_at_end": load_average()},
        "cache_bytes": cache_bytes,
        "cache_source": cache.source if bench.cache_bytes is None else "given",
        "seed": seed,
        "seconds": bench.seconds,
        "probes": {"read_bandwidth": reading.how, "int8_peak": peak.how},
        "peers": [asdict(listing) for listing in list_peers()],
        "cells": cells,
    }


def _measure_cell(
    bench: KernelBench, cell: Cell, seed: int, reading: Probe, peak: Probe, say: Callable[[str], None]
) -> dict[str, Any]:
    contenders, excluded = _contenders(bench, cell, Operands(cell, seed))
    variants = [contender.variant for contender in contenders]
    timings = measure([*variants, reading.variant, peak.variant], bench.seconds)
    record = cell_record(cell, contenders, excluded, timings, reading.variant, peak.variant)
    best = min((row for row in record["rows"] if row["role"] == "backend"), key=lambda row: row["seconds_min"])
    say(f"{cell.title}: {best['name']} {best['seconds_min'] * 1e6:,.1f} us")
    return record


def _contenders(bench: KernelBench, cell: Cell, operands: Operands) -> tuple[list[Contender], list[dict[str, str]]]:
    """Who takes part, each checked, and who cannot, with reasons. A backend that is wrong ends the bench."""
    found = OPS[cell.op].contenders(cell, operands, bench.backends)
    excluded = []
    for peer in bench.peers if OPS[cell.op].peers else ():
        reason = peer.serves(cell)
        if reason is None:
            found.append(peer_contender(peer, cell, operands))
        else:
            excluded.append({"name": peer.name, "reason": reason})
    taking_part: list[Contender] = []
    for contender in found:
        try:
            contender.check()
        except ArbError as error:
            if contender.role == "backend":
                raise
            excluded.append({"name": contender.variant.name, "reason": error.what})
        else:
            taking_part.append(contender)
    return taking_part, excluded
