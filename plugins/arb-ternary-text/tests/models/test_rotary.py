from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary_text.models.rotary import rotary_angles, rotate

CPU = torch.device("cpu")


def rotated(x_SC: torch.Tensor, start: int, base: float = 10000.0) -> torch.Tensor:
    cos, sin = rotary_angles(start, x_SC.size(0), x_SC.size(1), base, dtype=x_SC.dtype, device=CPU)
    return rotate(x_SC[None, None], cos, sin)[0, 0]


def test_each_plane_turns_like_a_complex_number() -> None:
    x = torch.randn(7, 10, dtype=torch.float64)
    position = np.arange(3, 10)[:, None]
    plane = np.arange(5)[None, :]
    numbers = (x.numpy()[:, :5] + 1j * x.numpy()[:, 5:]) * np.exp(
        1j * position * 100.0 ** (-2 * plane / 10)
    )
    np.testing.assert_allclose(
        rotated(x, 3, 100.0).numpy(), np.concatenate((numbers.real, numbers.imag), 1), atol=1e-14
    )


def test_rotary_factors_and_scaling() -> None:
    factors = (1.0, 2.0, 8.0)
    cos, sin = rotary_angles(
        5, 4, 6, 100.0, scaling=4.0, factors=factors, dtype=torch.float64, device=CPU
    )
    position = np.arange(5, 9)[:, None] / 4.0
    angle = position * 100.0 ** (-2 * np.arange(3)[None, :] / 6) / np.array(factors)
    np.testing.assert_allclose(cos.numpy(), np.cos(angle), atol=1e-15)
    np.testing.assert_allclose(sin.numpy(), np.sin(angle), atol=1e-15)


@given(first=st.integers(0, 500), second=st.integers(0, 500), shift=st.integers(0, 10**7))
def test_scores_depend_on_relative_positions_only(first: int, second: int, shift: int) -> None:
    generator = torch.Generator().manual_seed(first)
    query, key = torch.randn(2, 1, 16, dtype=torch.float64, generator=generator)
    here = rotated(query, first) @ rotated(key, second).T
    there = rotated(query, first + shift) @ rotated(key, second + shift).T
    # An angle of up to 1e7 radians carries half a unit in its last place, twice; 16 products of
    # size |q| |k| / 16.
    bound = 4 * 1e7 * torch.finfo(torch.float64).eps * float(query.norm() * key.norm())
    assert abs(float(here - there)) <= bound


def test_position_zero_is_unchanged_and_norms_are_kept() -> None:
    x = torch.randn(5, 8, dtype=torch.float64)
    turned = rotated(x, 0)
    assert torch.equal(turned[0], x[0])
    torch.testing.assert_close(turned.norm(dim=1), x.norm(dim=1), rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_dtype_of_the_input_is_kept(dtype: torch.dtype) -> None:
    cos, sin = rotary_angles(0, 3, 4, 10000.0, dtype=torch.float32, device=CPU)
    assert rotate(torch.ones(1, 1, 3, 4, dtype=dtype), cos, sin).dtype == dtype
