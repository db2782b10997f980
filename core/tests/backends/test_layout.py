"""The reference layout against TQ2_0 of GGUF, restated on integers with rows cut to bytes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary.backends.layout import pack_trits, packed_columns, unpack_trits


def pack_in_python(row: list[int]) -> list[int]:
    out = []
    for start in range(0, len(row), 128):
        block = row[start : start + 128]
        block += [0] * (-len(block) % 4)
        lanes = len(block) // 4
        out += [sum((block[j + lanes * n] + 1) << (2 * n) for n in range(4)) for j in range(lanes)]
    return out


@given(
    st.integers(0, 3),
    st.one_of(st.integers(0, 9), st.integers(120, 140), st.integers(250, 260)),
    st.integers(0, 2**32 - 1),
)
def test_packing_follows_the_byte_order_and_is_lossless(rows: int, columns: int, seed: int) -> None:
    trits = np.random.default_rng(seed).integers(-1, 2, (rows, columns), dtype=np.int8)
    packed = pack_trits(torch.from_numpy(trits))
    assert packed.shape == (rows, packed_columns(columns)) == (rows, (columns + 3) // 4)
    assert packed.tolist() == [pack_in_python(row) for row in trits.tolist()]
    assert torch.equal(unpack_trits(packed, columns), torch.from_numpy(trits))


def test_every_remainder_of_a_block_round_trips() -> None:
    for columns in range(257):
        trits = torch.randint(-1, 2, (2, columns), dtype=torch.int8)
        assert torch.equal(unpack_trits(pack_trits(trits), columns), trits)


def test_a_transposed_matrix_packs_like_its_copy() -> None:
    trits = torch.randint(-1, 2, (130, 3), dtype=torch.int8)
    assert torch.equal(pack_trits(trits.t()), pack_trits(trits.t().contiguous()))
