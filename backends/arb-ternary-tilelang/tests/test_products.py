"""Paths that the kit's shapes do not reach, against the torch backend: split sums, many rows, kept
levels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from arb_ternary.backends import floors, reference, reference_votes
from arb_ternary.backends.protocol import WeightShape
from arb_ternary.backends.vote_state import new_state
from arb_ternary.counters.hashing import uniform
from arb_ternary_tilelang.backend import build
from arb_ternary_tilelang.bands import bands_of
from arb_ternary_tilelang.products import FEW_ROWS, GEMV_ROWS


@pytest.fixture(scope="module")
def kernels() -> Mapping[str, Callable[..., Tensor]]:
    return build().kernels  # type: ignore[return-value]


def numbers(low: int, high: int, *size: int) -> Tensor:
    return torch.randint(
        low, high + 1, size, generator=torch.Generator().manual_seed(sum(size))
    ).to(torch.int8)


@pytest.mark.parametrize("rows", [GEMV_ROWS, GEMV_ROWS + 1, FEW_ROWS, FEW_ROWS + 1])
def test_every_way_to_sum_gives_the_same_bits(
    rows: int, kernels: Mapping[str, Callable[..., Tensor]]
) -> None:
    shape = WeightShape(35, 2100, 64)
    trits = numbers(-1, 1, 35, 2100)
    exponent = numbers(-6, -1, 35, shape.groups)
    q = numbers(-127, 127, rows, 2100)
    scale = torch.rand(rows)
    bias = torch.randn(35)
    got = kernels["linear"](q, scale, kernels["pack"](trits), exponent, bias, shape, torch.float32)
    assert torch.equal(
        got, reference.linear(q, scale, reference.pack(trits), exponent, bias, shape, torch.float32)
    )


@pytest.mark.parametrize("rows", [3, FEW_ROWS + 1])
def test_a_gradient_that_is_summed_over_many_rows_is_exact(
    rows: int, kernels: Mapping[str, Callable[..., Tensor]]
) -> None:
    shape = WeightShape(2100, 35, 35)
    trits = numbers(-1, 1, 2100, 35)
    exponent = numbers(-6, -1, 2100, 1)
    grad = numbers(-127, 127, rows, 2100)
    scale = torch.tensor(2.0**-9)
    got = kernels["linear_grad_input"](
        grad, scale, kernels["pack"](trits), exponent, shape, torch.bfloat16
    )
    wanted = reference.linear_grad_input(
        grad, scale, reference.pack(trits), exponent, shape, torch.bfloat16
    )
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, wanted)


def test_int8_activations_meet_a_float_gradient(
    kernels: Mapping[str, Callable[..., Tensor]],
) -> None:
    shape = WeightShape(17, 50, 32)
    trits = numbers(-1, 1, 17, 50)
    grad = numbers(-3, 3, 6, 17).to(torch.bfloat16)
    x = numbers(-127, 127, 6, 50)
    kept = []
    for cast, pack in (
        (kernels["cast_votes"], kernels["pack"]),
        (reference_votes.cast_votes, reference.pack),
    ):
        votes = torch.zeros(17, 50, dtype=torch.int8)
        exponent = torch.zeros(17, 2, dtype=torch.int8)
        state = new_state(shape, pack(trits), exponent, votes, "")
        cast(grad, x, None, state)
        kept.append((state.votes, state.learned))
    assert torch.equal(kept[0][0], kept[1][0])
    assert torch.equal(kept[0][1], kept[1][1])


def test_bands_are_found_out_once_when_the_exponents_change(
    kernels: Mapping[str, Callable[..., Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    begin = floors.Arriving.__init__

    def counted(self: floors.Arriving, numbers: Tensor) -> None:
        sent.append(numbers)
        begin(self, numbers)

    monkeypatch.setattr(floors.Arriving, "__init__", counted)
    shape = WeightShape(4, 96, 32)
    exponent = numbers(-6, -1, 4, 3)
    votes = torch.full((4, 3), 127, dtype=torch.int8)
    first = bands_of(exponent, shape, False)
    assert bands_of(exponent, shape, False) is first
    assert bands_of(exponent, shape, True) is not first
    assert len(sent) == 1
    packed = kernels["pack"](numbers(-1, 1, 4, 96))
    none = torch.zeros(4, 96, dtype=torch.int8)
    state = new_state(shape, packed, exponent, none, "tilelang", exponent_votes=votes)
    kernels["apply_exponent_votes"](state, 1, 3, 0)
    # on their way before a product asks, so that the step's own transfer comes after them
    assert len(sent) == 2
    second = bands_of(exponent, shape, False)
    assert second is not first
    assert torch.equal(second.floor, first.floor + 1)
    exponent[0, 0] = 9
    turned = bands_of(exponent, shape, True)
    assert torch.equal(turned.floor[::32], exponent.amin(dim=0).to(torch.int32))
    assert len(turned.shifts) == 1 + int(exponent[:, 0].amax() - exponent[:, 0].amin()) // 7
    assert len(sent) == 3


def test_exponents_that_spread_too_far_are_refused(
    kernels: Mapping[str, Callable[..., Tensor]],
) -> None:
    shape = WeightShape(1, 64, 32)
    exponent = torch.tensor([[-41, 0]], dtype=torch.int8)
    packed = kernels["pack"](numbers(-1, 1, 1, 64))
    with pytest.raises(
        ValueError, match="exponents spread over 41; the exact integer product takes at most 40"
    ):
        kernels["linear"](
            numbers(-9, 9, 2, 64), torch.ones(2), packed, exponent, None, shape, torch.float32
        )


def test_gradients_next_to_an_integer_round_by_the_format(
    kernels: Mapping[str, Callable[..., Tensor]],
) -> None:
    # with the random number a tie of float32, or the place beside it
    grad = 9 - uniform((64, 128), 5, 2, 3)
    grad[0, 0] = 100.0  # a scale of one
    ours, scale = kernels["quantize_gradient"](grad, 5, 2, 3)
    wanted, unit = reference.build().kernels["quantize_gradient"](grad, 5, 2, 3)
    assert scale == unit == 1.0
    assert torch.equal(ours, wanted)
