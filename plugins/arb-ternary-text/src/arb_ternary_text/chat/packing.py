"""Documents of tokens in rows of one length: best fit, longest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from arb_ternary.errors import DataError

TooLong = Literal["cut", "split", "drop"]


@attrs.frozen(eq=False)
class Documents:
    """Documents of tokens, one after another.

    Attributes:
        ids: tokens of all documents ``[L]``, an integer dtype.
        learned: bool ``[L]``: which of them are learned.
        starts: int64 ``[N + 1]``: index of the first token of each document, and ``L``.
    """

    ids: NDArray[Any]
    learned: NDArray[np.bool_]
    starts: NDArray[np.int64]

    @classmethod
    def join(
        cls, documents: Sequence[tuple[Sequence[int], Sequence[bool]]], vocabulary_size: int
    ) -> Documents:
        """Return documents from the ids of each, and which of them are learned.

        Args:
            documents: at least one.
            vocabulary_size: number of ids, which the dtype is chosen for.
        """
        lengths = [len(ids) for ids, _ in documents]
        dtype = np.min_scalar_type(vocabulary_size - 1)
        return cls(
            ids=np.concatenate([ids for ids, _ in documents]).astype(dtype),
            learned=np.concatenate([learned for _, learned in documents]).astype(bool),
            starts=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        )

    @property
    def longest(self) -> int:
        """Number of tokens of the longest document."""
        return int(np.diff(self.starts).max())

    def __len__(self) -> int:
        return len(self.starts) - 1


@attrs.frozen(eq=False)
class Rows:
    """Documents in rows of ``length`` tokens.

    Attributes:
        length: tokens in a row.
        first: int64 ``[R + 1]``: number of the first piece of each row, and of all pieces.
        starts: int64 ``[P]``: index of the first token of each piece in ``Documents.ids``.
        lengths: int64 ``[P]``: number of its tokens.
        lost: tokens that are in no row.
        lost_learned: learned tokens among them, and those that begin a piece.
    """

    length: int
    first: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    lost: int
    lost_learned: int

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def tokens(self) -> int:
        """Number of tokens in the rows, without padding."""
        return int(self.lengths.sum())


def pack(documents: Documents, length: int, too_long: TooLong, name: str) -> Rows:
    """Pack documents into rows, each into the row with the least room that is enough for it.

    Documents are taken from the longest to the shortest, in their order if they are equally long
    ("best fit decreasing": at most 11/9 of the fewest rows, and one). Pieces in which nothing is
    learned are left out. The result depends on nothing else than the arguments.

    Args:
        documents: the documents.
        length: tokens in a row.
        too_long: what becomes of a longer document: ``cut`` keeps its beginning, ``split`` makes
            pieces, each of which begins with the last token of the one before, so that every token
            is predicted, and ``drop`` leaves it out.
        name: name of the documents in errors.

    Raises:
        DataError: nothing is left to learn.
    """
    counts = np.concatenate(([0], np.cumsum(documents.learned)))
    pieces = [
        (start, size)
        for start, size in _pieces(documents.starts, length, too_long)
        if counts[start + size] > counts[start + 1]
    ]
    if not pieces:
        raise DataError(
            f"{name}: nothing is left to learn in rows of {length} tokens",
            "Raise block_size, or set too_long: split.",
        )
    order = sorted(range(len(pieces)), key=lambda number: -pieces[number][1])
    rows: list[list[tuple[int, int]]] = []
    #: Rows by the room that they have left, and a bit for each room that some row has.
    open_rows: list[list[int]] = [[] for _ in range(length + 1)]
    rooms = 0
    for number in order:
        size = pieces[number][1]
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms ^= 1 << room
        else:
            room = length
            row = len(rows)
            rows.append([])
        rows[row].append(pieces[number])
        open_rows[room - size].append(row)
        rooms |= 1 << (room - size)

    placed = [piece for row in rows for piece in row]
    starts = np.array([start for start, _ in placed], dtype=np.int64)
    lengths = np.array([size for _, size in placed], dtype=np.int64)
    kept = np.zeros(len(documents.ids), dtype=bool)
    predicted = np.zeros(len(documents.ids), dtype=bool)
    for start, size in placed:
        kept[start : start + size] = True
        predicted[start + 1 : start + size] = True
    return Rows(
        length,
        np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64),
        starts,
        lengths,
        lost=int((~kept).sum()),
        lost_learned=int((documents.learned & ~predicted).sum()),
    )


def _pieces(starts: NDArray[np.int64], length: int, too_long: TooLong) -> list[tuple[int, int]]:
    """Return first token and length of what is kept of each document."""
    pieces: list[tuple[int, int]] = []
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        size = end - start
        if size <= length:
            pieces.append((start, size))
        elif too_long == "cut":
            pieces.append((start, length))
        elif too_long == "split":
            pieces += [
                (first, min(length, end - first)) for first in range(start, end - 1, length - 1)
            ]
    return pieces
