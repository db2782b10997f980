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
    book = _initial_book(frames_NM, codes, RandomState(seed))
    for _ in range(rounds):
        chosen, distance = _nearest(frames_NM, book)
        counts = np.bincount(chosen, minlength=codes)
        sums = np.zeros((codes, frames_NM.shape[1]), dtype=np.int64)
        np.add.at(sums, chosen, frames_NM.astype(np.int64))
        # Round half up in integers: floor(mean + 1/2).
        means = (2 * sums + counts[:, None]) // np.maximum(2 * counts, 1)[:, None]
        better = means.astype(np.uint8)
        farthest = iter(np.argsort(-distance, kind="stable").tolist())
        for empty in np.flatnonzero(counts == 0).tolist():
            better[empty] = frames_NM[next(farthest)]
        if np.array_equal(better, book):
            break
        book = better
    return book


def _initial_book(frames_NM: Levels, codes: int, random: RandomState) -> Levels:
    """Draw frames as the first codebook (k-means++)."""
    chosen = [int(random.random_sample() * len(frames_NM))]
    distance = _distances(frames_NM, frames_NM[chosen])[:, 0]
    while len(chosen) < codes:
        cumulative = np.cumsum(distance)
        total = int(cumulative[-1])
        mark = min(int(random.random_sample() * total), total - 1)
        chosen.append(int(np.searchsorted(cumulative, mark, side="right")))
        distance = np.minimum(distance, _distances(frames_NM, frames_NM[chosen[-1:]])[:, 0])
    return frames_NM[chosen].copy()


def _nearest(frames_NM: Levels, book_KM: Levels) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the index of the nearest entry of ``book_KM`` and its squared distance."""
    codes = []
    distances = []
    for first in range(0, len(frames_NM), _CHUNK):
        square_NK = _distances(frames_NM[first : first + _CHUNK], book_KM)
        code_N = square_NK.argmin(axis=1)
        codes.append(code_N)
        distances.append(np.take_along_axis(square_NK, code_N[:, None], axis=1)[:, 0])
    return np.concatenate(codes), np.concatenate(distances)


def _distances(frames_NM: Levels, book_KM: Levels) -> NDArray[np.int64]:
    """Return squared distances ``[N, K]``.

    The integers are small enough for exact float64 products, whatever the order of summation.
    """
    frames = frames_NM.astype(np.float64)
    book = book_KM.astype(np.float64)
    frame_norms = (frames**2).sum(axis=1)[:, None]
    square: NDArray[Any] = frame_norms - 2.0 * frames @ book.T + (book**2).sum(axis=1)
    return square.astype(np.int64)
