"""Trits at rest: base 3, checked against arithmetic on Python integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary.errors import CheckpointError
from arb_ternary.ternary import encoding
from arb_ternary.ternary.encoding import bytes_per_row, decode_at_rest, encode_at_rest


def encode_in_python(trits: list[list[int]]) -> list[list[int]]:
    rows = []
    for row in trits:
        padded = row + [0] * (-len(row) % 5)
        rows.append(
            [sum((padded[i + j] + 1) * 3**j for j in range(5)) for i in range(0, len(padded), 5)]
        )
    return rows


@given(st.integers(0, 4), st.integers(0, 33), st.integers(0, 2**32 - 1))
def test_encoding_matches_integer_arithmetic_and_decodes(
    rows: int, columns: int, seed: int
) -> None:
    trits = np.random.default_rng(seed).integers(-1, 2, (rows, columns), dtype=np.int8)
    encoded = encode_at_rest(torch.from_numpy(trits))
    assert encoded.shape == (rows, -(-columns // 5))
    assert encoded.tolist() == encode_in_python(trits.tolist())
    assert torch.equal(decode_at_rest(encoded, columns), torch.from_numpy(trits))


def test_all_243_codes_round_trip() -> None:
    codes = torch.arange(243, dtype=torch.uint8).view(243, 1)
    assert torch.equal(encode_at_rest(decode_at_rest(codes, 5)), codes)


def test_a_non_contiguous_matrix_encodes_like_its_copy() -> None:
    trits = torch.randint(-1, 2, (12, 7), dtype=torch.int8)
    assert torch.equal(encode_at_rest(trits.t()), encode_at_rest(trits.t().contiguous()))


@pytest.mark.parametrize("byte", [243, 250, 255])
def test_an_invalid_byte_is_refused_with_tensor_and_offset(byte: int) -> None:
    encoded = torch.full((3, 4), 121, dtype=torch.uint8)
    encoded[1, 2] = byte
    with pytest.raises(CheckpointError, match=rf"layer\.weight: byte {byte} at offset 6"):
        decode_at_rest(encoded, 20, "layer.weight")


def test_padding_that_is_not_zero_is_refused() -> None:
    encoded = encode_at_rest(torch.ones(2, 5, dtype=torch.int8))
    with pytest.raises(CheckpointError, match="padding at the end of row 0"):
        decode_at_rest(encoded, 4, "w")


def test_a_wrong_shape_or_dtype_is_refused() -> None:
    with pytest.raises(CheckpointError, match="2 bytes per row"):
        decode_at_rest(torch.zeros(2, 3, dtype=torch.uint8), 10, "w")
    with pytest.raises(CheckpointError, match="uint8"):
        decode_at_rest(torch.zeros(2, 2, dtype=torch.int8), 10, "w")


def test_values_that_are_no_trits_are_refused() -> None:
    with pytest.raises(ValueError, match="-1, 0 or 1"):
        encode_at_rest(torch.tensor([[2]], dtype=torch.int8))
    with pytest.raises(ValueError, match="int8 matrix"):
        encode_at_rest(torch.zeros(3, dtype=torch.int8))


def test_a_row_takes_a_byte_for_five_trits() -> None:
    assert [bytes_per_row(k) for k in (0, 1, 5, 6, 10, 11)] == [0, 1, 1, 2, 2, 3]


def test_conversion_in_parts_gives_the_same_bytes_and_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trits = torch.from_numpy(np.random.default_rng(0).integers(-1, 2, (7, 8), dtype=np.int8))
    whole = encode_at_rest(trits)
    monkeypatch.setattr(encoding, "_AT_ONCE", 16)  # two rows
    assert torch.equal(encode_at_rest(trits), whole)
    assert torch.equal(decode_at_rest(whole, 8), trits)
    damaged = whole.clone()
    damaged[5, 1] = 242
    with pytest.raises(CheckpointError, match="padding at the end of row 5"):
        decode_at_rest(damaged, 8)
    trits[6, 7] = 2
    with pytest.raises(ValueError, match="-1, 0 or 1"):
        encode_at_rest(trits)
