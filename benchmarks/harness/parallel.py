"""Several processes at once, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(call: Callable[[Item], Result], items: Iterable[Item], jobs: int) -> list[Result]:
    """Call with every item, ``jobs`` at once, and return the results in the order of the items.

    After an error or Ctrl-C nothing more is started, and what runs is waited for.
    """
    executor = ThreadPoolExecutor(jobs)
    try:
        return list(executor.map(call, items))
    finally:
        executor.shutdown(cancel_futures=True)
