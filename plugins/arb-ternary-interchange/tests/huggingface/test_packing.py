"""Trits packed into two bits each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arb_ternary.errors import DataError
from arb_ternary_interchange.huggingface.packing import pack, unpack


@settings(max_examples=50, deadline=None)
@given(quarter=st.integers(0, 9), columns=st.integers(0, 40), seed=st.integers(0, 2**32))
def test_bits_are_where_transformers_has_them(quarter: int, columns: int, seed: int) -> None:
    rows = 4 * quarter
    trits = np.random.default_rng(seed).integers(-1, 2, (rows, columns), dtype=np.int8)
    expected = np.zeros((quarter, columns), dtype=np.uint8)
    for row in range(rows):
        expected[row % max(quarter, 1)] |= (
            (trits[row] + 1) << 2 * (row // max(quarter, 1))
        ).astype(np.uint8)
    packed = pack(torch.from_numpy(trits))
    assert np.array_equal(packed.numpy(), expected)
    assert np.array_equal(unpack(packed, "x").numpy(), trits)


def test_three_rows_and_code_3_are_errors() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        pack(torch.zeros(3, 5, dtype=torch.int8))
    packed = pack(torch.zeros(8, 5, dtype=torch.int8))
    packed[1, 2] |= 0b0011_0000
    with pytest.raises(DataError, match="x: the code of row 5, column 2 is 3"):
        unpack(packed, "x")
