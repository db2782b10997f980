"""The bytes of blocks, compared with gguf-py and with a plain reference."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary_interchange.gguf.blocks import (
    EXPONENTS,
    decode_codes,
    decode_floats,
    encode_floats,
    encode_trits,
    holds,
)
from arb_ternary_interchange.gguf.tensor_types import (
    BF16,
    F16,
    F32,
    FORK_Q2_0,
    Q2_0,
    Q4_0,
    Q4_1,
    Q8_0,
    TQ1_0,
    TQ2_0,
    TYPES,
    TensorType,
)

THEIRS = {
    TQ1_0: GGMLQuantizationType.TQ1_0,
    TQ2_0: GGMLQuantizationType.TQ2_0,
    Q4_0: GGMLQuantizationType.Q4_0,
    Q4_1: GGMLQuantizationType.Q4_1,
    Q8_0: GGMLQuantizationType.Q8_0,
    BF16: GGMLQuantizationType.BF16,
}


def weights(
    kind: TensorType, rows: int, blocks: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    trits = rng.integers(-1, 2, (rows, blocks * kind.block)).astype(np.int8)
    exponents = rng.integers(EXPONENTS.start, EXPONENTS.stop, (rows, blocks)).astype(np.int8)
    dense = trits * np.repeat(np.ldexp(1.0, exponents), kind.block, axis=1)
    return trits, exponents, dense.astype(np.float32)


@pytest.mark.parametrize("kind", [TQ1_0, TQ2_0, Q4_0])
def test_gguf_py_dequantises_what_is_written_bit_for_bit(kind: TensorType) -> None:
    trits, exponents, dense = weights(kind, 5, 4, seed=1)
    np.testing.assert_array_equal(
        gguf.quants.dequantize(encode_trits(trits, exponents, kind), THEIRS[kind]), dense
    )


@pytest.mark.parametrize("kind", [TQ1_0, TQ2_0, Q4_0])
def test_gguf_py_dequantises_rows_with_factors_bit_for_bit(kind: TensorType) -> None:
    rng = np.random.default_rng(4)
    trits, _, _ = weights(kind, 5, 3, seed=4)
    exponents = rng.integers(-9, 3, (5, 3)).astype(np.int8)
    factors = rng.normal(size=5).astype(np.float16).astype(np.float32)
    dense = (
        factors[:, None] * trits * np.repeat(np.ldexp(np.float32(1), exponents), kind.block, axis=1)
    )
    found = gguf.quants.dequantize(encode_trits(trits, exponents, kind, factors), THEIRS[kind])
    np.testing.assert_array_equal(found, dense)


@pytest.mark.parametrize("kind", [TQ1_0, TQ2_0])
def test_the_bytes_are_those_of_gguf_py(kind: TensorType) -> None:
    trits, exponents, dense = weights(kind, 5, 4, seed=2)
    np.testing.assert_array_equal(
        encode_trits(trits, exponents, kind), gguf.quants.quantize(dense, THEIRS[kind])
    )


@pytest.mark.parametrize("kind", [Q2_0, FORK_Q2_0])
def test_q2_0_is_a_scale_and_then_two_bits_a_weight_in_order(kind: TensorType) -> None:
    trits, exponents, _ = weights(kind, 3, 2, seed=3)
    restated = bytearray()
    for row in range(3):
        for block in range(2):
            restated += np.float16(2.0 ** int(exponents[row, block])).tobytes()
            codes = [int(t) + 1 for t in trits[row, block * kind.block : (block + 1) * kind.block]]
            restated += bytes(
                codes[i] + 4 * codes[i + 1] + 16 * codes[i + 2] + 64 * codes[i + 3]
                for i in range(0, len(codes), 4)
            )
    assert encode_trits(trits, exponents, kind).tobytes() == bytes(restated)


@given(
    st.sampled_from([TQ1_0, TQ2_0, Q2_0, FORK_Q2_0, Q4_0]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2**32),
)
def test_trits_and_exponents_come_back(kind: TensorType, rows: int, blocks: int, seed: int) -> None:
    trits, exponents, _ = weights(kind, rows, blocks, seed)
    encoded = encode_trits(trits, exponents, kind)
    assert encoded.shape == (rows, kind.row_bytes(blocks * kind.block))
    values, scale = decode_codes(encoded, kind)
    np.testing.assert_array_equal(values, trits)
    np.testing.assert_array_equal(scale, np.ldexp(np.float32(1), exponents.astype(np.int32)))


@pytest.mark.parametrize("kind", list(THEIRS))
@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
def test_any_bytes_are_decoded_as_gguf_py_does(kind: TensorType) -> None:
    data = np.random.default_rng(4).integers(0, 256, (7, kind.row_bytes(512))).astype(np.uint8)
    np.testing.assert_array_equal(
        decode_floats(data, kind), gguf.quants.dequantize(data, THEIRS[kind])
    )


def test_two_bits_can_hold_a_number_that_is_no_trit() -> None:
    data = np.zeros((1, Q2_0.size), np.uint8)
    data[:, :2] = np.float16(0.5).reshape(1).view(np.uint8)
    data[:, 2] = 0b11
    values, _ = decode_codes(data, Q2_0)
    assert values[0, :4].tolist() == [2, -1, -1, -1]
    assert decode_floats(data, Q2_0)[0, :2].tolist() == [1.0, -0.5]


@pytest.mark.parametrize(
    ("kind", "value"), [(F16, 2.0**-24), (F16, 65504.0), (BF16, 2.0**100), (F32, 1 + 2.0**-23)]
)
def test_a_float_type_holds_exact_numbers(kind: TensorType, value: float) -> None:
    values = np.asarray([[value, -value, 0]], np.float32)
    assert holds(kind, values)
    np.testing.assert_array_equal(decode_floats(encode_floats(values, kind), kind), values)


@pytest.mark.parametrize(
    ("kind", "value"), [(F16, 2.0**-25), (F16, 65536.0), (F16, 1 + 2.0**-11), (BF16, 1 + 2.0**-8)]
)
def test_a_float_type_does_not_hold_what_it_would_round(kind: TensorType, value: float) -> None:
    assert not holds(kind, np.asarray([[value]], np.float32))


def test_sizes_of_types_are_those_of_gguf_py() -> None:
    known = {int(kind): sizes for kind, sizes in gguf.constants.GGML_QUANT_SIZES.items()}
    assert {
        number: (kind.block, kind.size) for number, kind in TYPES.items() if number in known
    } == {number: sizes for number, sizes in known.items() if number in TYPES}
    assert set(known) - set(TYPES) == {GGMLQuantizationType.Q8_1, GGMLQuantizationType.Q8_K}
    names = {int(kind): kind.name for kind in GGMLQuantizationType}
    assert all(names[number] == kind.name for number, kind in TYPES.items() if number in names)
