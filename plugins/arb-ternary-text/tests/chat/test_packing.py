"""Documents in rows of one length."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary.errors import DataError
from arb_ternary_text.chat.packing import Documents, Rows, pack


def documents(lengths: list[int], learned: list[bool] | None = None) -> Documents:
    total = sum(lengths)
    marks = np.ones(total, dtype=bool) if learned is None else np.array(learned, dtype=bool)
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    return Documents(np.arange(total), marks, starts)


def rows_of(rows: Rows) -> list[list[tuple[int, int]]]:
    pieces = list(zip(rows.starts.tolist(), rows.lengths.tolist(), strict=True))
    bounds = rows.first.tolist()
    return [pieces[a:b] for a, b in pairwise(bounds)]


def test_each_document_goes_where_least_room_is_left() -> None:
    # 7, 6, 4, 3 and 2 tokens in rows of 10: 7 and 3 are a row, and so are 6 and 4.
    found = pack(documents([2, 3, 4, 6, 7]), 10, "cut", "documents")
    assert rows_of(found) == [[(15, 7), (2, 3)], [(9, 6), (5, 4)], [(0, 2)]]
    assert (found.lost, found.tokens) == (0, 22)


def test_long_documents_are_cut_split_or_dropped() -> None:
    made = documents([9, 4])
    assert rows_of(pack(made, 4, "cut", "d")) == [[(0, 4)], [(9, 4)]]
    assert pack(made, 4, "cut", "d").lost == 5
    # Pieces share a token, so that every token but the first is predicted.
    split = pack(made, 4, "split", "d")
    assert rows_of(split) == [[(0, 4)], [(3, 4)], [(9, 4)], [(6, 3)]]
    assert (split.lost, split.lost_learned) == (0, 2)
    assert rows_of(pack(made, 4, "drop", "d")) == [[(9, 4)]]


def test_pieces_in_which_nothing_is_learned_are_left_out() -> None:
    marks = [False] * 5 + [True] + [True, False, False]
    found = pack(documents([6, 3], marks), 4, "split", "d")
    # (0, 4) has nothing to learn; of (6, 3) only the first token, which nothing precedes.
    assert rows_of(found) == [[(3, 3)]]
    with pytest.raises(DataError, match="nothing is left to learn in rows of 4 tokens"):
        pack(documents([6, 3], marks), 4, "cut", "d")


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(2, 20))
def test_every_token_is_predicted_once(lengths: list[int], length: int) -> None:
    made = documents(lengths)
    if max(lengths) < 2:
        return
    found = pack(made, length, "split", "d")
    predicted = np.zeros(len(made.ids), dtype=int)
    for row in rows_of(found):
        assert sum(size for _, size in row) <= length
        for start, size in row:
            predicted[start + 1 : start + size] += 1
    wanted = np.ones(len(made.ids), dtype=int)
    wanted[made.starts[:-1]] = 0
    assert (predicted == wanted).all()
    again = pack(made, length, "split", "d")
    assert rows_of(again) == rows_of(found)
