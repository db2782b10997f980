"""Quantise the frames of a spectrogram: each becomes the index of its nearest codebook entry.

The codebook is found by k-means. Grey levels are integers, and the codebook entries are rounded
after every round, so distances and sums are exact. The codes of the same sounds are therefore the
same on every machine.

Shapes: ``N`` frames, ``M`` mel bands, ``K`` codes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from arb_ternary.errors import DataError

Levels = NDArray[np.uint8]
#: Frames compared at a time. It bounds the memory for distances.
_CHUNK: Final = 4096


def nearest_codes(frames_NM: Levels, codebook_KM: Levels) -> NDArray[np.int64]:
    """Return the code of each frame, ``[N]``: the entry with the smallest squared distance.

    Ties go to the lowest code.
    """
    return _nearest(frames_NM, codebook_KM)[0]


def fit_codebook(frames_NM: Levels, codes: int, rounds: int, seed: int) -> Levels:
    """Fit ``codes`` codebook entries, uint8 ``[K, M]``, by Lloyd's k-means after k-means++.

    The first entry is drawn uniformly. Each further one is drawn with a probability proportional to
    its squared distance from the nearest entry so far (Arthur and Vassilvitskii, 2007). Then every
    entry becomes the rounded mean of the frames nearest to it, until nothing changes. An entry
    without frames becomes the frame that is farthest from its own entry.

    Raises:
        DataError: there are fewer distinct frames than codes.
    """
    different = len(np.unique(frames_NM, axis=0))
    if different < codes:
        raise DataError(
            f"codes: {codes} codes need as many distinct frames, and there are {different}",
            "Use fewer codes or more sounds.",
        )
    book = _first(frames_NM, codes, RandomState(seed))
    for _ in range(rounds):
        chosen, distance = _nearest(frames_NM, book)
        counts = np.bincount(chosen, minlength=codes)
        sums = np.zeros((codes, frames_NM.shape[1]), dtype=np.int64)
        np.add.at(sums, chosen, frames_NM.astype(np.int64))
        # Round half up in integers: floor(mean + 1/2).
        better = ((2 * sums + counts[:, None]) // np.maximum(2 * counts, 1)[:, None]).astype(
            np.uint8
        )
        farthest = iter(np.argsort(-distance, kind="stable").tolist())
        for empty in np.flatnonzero(counts == 0).tolist():
            better[empty] = frames_NM[next(farthest)]
        if np.array_equal(better, book):
            break
        book = better
    return book


def _first(frames_NM: Levels, codes: int, random: RandomState) -> Levels:
    chosen = [int(random.random_sample() * len(frames_NM))]
    distance = _distances(frames_NM, frames_NM[chosen])[:, 0]
    while len(chosen) < codes:
        reached = np.cumsum(distance)
        mark = min(int(random.random_sample() * int(reached[-1])), int(reached[-1]) - 1)
        chosen.append(int(np.searchsorted(reached, mark, side="right")))
        distance = np.minimum(distance, _distances(frames_NM, frames_NM[chosen[-1:]])[:, 0])
    return frames_NM[chosen].copy()


def _nearest(frames_NM: Levels, book_KM: Levels) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the index of the nearest entry of ``book_KM`` and its squared distance."""
    places = []
    distances = []
    for first in range(0, len(frames_NM), _CHUNK):
        square_NK = _distances(frames_NM[first : first + _CHUNK], book_KM)
        place = square_NK.argmin(axis=1)
        places.append(place)
        distances.append(np.take_along_axis(square_NK, place[:, None], axis=1)[:, 0])
    return np.concatenate(places), np.concatenate(distances)


def _distances(frames_NM: Levels, book_KM: Levels) -> NDArray[np.int64]:
    """Return squared distances ``[N, K]``.

    The integers are small enough for exact float64 products, whatever the order of summation.
    """
    frames = frames_NM.astype(np.float64)
    book = book_KM.astype(np.float64)
    square: NDArray[Any] = (
        (frames**2).sum(axis=1)[:, None] - 2.0 * frames @ book.T + (book**2).sum(axis=1)
    )
    return square.astype(np.int64)
