"""What the kit's shapes are too small to reach: sums in pieces, several tiles, long sums, indices
beyond 32 bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from arb_ternary.backends import reference, reference_scaled_votes, reference_votes
from arb_ternary.backends.protocol import WeightShape
from arb_ternary.backends.select import get_backend
from arb_ternary.backends.vote_state import VoteLimits, VoteState, new_state
from arb_ternary.counters.hashing import counter_hash, hash_keys
from arb_ternary_triton import casting, products
from arb_ternary_triton.kernels.common import draw_at
from arb_ternary_triton.launch import launch
from arb_ternary_triton.tiles import ProductTile, Tile

pytestmark = pytest.mark.interpreted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _run(op: str, *arguments: Any) -> Any:
    return get_backend("triton").kernels[op](*arguments)


def _weight(
    rows: int, columns: int, group: int, low: int = -6, high: int = -2
) -> tuple[Tensor, Tensor, WeightShape]:
    """Trits, exponents and the shape; fresh, but the same for the same arguments."""
    generator = torch.Generator().manual_seed(rows + columns)
    shape = WeightShape(rows, columns, group)
    trits = torch.randint(-1, 2, (rows, columns), dtype=torch.int8, generator=generator)
    exponent = torch.randint(
        low, high + 1, (rows, shape.groups), dtype=torch.int8, generator=generator
    )
    return trits, exponent, shape


def _bytes(seed: int, *size: int) -> Tensor:
    return torch.randint(
        -127, 128, size, dtype=torch.int8, generator=torch.Generator().manual_seed(seed)
    )


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that every operand takes several, and every sum several programs."""
    product = ProductTile(rows=16, outputs=32, blocks=1, split=3)
    monkeypatch.setattr(products, "choose_row", lambda *_: ProductTile(1, 8, 1, split=3))
    monkeypatch.setattr(products, "choose_linear", lambda *_: product)
    monkeypatch.setattr(products, "choose_grad_input", lambda *_: product)
    monkeypatch.setattr(products, "elementwise", lambda *_: Tile(rows=4, columns=128))
    monkeypatch.setattr(casting, "elementwise", lambda *_: Tile(rows=2, columns=128))
    monkeypatch.setattr(casting, "choose_votes", lambda *_: ProductTile(32, 16, 1))


@pytest.mark.parametrize(
    ("rows", "low", "high"),
    [
        (19, -6, -2),
        (1, -20, 10),
        pytest.param(1, -6, -2, marks=pytest.mark.slow),
        pytest.param(19, -20, 10, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("small_tiles")
def test_a_sum_that_programs_share_is_the_same(rows: int, low: int, high: int) -> None:
    trits, exponent, shape = _weight(37, 300, 32, low, high)
    packed = _run("pack", trits.to(DEVICE))
    bias = torch.randn(37)
    x = _bytes(1, rows, 300)
    scale = torch.rand(rows)
    given = (
        x.to(DEVICE),
        scale.to(DEVICE),
        packed,
        exponent.to(DEVICE),
        bias.to(DEVICE),
        shape,
        torch.float32,
    )
    wanted = reference.linear(x, scale, reference.pack(trits), exponent, bias, shape, torch.float32)
    assert torch.equal(_run("linear", *given).cpu(), wanted)
    grad = _bytes(2, rows, 37)
    unit = torch.tensor(2.0**-9)
    given = (grad.to(DEVICE), unit.to(DEVICE), packed, exponent.to(DEVICE), shape, torch.float32)
    wanted = reference.linear_grad_input(
        grad, unit, reference.pack(trits), exponent, shape, torch.float32
    )
    assert torch.equal(_run("linear_grad_input", *given).cpu(), wanted)


def _cast(
    run: Any, pack: Any, grad: Tensor, x: Tensor, shape: WeightShape, trits: Tensor
) -> list[Tensor]:
    device = DEVICE if run is not reference_scaled_votes.cast_scaled_votes else "cpu"
    shifts = torch.full(
        (shape.out_features + shape.in_features,), 7, dtype=torch.int32, device=device
    )
    magnitudes = torch.zeros(shifts.shape, device=device)
    limits = torch.tensor(VoteLimits(1024, 2), device=device)
    control = torch.tensor([11, 5, 77, 0], device=device)
    state = _state(pack(trits.to(device)), shape, limits=limits, control=control)
    state = state._replace(vote_scale=shifts, magnitudes=magnitudes)
    run(grad.to(device), x.to(device), torch.tensor(2.0**-3, device=device), state)
    return [tensor.cpu() for tensor in (state.votes, state.learned, state.stats, magnitudes)]


def _state(packed: Tensor, shape: WeightShape, **others: Tensor) -> VoteState:
    size = (shape.out_features, shape.in_features)
    groups = (shape.out_features, shape.groups)
    exponent, votes = (
        torch.zeros(each, dtype=torch.int8, device=packed.device) for each in (groups, size)
    )
    return new_state(shape, packed, exponent, votes, "triton", **others)


@pytest.mark.parametrize("group", [32, 64, 128, 256, 300])
@pytest.mark.usefixtures("small_tiles")
def test_votes_of_several_tiles_are_those_of_one(group: int) -> None:
    trits, _, shape = _weight(37, 300, group)
    operands = _bytes(3, 70, 37), _bytes(4, 70, 300)
    got = _cast(
        casting.cast_scaled_votes, get_backend("triton").kernels["pack"], *operands, shape, trits
    )
    wanted = _cast(
        reference_scaled_votes.cast_scaled_votes, reference.pack, *operands, shape, trits
    )
    for index in (0, 1, 3):
        assert torch.equal(got[index], wanted[index])
    assert torch.allclose(got[2], wanted[2], rtol=2.0**-18)


@pytest.mark.usefixtures("small_tiles")
def test_a_sum_too_long_for_32_bits_is_taken_in_64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casting, "_INT32_TERMS", 10)
    trits, _, shape = _weight(5, 40, 32)
    operands = _bytes(5, 70, 5), _bytes(6, 70, 40)
    got = _cast(
        casting.cast_scaled_votes, get_backend("triton").kernels["pack"], *operands, shape, trits
    )
    wanted = _cast(
        reference_scaled_votes.cast_scaled_votes, reference.pack, *operands, shape, trits
    )
    assert all(torch.equal(got[index], wanted[index]) for index in (0, 1, 3))


@pytest.mark.usefixtures("small_tiles")
def test_a_lookup_of_many_rows_votes_as_the_reference_does() -> None:
    trits, _, shape = _weight(23, 200, 64)
    ids = torch.randint(0, 23, (60,), generator=torch.Generator().manual_seed(8))
    grad = _bytes(9, 60, 200)

    def cast(run: Any, pack: Any, device: str) -> list[Tensor]:
        state = _state(pack(trits.to(device)), shape)
        run(ids.to(device), grad.to(device), torch.tensor(0.5, device=device), state)
        return [tensor.cpu() for tensor in (state.votes, state.learned, state.stats)]

    got = cast(casting.embedding_votes, get_backend("triton").kernels["pack"], DEVICE)
    wanted = cast(reference_votes.embedding_votes, reference.pack, "cpu")
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[1], wanted[1])
    assert torch.allclose(got[2], wanted[2], rtol=2.0**-18)


@triton.jit
def _draw_kernel(out, row, width, key, next_key, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.arange(0, 32)
    tl.store(
        out + column, draw_at(row, column, width, key, next_key, WIDE).to(tl.int32, bitcast=True)
    )


@pytest.mark.parametrize(
    ("row", "width"), [(0, 40), (3, 1 << 20), ((1 << 16) - 1, 65537), (1 << 17, 32768)]
)
def test_the_hash_of_an_element_is_that_of_its_flat_index(row: int, width: int) -> None:
    *keys, wide = hash_keys(3, 4, 5, row * width + 32 if row * width + 32 > 1 << 32 else 1)
    out = torch.empty(32, dtype=torch.int32, device=DEVICE)
    launch(_draw_kernel, (1,), out, row, width, *keys, WIDE=wide)
    assert torch.equal(out.cpu(), counter_hash(32, 3, 4, 5, start=row * width))


def test_more_elements_than_the_hash_serves_are_refused() -> None:
    with pytest.raises(ValueError, match="up to 8589934592 elements"):
        hash_keys(1, 2, 3, (1 << 33) + 1)


def test_arguments_that_kernels_cannot_take_are_named() -> None:
    trits, exponent, shape = _weight(4, 64, 32)
    packed = _run("pack", trits.to(DEVICE))
    exponent = exponent.to(DEVICE)
    ones = torch.ones(2, 64, device=DEVICE)
    with pytest.raises(
        ValueError, match=r"group_size must be a multiple of 32, or all of a row, got 48"
    ):
        _run("unpack", packed, WeightShape(4, 64, 48))
    with pytest.raises(ValueError, match=r"packed must be \[5, 32\], got \[4, 32\]"):
        _run("unpack", packed, WeightShape(5, 64, 32))
    with pytest.raises(TypeError, match=r"exponent must be torch.int8, got torch.int32"):
        _run("linear", ones, None, packed, exponent.int(), None, shape, torch.float32)
    with pytest.raises(TypeError, match=r"serves float32, bfloat16 and float16, got torch.int32"):
        _run("linear", ones, None, packed, exponent, None, shape, torch.int32)
    turned = torch.zeros((64, 4), dtype=torch.int8, device=DEVICE).t()
    with pytest.raises(ValueError, match="votes is written in place and must be contiguous"):
        _run("apply_votes", new_state(shape, packed, exponent, turned, "triton"), 3, 0)
    exponent[0, 0] = -50
    exponent[0, 1] = 20
    with pytest.raises(
        ValueError, match="spread over 70; the exact integer product takes at most 40"
    ):
        _run(
            "linear",
            ones.to(torch.int8),
            torch.ones(2, device=DEVICE),
            packed,
            exponent,
            None,
            shape,
            torch.float32,
        )


@pytest.mark.skipif(DEVICE == "cuda", reason="a failed assertion ends all use of the device")
def test_ids_outside_are_named() -> None:
    trits, exponent, shape = _weight(4, 64, 32)
    packed = _run("pack", trits)
    with pytest.raises(IndexError, match=r"ids must lie in 0..3, got 0..4"):
        _run("embedding", torch.tensor([0, 4]), packed, exponent, shape, torch.float32)


def test_float64_goes_through_a_dense_weight() -> None:
    trits, exponent, shape = _weight(5, 40, 32)
    packed = _run("pack", trits.to(DEVICE))
    x = torch.randn(3, 40, dtype=torch.float64)
    grad = torch.randn(3, 5, dtype=torch.float64)
    dense = reference.dense_weight(reference.pack(trits), exponent, shape, torch.float64)
    y = _run("linear", x.to(DEVICE), None, packed, exponent.to(DEVICE), None, shape, torch.float64)
    back = _run(
        "linear_grad_input",
        grad.to(DEVICE),
        None,
        packed,
        exponent.to(DEVICE),
        shape,
        torch.float64,
    )
    assert torch.allclose(y.cpu(), x @ dense.T, rtol=1e-14, atol=1e-14)
    assert torch.allclose(back.cpu(), grad @ dense, rtol=1e-14, atol=1e-14)
