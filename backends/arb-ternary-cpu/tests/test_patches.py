"""Convolutions against torch's unfold and fold, and against the torch backend on the patches: the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import fold, unfold

from arb_ternary.backends import reference
from arb_ternary.backends.protocol import KernelBackend, WeightShape
from arb_ternary.backends.select import get_backend
from arb_ternary_cpu.backend import build
from arb_ternary_cpu.isa import usable_isas
from arb_ternary_vision.convolution import TernaryConv2d

Window = tuple[int, int, int, int, int, int, int, int]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Window, tuple[int, int, int, int]]:
    """A window and an image that it fits into: small, or with several bands of lines."""
    window: list[int] = []
    size: list[int] = []
    for _ in range(2):
        taps, dilation, padding, stride = (
            draw(st.integers(1, 4)),
            *(draw(st.integers(low, 3)) for low in (1, 0, 1)),
        )
        window += [taps, dilation, padding, stride]
        size.append(draw(st.integers(max(1, dilation * (taps - 1) + 1 - 2 * padding), 40)))
    batch = draw(st.integers(1, 3))
    channels = draw(st.sampled_from((1, 2, 3, 16, 17, 33)))
    return (*window[::4], *window[1::4], *window[2::4], *window[3::4]), (batch, channels, *size)  # type: ignore[return-value]


def image(seed: int, size: Sequence[int], dtype: torch.dtype, layout: str, content: str) -> Tensor:
    torch.manual_seed(seed)
    x = torch.randn(*size)
    # multiples of a quarter of the scale: quotients half-way between integers
    if content == "ties":
        x = torch.randint(-508, 509, x.shape) / 4
        x.view(-1)[0] = 127
    elif content == "sparse":
        x *= torch.rand_like(x) < 0.05
    elif content == "tiny":
        x *= 1e-37
    elif content == "not finite":
        x.view(-1)[seed % x.numel()] = float("nan")
        x.view(-1)[seed * 7 % x.numel()] = float("-inf")
    x = x.to(dtype)
    if layout == "last":
        return x.to(memory_format=torch.channels_last)
    return x.transpose(1, 3).contiguous().transpose(1, 3) if layout == "turned" else x


def kernels_of(backend: KernelBackend) -> Mapping[str, Callable[..., Any]]:
    return backend.kernels


def rows_of(x: Tensor, window: Window) -> Tensor:
    patches = unfold(x.float(), window[:2], window[2:4], window[4:6], window[6:])
    return patches.transpose(1, 2).reshape(-1, patches.shape[1])


def assert_same(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("isa", usable_isas())
@settings(max_examples=25, deadline=None)
@given(
    case=cases(),
    seed=st.integers(0, 999),
    dtype=st.sampled_from(
        (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
    ),
    layout=st.sampled_from(("first", "last", "turned")),
    content=st.sampled_from(("normal", "normal", "ties", "sparse", "tiny", "not finite")),
    spread=st.sampled_from((0, 3, 6, 12)),
    outputs=st.sampled_from((1, 16, 19, 40)),
)
def test_every_bit_is_that_of_patches_as_rows(
    isa: str,
    case: tuple[Window, tuple[int, int, int, int]],
    seed: int,
    dtype: torch.dtype,
    layout: str,
    content: str,
    spread: int,
    outputs: int,
) -> None:
    window, size = case
    kernels = kernels_of(build(isa))
    x = image(seed, size, dtype, layout, content)
    rows = rows_of(x, window)
    wanted_q, wanted_scale = reference.quantize_rows(rows)
    q, scale = kernels["vision.unfold_quantize"](x, window)
    assert_same(q, wanted_q)
    assert_same(scale, wanted_scale)

    shape = WeightShape(outputs, rows.shape[1], 32)
    trits = torch.randint(-1, 2, (outputs, shape.in_features), dtype=torch.int8)
    exponent = torch.randint(-9, -8 + spread, (outputs, shape.groups), dtype=torch.int8)
    bias = torch.randn(outputs) if seed % 2 else None
    wanted = reference.linear(
        wanted_q, wanted_scale, reference.pack(trits), exponent, bias, shape, dtype
    )
    assert_same(
        kernels["vision.convolve"](x, kernels["pack"](trits), exponent, bias, shape, window), wanted
    )

    grad = torch.randn_like(rows)
    patches = grad.view(size[0], -1, rows.shape[1]).transpose(1, 2)
    summed = fold(patches, size[2:], window[:2], window[2:4], window[4:6], window[6:]).permute(
        0, 2, 3, 1
    )
    found = kernels["vision.fold_patches"](grad, (size[0], *size[2:], size[1]), window)
    assert_same(found, summed.contiguous())


def test_large_images_are_cut_into_bands(threads: int) -> None:
    kernels = kernels_of(get_backend("cpu"))
    window = (3, 3, 1, 1, 1, 1, 1, 1)
    x = image(3, (2, 40, 70, 90), torch.float32, "first", "normal")
    wanted_q, wanted_scale = reference.quantize_rows(rows_of(x, window))
    q, scale = kernels["vision.unfold_quantize"](x, window)
    assert_same(q, wanted_q)
    assert_same(scale, wanted_scale)
    shape = WeightShape(24, 360, 128)
    trits = torch.randint(-1, 2, (24, 360), dtype=torch.int8)
    exponent = torch.zeros(24, 3, dtype=torch.int8)
    wanted = reference.linear(
        wanted_q, wanted_scale, reference.pack(trits), exponent, None, shape, torch.float32
    )
    assert_same(
        kernels["vision.convolve"](x, kernels["pack"](trits), exponent, None, shape, window), wanted
    )


@pytest.mark.parametrize("gradients", ["float", "int8"])
def test_a_layer_learns_as_on_the_torch_backend(gradients: str, threads: int) -> None:
    outcomes = []
    for backend in ("torch", "cpu"):
        torch.manual_seed(1)
        layer = TernaryConv2d(
            5, 20, 3, stride=2, padding=1, gradients=gradients, bias=True, backend=backend
        )
        x = torch.randn(6, 5, 11, 13, requires_grad=True)
        y = layer(x)
        y.backward(torch.randn_like(y))
        assert x.grad is not None
        outcomes.append(
            (y.detach(), x.grad, layer.logical_votes(), layer.exponent_votes, layer.bias_votes)
        )
    for index, (theirs, ours) in enumerate(zip(*outcomes, strict=True)):
        if gradients == "float" and index == 1:  # the order of float sums differs
            torch.testing.assert_close(ours, theirs)
        elif gradients == "int8" or index in (0, 4):
            assert_same(ours, theirs)
        else:
            assert (ours != theirs).float().mean() < 0.01


def test_nothing_in_or_out() -> None:
    kernels = kernels_of(get_backend("cpu"))
    window = (1, 1, 1, 1, 0, 0, 1, 1)
    shape = WeightShape(4, 3, 32)
    packed = kernels["pack"](torch.ones(4, 3, dtype=torch.int8))
    exponent = torch.zeros(4, 1, dtype=torch.int8)
    y = kernels["vision.convolve"](torch.zeros(0, 3, 5, 5), packed, exponent, None, shape, window)
    assert y.shape == (0, 4)
    assert_same(
        kernels["vision.convolve"](
            torch.zeros(1, 3, 1, 2), packed, exponent, torch.arange(4.0), shape, window
        ),
        torch.arange(4.0).expand(2, 4),
    )


def test_wrong_arguments_are_refused() -> None:
    kernels = kernels_of(get_backend("cpu"))
    window = (3, 3, 1, 1, 0, 0, 1, 1)
    with pytest.raises(ValueError, match=r"\[B, C, H, W\]"):
        kernels["vision.unfold_quantize"](torch.zeros(3, 5, 5), window)
    with pytest.raises(ValueError, match="smaller than the kernel"):
        kernels["vision.unfold_quantize"](torch.zeros(1, 3, 2, 5), window)
    with pytest.raises(ValueError, match="taps, dilation, padding and stride"):
        kernels["vision.unfold_quantize"](torch.zeros(1, 3, 5, 5), (3, 3, 1, 1, 0, 0, 0, 1))
    with pytest.raises(TypeError, match="float32, bfloat16 and float16"):
        kernels["vision.unfold_quantize"](torch.zeros(1, 3, 5, 5, dtype=torch.int8), window)
    packed = kernels["pack"](torch.ones(4, 9, dtype=torch.int8))
    exponent = torch.zeros(4, 1, dtype=torch.int8)
    with pytest.raises(ValueError, match="27 elements do not fit"):
        kernels["vision.convolve"](
            torch.zeros(1, 3, 5, 5), packed, exponent, None, WeightShape(4, 9, 32), window
        )
    with pytest.raises(ValueError, match="rows must be"):
        kernels["vision.fold_patches"](torch.zeros(4, 27), (1, 5, 5, 3), window)
