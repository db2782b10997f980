"""Layout, quantisation, products, lookup against the torch backend, in sizes that cross panels,
strips and chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from arb_ternary.backends import reference, reference_votes
from arb_ternary.backends.protocol import KernelBackend, WeightShape
from arb_ternary_cpu.backend import build
from arb_ternary_cpu.isa import usable_isas

# For each instruction set.
pytestmark = pytest.mark.sampled("backend")

#: ``(M, N, K, G)``: one row, few rows, one panel more; strips and blocks that are cut; a row as one
#: group. Whole tiles of a matrix unit, 16 x 64, and one row, output and term more; more rows than
#: sums are kept of.
SIZES = (
    (1, 1, 1, 1),
    (1, 33, 300, 128),
    (3, 40, 520, 32),
    (8, 16, 16, 16),
    (9, 31, 4100, 256),
    (17, 100, 257, 64),
    (70, 49, 700, 700),
    (261, 35, 530, 32),
    (16, 32, 64, 32),
    (33, 65, 129, 64),
    (545, 17, 96, 32),
    (6, 130, 4100, 256),
)
#: Exponents: all equal; within one int8; in two bands; in six.
EXPONENTS = ((-3, -3), (-6, 0), (-11, -1), (-100, -60))


def numbers(seed: int, low: int, high: int, *size: int) -> Tensor:
    return torch.randint(low, high + 1, size, generator=torch.Generator().manual_seed(seed)).to(
        torch.int8
    )


def normal(seed: int, *size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=usable_isas())
def backend(request: pytest.FixtureRequest) -> KernelBackend:
    return build(request.param)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Weight:
    """A weight under the backend and under torch."""

    def __init__(
        self,
        backend: KernelBackend,
        rows: int,
        columns: int,
        group: int,
        exponents: tuple[int, int],
    ) -> None:
        self.shape = WeightShape(rows, columns, group)
        self.trits = numbers(rows, -1, 1, rows, columns)
        self.exponent = numbers(columns, *exponents, rows, self.shape.groups)
        self.packed = backend.kernels["pack"](self.trits)
        self.reference = reference.pack(self.trits)
        self.dense = reference.dense_weight(
            self.reference, self.exponent, self.shape, torch.float64
        )


def within(got: Tensor, left: Tensor, right: Tensor, roundings: int) -> bool:
    """Whether a float32 product is as near as so many roundings allow."""
    wanted = left.double() @ right.double()
    bound = (left.double().abs() @ right.double().abs()) * roundings * 2.0**-24
    return bool(((got.double() - wanted).abs() <= bound).all())


@cache
def int8_case(
    size: tuple[int, int, int, int], exponents: tuple[int, int]
) -> tuple[tuple[Tensor, ...], dict[torch.dtype, Tensor]]:
    """Operands, and the torch backend's products of them: made once for all instruction sets and
    numbers of threads.
    """
    rows, out_features, columns, group = size
    shape = WeightShape(out_features, columns, group)
    q = numbers(1, -128, 127, rows, columns)
    scale = normal(2, rows).abs()
    bias = normal(3, out_features)
    grad = numbers(4, -128, 127, rows, out_features)
    unit = torch.tensor(2.0**-9)
    trits = numbers(out_features, -1, 1, out_features, columns)
    exponent = numbers(columns, *exponents, out_features, shape.groups)
    packed = reference.pack(trits)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    products = {
        dtype: reference.linear(q, scale, packed, exponent, bias, shape, dtype) for dtype in dtypes
    }
    return (q, scale, bias, grad, unit, trits, exponent), products


@cache
def int8_grad_input(size: tuple[int, int, int, int], exponents: tuple[int, int]) -> Tensor:
    """As :func:`int8_case`, the gradient of its input."""
    (_, _, _, grad, unit, trits, exponent), _ = int8_case(size, exponents)
    return reference.linear_grad_input(
        grad, unit, reference.pack(trits), exponent, WeightShape(*size[1:]), torch.float32
    )


@pytest.mark.parametrize("exponents", EXPONENTS)
@pytest.mark.parametrize("size", SIZES)
def test_int8_products_are_bitwise_those_of_torch(
    backend: KernelBackend,
    threads: int,
    size: tuple[int, int, int, int],
    exponents: tuple[int, int],
) -> None:
    operands, wanted = int8_case(size, exponents)
    q, scale, bias, grad, unit, trits, exponent = operands
    shape = WeightShape(*size[1:])
    packed = backend.kernels["pack"](trits)
    for dtype, y in wanted.items():
        assert torch.equal(
            backend.kernels["linear"](q, scale, packed, exponent, bias, shape, dtype), y
        )
    got = backend.kernels["linear_grad_input"](grad, unit, packed, exponent, shape, torch.float32)
    assert torch.equal(got, int8_grad_input(size, exponents))


@pytest.mark.parametrize("exponents", [(-3, -3), (-9, 0)])
def test_large_results_are_bitwise_those_of_torch(
    backend: KernelBackend, threads: int, exponents: tuple[int, int]
) -> None:
    # 8.4 MB of float32 and half as many of the others, which are written past the caches where that
    # is possible.
    operands, wanted = int8_case((1100, 1920, 16, 16), exponents)
    q, scale, bias, _, _, trits, exponent = operands
    packed = backend.kernels["pack"](trits)
    for dtype, y in wanted.items():
        out = backend.kernels["linear"](
            q, scale, packed, exponent, bias, WeightShape(1920, 16, 16), dtype
        )
        assert torch.equal(out, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_float_products_are_as_near_as_their_roundings_allow(
    backend: KernelBackend, size: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    rows, out_features, columns, group = size
    weight = Weight(backend, out_features, columns, group, (-100, -60))
    x = normal(1, rows, columns).to(dtype)
    grad = normal(2, rows, out_features).to(dtype)
    y = backend.kernels["linear"](
        x, None, weight.packed, weight.exponent, None, weight.shape, torch.float32
    )
    assert within(y, x, weight.dense.T, 2 * columns + 1)
    arguments = (None, weight.packed, weight.exponent, weight.shape, torch.float32)
    assert within(
        backend.kernels["linear_grad_input"](grad, *arguments),
        grad,
        weight.dense,
        2 * out_features + 1,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["linear", "linear_grad_input"])
def test_float_products_do_not_depend_on_the_number_of_threads(
    backend: KernelBackend, op: str, dtype: torch.dtype
) -> None:
    weight = Weight(backend, 700, 512, 64, (-5, -1))
    x = normal(1, 600, 512 if op == "linear" else 700).to(dtype)
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        arguments = (weight.exponent, None) if op == "linear" else (weight.exponent,)
        results.append(
            backend.kernels[op](x, None, weight.packed, *arguments, weight.shape, torch.float32)
        )
    torch.set_num_threads(1)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_float_products_serve_every_float_dtype(backend: KernelBackend, dtype: torch.dtype) -> None:
    weight = Weight(backend, 40, 200, 64, (-5, -1))
    x = normal(1, 5, 200).to(dtype)
    y = backend.kernels["linear"](
        x, None, weight.packed, weight.exponent, None, weight.shape, dtype
    )
    assert y.dtype == dtype
    roundoff = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-44}[dtype]
    wanted = x.double() @ weight.dense.T
    terms = x.double().abs() @ weight.dense.abs().T
    assert bool(
        (
            (y.double() - wanted).abs()
            <= roundoff * wanted.abs() + terms * 402 * min(2.0**-24, roundoff)
        ).all()
    )


def test_a_scale_of_float64_results_is_that_of_float32(backend: KernelBackend) -> None:
    weight = Weight(backend, 5, 40, 40, (-3, -3))
    q = numbers(1, -127, 127, 2, 40)
    scale = normal(2, 2).abs()
    arguments = (weight.exponent, None, weight.shape)
    y = backend.kernels["linear"](q, scale, weight.packed, *arguments, torch.float64)
    assert torch.equal(y, reference.linear(q, scale, weight.reference, *arguments, torch.float64))


def test_exponents_that_spread_too_far_are_an_error(
    backend: KernelBackend,
) -> None:
    weight = Weight(backend, 20, 64, 32, (0, 0))
    weight.exponent[17, 1] = -41
    q = numbers(1, -127, 127, 3, 64)
    grad = numbers(2, -127, 127, 3, 20)
    with pytest.raises(
        ValueError, match="exponents spread over 41; the exact integer product takes at most 40"
    ):
        backend.kernels["linear"](
            q, torch.ones(3), weight.packed, weight.exponent, None, weight.shape, torch.float32
        )
    with pytest.raises(ValueError, match="spread over 41"):
        backend.kernels["linear_grad_input"](
            grad, torch.tensor(1.0), weight.packed, weight.exponent, weight.shape, torch.float32
        )


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("value", [-128, 127])
@pytest.mark.parametrize("trit", [-1, 1])
def test_sums_of_the_largest_products_are_exact(
    backend: KernelBackend, rows: int, value: int, trit: int
) -> None:
    columns = 4096
    shape = WeightShape(16, columns, columns)
    packed = backend.kernels["pack"](torch.full((16, columns), trit, dtype=torch.int8))
    x = torch.full((rows, columns), value, dtype=torch.int8)
    y = backend.kernels["linear"](
        x, torch.ones(rows), packed, numbers(0, 0, 0, 16, 1), None, shape, torch.float32
    )
    assert torch.equal(y, torch.full((rows, 16), float(columns * value * trit)))


@pytest.mark.parametrize("rows", [1, 2, 20])
def test_sums_beyond_32_bits_are_exact(backend: KernelBackend, rows: int) -> None:
    columns = 1 << 18
    shape = WeightShape(3, columns, 256)
    packed = backend.kernels["pack"](torch.ones((3, columns), dtype=torch.int8))
    exponent = torch.full((3, shape.groups), 6, dtype=torch.int8)
    exponent[:, 0] = 0
    x = torch.full((rows, columns), -128, dtype=torch.int8)
    y = backend.kernels["linear"](x, torch.ones(rows), packed, exponent, None, shape, torch.float32)
    assert y.unique().tolist() == [
        float(torch.tensor(-128 * (256 + 64 * (columns - 256)), dtype=torch.float32))
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 15, 16, 129, 1000])
def test_quantised_rows_are_bitwise_those_of_torch(
    backend: KernelBackend, threads: int, columns: int, dtype: torch.dtype
) -> None:
    x = normal(columns, 70, columns).to(dtype)
    x[3] = 0
    x[4] *= torch.tensor(1e-6).to(dtype)
    x[5, 0] = torch.nan
    x[6, -1] = torch.inf
    x[7, 0] = -torch.inf
    for got, wanted in zip(
        backend.kernels["quantize_rows"](x), reference.quantize_rows(x), strict=True
    ):
        assert torch.equal(got.nan_to_num(nan=-5.0), wanted.nan_to_num(nan=-5.0))


def test_quantised_subnormal_rows_are_bitwise_those_of_torch(
    backend: KernelBackend,
) -> None:
    x = torch.arange(-400, 401, dtype=torch.int32).repeat(40, 1).float() * 2.0**-149
    x = x * torch.arange(40).unsqueeze(1)
    for got, wanted in zip(
        backend.kernels["quantize_rows"](x), reference.quantize_rows(x), strict=True
    ):
        assert torch.equal(got, wanted)


ROUNDING = (-7, (3 << 20) + 1, 8 * 0xDEADBEEF + 1)


@cache
def rounded_gradient(
    special: float | None, dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A gradient, and what the torch backend rounds it to: once for all instruction sets and
    numbers of threads.
    """
    grad = normal(1, 131, 257).mul_(1e-3).to(dtype)
    if special == 0.0:
        grad.zero_()
    elif special is not None:
        grad[17, 40] = special
    return grad, reference_votes.quantize_gradient(grad, *ROUNDING)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("special", [None, torch.nan, torch.inf, 0.0, 127.0, 3e38, 1e-45])
def test_rounded_gradients_are_bitwise_those_of_torch(
    backend: KernelBackend, threads: int, special: float | None, dtype: torch.dtype
) -> None:
    grad, rounded = rounded_gradient(special, dtype)
    for got, wanted in zip(
        backend.kernels["quantize_gradient"](grad, *ROUNDING), rounded, strict=True
    ):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_lookup_has_the_bits_of_the_torch_backend(
    backend: KernelBackend, threads: int, dtype: torch.dtype
) -> None:
    weight = Weight(backend, 1000, 157, 32, (-30, 3))
    ids = torch.randint(0, 1000, (900,), generator=torch.Generator().manual_seed(0))
    got = backend.kernels["embedding"](ids, weight.packed, weight.exponent, weight.shape, dtype)
    assert torch.equal(
        got, reference.embedding(ids, weight.reference, weight.exponent, weight.shape, dtype)
    )


def test_the_layout_is_sixteen_by_sixteen_blocks_of_two_bits(backend: KernelBackend) -> None:
    trits = torch.zeros((17, 18), dtype=torch.int8)
    trits[1, 5] = 1
    trits[16, 17] = -1
    packed = backend.kernels["pack"](trits)
    assert packed.shape == (2, 2, 64)
    expected = torch.full((2, 2, 64), 0b01010101, dtype=torch.uint8)
    # Row 1 is dword 1; column 5 = 4 * 1 + 1 is byte 1, bits 2 and 3.
    expected[0, 0, 5] = 0b01011001
    # Row 16 is dword 0 of the second strip; column 17 is column 1 of the second block: byte 1, bits
    # 0 and 1.
    expected[1, 1, 1] = 0b01010100
    assert torch.equal(packed, expected)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 40),
    columns=st.integers(0, 300),
    batch=st.integers(0, 20),
    group=st.sampled_from([16, 32, 64, 128, 256, 0]),
    isa=st.sampled_from(usable_isas()),
    seed=st.integers(0, 1000),
)
def test_any_size_gives_the_bits_of_the_torch_backend(
    rows: int, columns: int, batch: int, group: int, isa: str, seed: int
) -> None:
    kernels = build(isa).kernels
    shape = WeightShape(rows, columns, group or max(columns, 1))
    trits = numbers(seed, -1, 1, rows, columns)
    exponent = numbers(seed, -5, 4, rows, shape.groups)
    packed = kernels["pack"](trits)
    wanted = reference.pack(trits)
    assert torch.equal(kernels["unpack"](packed, shape), trits)
    q, scale = kernels["quantize_rows"](normal(seed, batch, columns))
    tail = (exponent, None, shape, torch.float32)
    assert torch.equal(
        kernels["linear"](q, scale, packed, *tail), reference.linear(q, scale, wanted, *tail)
    )
    grad = numbers(seed, -127, 127, batch, rows)
    unit = torch.tensor(0.25)
    tail = (exponent, shape, torch.float32)
    got = kernels["linear_grad_input"](grad, unit, packed, *tail)
    assert torch.equal(got, reference.linear_grad_input(grad, unit, wanted, *tail))
