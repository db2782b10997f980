"""NVFP4 against a restatement in numpy that tries every code, and against the format's tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arb_ternary_progressive.nvfp4 import BLOCK, E2M1, pack_nvfp4, unpack_nvfp4


def every_e4m3() -> np.ndarray:
    """Return all finite non-negative values of E4M3 by its definition.

    The bias is 7; there are 3 bits of mantissa, and no infinity.
    """
    values = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    values += [
        (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        for exponent in range(1, 16)
        for mantissa in range(8)
        if (exponent, mantissa) != (15, 7)
    ]
    return np.array(sorted(values))


def every_e2m1() -> np.ndarray:
    """Return the magnitudes of E2M1 by its definition: bias 1, 1 bit of mantissa."""
    return np.array(
        [0.0, 0.5]
        + [
            (1 + mantissa / 2) * 2.0 ** (exponent - 1)
            for exponent in (1, 2, 3)
            for mantissa in (0, 1)
        ]
    )


SCALES = every_e4m3()
CODES = every_e2m1()


def nearest(value: float, table: np.ndarray) -> float:
    """Return the nearest entry; ties go to the even index, as in IEEE rounding."""
    distance = np.abs(table - value)
    candidates = np.flatnonzero(distance == distance.min())
    even = [index for index in candidates if index % 2 == 0]
    return float(table[even[0] if len(candidates) > 1 else candidates[0]])


def restated(weight: np.ndarray) -> np.ndarray:
    """Return the quantised matrix, block by block."""
    tensor_scale = np.float32(np.abs(weight).max()) / np.float32(6 * 448)
    result = np.zeros_like(weight)
    for row in range(weight.shape[0]):
        for first in range(0, weight.shape[1], 16):
            block = weight[row, first : first + 16]
            scale = nearest(
                float(np.float32(np.abs(block).max()) / (np.float32(6) * tensor_scale)), SCALES
            )
            unit = np.float32(scale) * tensor_scale
            for column, value in enumerate(block):
                if unit > 0:
                    code = nearest(abs(float(value * (np.float32(1) / unit))), CODES)
                    result[row, first + column] = np.float32(np.copysign(code, value)) * unit
    return result


def test_the_tables_are_those_of_the_format() -> None:
    assert CODES.tolist() == list(E2M1)
    assert SCALES.max() == 448
    assert BLOCK == 16


@pytest.mark.parametrize(("rows", "columns"), [(3, 64), (2, 20), (5, 16), (1, 1)])
def test_quantisation_equals_the_restatement(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator) * torch.rand(
        rows, 1, generator=generator
    )
    packed = pack_nvfp4(weight)
    assert packed.codes.dtype == torch.uint8
    assert packed.codes.shape == (rows, -(-columns // 16) * 8)
    assert packed.scales.dtype == torch.float8_e4m3fn
    assert packed.scales.shape == (rows, -(-columns // 16))
    assert packed.tensor_scale.dtype == torch.float32
    np.testing.assert_array_equal(unpack_nvfp4(packed, columns).numpy(), restated(weight.numpy()))


def test_two_codes_are_packed_per_byte() -> None:
    # The largest weight is 6 * 448, so that the tensor scale is 1 and the block's scale 448.
    block = (
        torch.tensor(
            [
                [
                    0.0,
                    0.5,
                    1.0,
                    1.5,
                    2.0,
                    3.0,
                    4.0,
                    6.0,
                    -0.5,
                    -1.0,
                    -1.5,
                    -2.0,
                    -3.0,
                    -4.0,
                    -6.0,
                    0.0,
                ]
            ]
        )
        * 448
    )
    packed = pack_nvfp4(block)
    assert float(packed.tensor_scale) == 1.0
    assert packed.scales.float().tolist() == [[448.0]]
    assert packed.codes.tolist() == [[0x10, 0x32, 0x54, 0x76, 0xA9, 0xCB, 0xED, 0x0F]]
    assert torch.equal(unpack_nvfp4(packed, 16), block)


def test_ties_go_to_the_even_code() -> None:
    halves = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]]) * 448
    expected = torch.tensor([[0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]]) * 448
    assert torch.equal(unpack_nvfp4(pack_nvfp4(halves), 8), expected)
    assert torch.equal(unpack_nvfp4(pack_nvfp4(-halves), 8), -expected)


def test_zero_stays_zero_and_non_finite_is_refused() -> None:
    assert torch.equal(unpack_nvfp4(pack_nvfp4(torch.zeros(2, 16)), 16), torch.zeros(2, 16))
    with pytest.raises(ValueError, match="not finite"):
        pack_nvfp4(torch.tensor([[1.0, float("nan")]]))
    with pytest.raises(ValueError, match="matrices"):
        pack_nvfp4(torch.zeros(3))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1e-6, 1.0, 1e4]))
def test_quantisation_is_idempotent_and_within_half_a_step(seed: int, size: float) -> None:
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed)) * size
    packed = pack_nvfp4(weight)
    once = unpack_nvfp4(packed, 32)
    unit = (packed.scales.float() * packed.tensor_scale).repeat_interleave(16, dim=1)
    # Between 4 and 6 codes are 2 apart; a scale rounded down lets the largest lie up to 1/16 beyond
    # 6.
    assert bool(((weight - once).abs() <= unit * 1.0001).all())
