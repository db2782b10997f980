"""Entropies of a token stream: lower bounds of the loss without context, and with one token of it.

Both are plug-in estimates from the counts of the stream itself, so they are lower than the losses
that such models reach on unseen text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Tokens counted at a time, which bounds the memory used for a memory-mapped stream.
_CHUNK = 1 << 24
#: Largest table of counts that is kept dense (int64, so 128 MiB). Beyond it only the pairs that
#: occur are kept.
_DENSE = 1 << 24


def unigram_entropy(ids_L: NDArray[Any]) -> float:
    """Return the entropy ``H(x) = -sum p(x) ln p(x)`` of tokens, in nats per token.

    Args:
        ids_L: token ids, integers of any dtype ``[L]``, at least one.
    """
    return _entropy(_count(_chunks(ids_L), int(ids_L.max()) + 1))


def bigram_entropy(ids_L: NDArray[Any]) -> float:
    """Return the conditional entropy ``H(x2 | x1) = H(x1, x2) - H(x1)``, in nats per token.

    ``H(x1)`` is taken over the ``L - 1`` tokens that have a successor, so that both terms describe
    the same pairs.

    Args:
        ids_L: token ids below ``2**31``, integers of any dtype ``[L]``, at least two.
    """
    size = int(ids_L.max()) + 1
    first = ids_L[:-1]
    second = ids_L[1:]
    pairs = (a * size + b for a, b in zip(_chunks(first), _chunks(second), strict=True))
    return _entropy(_count(pairs, size * size)) - _entropy(_count(_chunks(first), size))


def _chunks(ids_L: NDArray[Any]) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(ids_L), _CHUNK):
        yield ids_L[start : start + _CHUNK].astype(np.int64)


def _count(keys: Iterator[NDArray[np.int64]], size: int) -> NDArray[np.int64]:
    """Count each key in ``[0, size)``; keys that do not occur may be left out."""
    if size <= _DENSE:
        dense = np.zeros(size, dtype=np.int64)
        for chunk in keys:
            dense += np.bincount(chunk, minlength=size)
        return dense
    seen = np.empty(0, dtype=np.int64)
    counts = np.empty(0, dtype=np.int64)
    for chunk in keys:
        new, new_counts = np.unique(chunk, return_counts=True)
        seen, place = np.unique(np.concatenate((seen, new)), return_inverse=True)
        both = np.concatenate((counts, new_counts))
        counts = np.zeros(len(seen), dtype=np.int64)
        np.add.at(counts, place, both)
    return counts


def _entropy(counts: NDArray[np.int64]) -> float:
    """Return ``ln n - (1/n) sum c ln c``, which is ``-sum p ln p`` with ``p = c / n``."""
    c = counts[counts > 0].astype(np.float64)
    n = float(c.sum())
    return max(0.0, float(np.log(n) - np.sum(c * np.log(c)) / n))
