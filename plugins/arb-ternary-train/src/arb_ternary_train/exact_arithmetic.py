"""Whether what is computed now belongs to an exact run, whose float arithmetic is torch's on every
backend.

Products with ternary weights are integers there, and the same on every backend. What lies between
them is float: a kernel that adds up in another order than torch gives other bits, and may only run
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

_EXACT: Final = ContextVar("_EXACT", default=False)


@contextmanager
def exact_arithmetic(exact: bool = True) -> Iterator[None]:
    """What is computed within belongs to an exact run, or (``exact`` is False) does not."""
    token = _EXACT.set(exact)
    try:
        yield
    finally:
        _EXACT.reset(token)


def is_exact() -> bool:
    """Whether what is computed now belongs to an exact run (``exact: true``)."""
    return _EXACT.get()
