"""The context of an exact run, for kernels that round differently from torch.

In an exact run the float arithmetic is torch's on every backend. Products with ternary weights are
integers there and the same on every backend; what lies between them is float. A kernel that adds in
another order than torch gives other bits, and may only run elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

_EXACT: Final = ContextVar("_EXACT", default=False)


@contextmanager
def exact_arithmetic(exact: bool = True) -> Iterator[None]:
    """Declare that what a ``with`` block computes belongs to an exact run, or does not."""
    token = _EXACT.set(exact)
    try:
        yield
    finally:
        _EXACT.reset(token)


def is_exact() -> bool:
    """Return whether the current computation belongs to an exact run (``exact: true``)."""
    return _EXACT.get()
