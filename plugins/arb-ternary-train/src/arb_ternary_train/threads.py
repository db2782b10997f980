"""The number of threads of a run: ``threads`` of a config.

Sums of floats depend on the number. So it is written into ``run.json`` before the first step, and a
resumed run takes it from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from arb_ternary.environment import given
from arb_ternary.errors import DataError
from arb_ternary_train.directory import write_json
from arb_ternary_train.evaluate import evaluate
from arb_ternary_train.openmp import NUM_THREADS

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext
    from arb_ternary_train.options import LoopOptions

#: Multiplications that keep a thread busy for about a millisecond. Threads that share less wait
#: more than they work.
_SHARE: Final = 1 << 25
#: All threads must take at most this share of the time that half of them take.
_WORTH: Final = 0.9
#: Timed passes after the one that warms up. A pass of more seconds than ``_LONG`` is timed once.
_PASSES: Final = 3
_LONG: Final = 0.5


def fitting_threads(model: nn.Module, tokens: int, available: int) -> int:
    """Return the number of threads, 1 to ``available``, that a pass has work for.

    Each thread should have 2**25 multiplications of the average product with a weight. A model
    without such products gets all threads.

    Args:
        model: the model.
        tokens: tokens of a pass.
        available: threads that there are.
    """
    sizes = []
    for module in model.modules():
        columns = getattr(module, "in_features", None)
        rows = getattr(module, "out_features", None)
        if isinstance(columns, int) and isinstance(rows, int):
            sizes.append(columns * rows)
    if not sizes:
        return available
    return max(1, min(available, sum(sizes) * tokens // len(sizes) // _SHARE))


def fewest_as_fast(threads: int, seconds: Callable[[int], float]) -> int:
    """Return ``threads``, halved as long as half of them are about as fast.

    ``seconds`` measures a number of threads.
    """
    best = seconds(threads)
    while threads > 1:
        half = seconds(threads // 2)
        if best <= _WORTH * half:
            break
        threads = threads // 2
        best = half
    return threads


def set_loop_threads(context: TrainingContext, options: LoopOptions, key: str) -> None:
    """Set torch's number of threads for a training loop that is about to begin, and record it.

    The number is, in this order: the config's ``threads``; what the run's record says;
    ``OMP_NUM_THREADS``; the number that the model has work for, reduced to what is as fast in a few
    passes over held-out samples, which leave no trace. With ``deterministic: true`` nothing is
    timed. ``auto`` changes nothing on an accelerator or outside a run directory. Rank 0 decides for
    all ranks.
    """
    config = context.config
    files = context.files
    world = context.world
    if not world.run_on_main(files.exists):
        return
    if config.threads == "auto" and context.device.type != "cpu":
        return
    record = world.run_on_main(files.record)
    loops = record["threads"]["loops"]
    count = world.run_on_main(lambda: _choose_number(context, options, loops.get(key)))
    torch.set_num_threads(count)
    if loops.get(key) != count or record["threads"]["last"] != count:
        changed = {**record, "threads": {"loops": {**loops, key: count}, "last": count}}
        world.run_on_main(lambda: write_json(files.record_file, changed))
        context.note(f"{key}: {count} of {context.threads_available} threads")


def _choose_number(context: TrainingContext, options: LoopOptions, recorded: int | None) -> int:
    """Return the number of threads of a loop; see :func:`set_loop_threads`."""
    config = context.config
    available = context.threads_available
    if config.threads != "auto":
        return config.threads
    if recorded is not None:
        return recorded
    if given([NUM_THREADS]):
        return available
    count = fitting_threads(context.model, options.batch_size * options.block_size, available)
    if count == 1 or config.deterministic:
        return count
    return _time_threads(context, options, count)


def _time_threads(context: TrainingContext, options: LoopOptions, threads: int) -> int:
    """Return the fewest threads, up to ``threads``, that are about as fast."""

    def one_pass() -> float:
        started = time.perf_counter()
        evaluate(
            context.model,
            context.data,
            context.masking,
            batch_size=options.batch_size,
            block_size=options.block_size,
            batches=1,
            seed=context.seed,
            device=context.device,
        )
        return time.perf_counter() - started

    def seconds(count: int) -> float:
        torch.set_num_threads(count)
        first = one_pass()
        return first if first > _LONG else min(one_pass() for _ in range(_PASSES))

    try:
        return fewest_as_fast(threads, seconds)
    except DataError:
        # There is no held-out sample. A run that never evaluates does not need one.
        return threads


@contextmanager
def recorded_threads(record: Mapping[str, Any]) -> Iterator[int]:
    """Compute with the threads that a run used last; yield how many torch had before.

    Args:
        record: the run's ``run.json``.
    """
    before = torch.get_num_threads()
    last = record["threads"]["last"]
    torch.set_num_threads(before if last is None else last)
    try:
        yield before
    finally:
        torch.set_num_threads(before)
