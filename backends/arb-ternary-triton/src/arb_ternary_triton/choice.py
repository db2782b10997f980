"""Choose the table entry of a call.

Entries measured on this machine come first, then those of the model. If torch is set to use
deterministic algorithms, only those of the model are used. The order of float sums depends on the
tile, so this gives a run the same bits on all machines with that GPU. Integer results have the same
bits with any tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch

from arb_ternary_triton.entries import Entry, Kind, modelled
from arb_ternary_triton.gpu import gpu_of
from arb_ternary_triton.plugin import TUNE
from arb_ternary_triton.tables import bucket_of, user_table

_forced: ContextVar[Entry | None] = ContextVar("arb_ternary_triton_forced", default=None)


@contextmanager
def forced(entry: Entry) -> Iterator[None]:
    """Use this entry, whatever the tables say, while it is measured."""
    token = _forced.set(entry)
    try:
        yield
    finally:
        _forced.reset(token)


def fixed_choices() -> bool:
    """Return whether torch is set to be deterministic.

    The mode that only warns does not count, since tools switch it on to fill memory.
    """
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


@cache
def tunes() -> bool:
    """Return whether tile sizes are measured, as the environment said at the first call."""
    return TUNE.flag()


def chosen_entry(kind: Kind, rows: int, outputs: int, columns: int, device: torch.device) -> Entry:
    """Return the entry for a call on a GPU."""
    forced_entry = _forced.get()
    if forced_entry is not None:
        return forced_entry
    gpu = gpu_of(device)
    if fixed_choices():
        return modelled(kind, rows, gpu)

    bucket = bucket_of(rows, outputs, columns)
    table = user_table(gpu)
    found = table.find(kind, bucket)
    if found is None and tunes() and not torch.cuda.is_current_stream_capturing():
        from arb_ternary_triton.tuning import tune

        found = tune(kind, bucket, gpu, device, table)
    return modelled(kind, rows, gpu) if found is None else found
