"""Convolutions of int8 patches have the bits and votes of linears over torch's unfolded rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import unfold

import arb_ternary
from arb_ternary import TernaryLinear
from arb_ternary.backends.registration import Op
from arb_ternary.backends.select import candidates, use_backend
from arb_ternary_vision import convolution_ops
from arb_ternary_vision.convolution import TernaryConv1d, TernaryConv2d

USABLE = [found.name for found in candidates() if found.usable]
QUICK = ("torch", USABLE[0])
every_backend = pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in USABLE],
)
#: Kernel size, dilation, padding and stride, height before width.
WINDOW = (3, 2, 1, 2, 1, 0, 2, 1)


def made(backend: str, gradients: str, bias: bool = True) -> tuple[TernaryConv2d, TernaryLinear]:
    """Return a convolution and a linear with the same integers."""
    options = {"bias": bias, "group_size": 32, "gradients": gradients, "backend": backend}
    conv = TernaryConv2d(
        5, 12, WINDOW[:2], dilation=WINDOW[2:4], padding=WINDOW[4:6], stride=WINDOW[6:], **options
    )  # type: ignore[arg-type]
    linear = TernaryLinear(30, 12, **options)  # type: ignore[arg-type]
    linear.load_state_dict(conv.state_dict())
    return conv, linear


@every_backend
@pytest.mark.parametrize("gradients", ["float", "int8"])
def test_convolution_is_a_linear_over_patches(gradients: str, backend: str) -> None:
    conv, linear = made(backend, gradients)
    x = torch.randn(3, 5, 9, 11, requires_grad=True)
    same = x.detach().clone().requires_grad_()
    y = conv(x)
    patches = unfold(same, WINDOW[:2], WINDOW[2:4], WINDOW[4:6], WINDOW[6:])
    rows = linear(patches.transpose(1, 2).reshape(-1, 30))
    assert y.shape == (3, 12, 5, 9)
    assert torch.equal(y.permute(0, 2, 3, 1).reshape(-1, 12), rows)

    grad = torch.randn_like(y)
    y.backward(grad)
    rows.backward(grad.permute(0, 2, 3, 1).reshape(-1, 12))
    assert x.grad is not None
    assert same.grad is not None
    assert torch.equal(x.grad, same.grad)
    wanted = linear.state_dict()
    for name, value in conv.state_dict().items():
        assert torch.equal(value, wanted[name]), name
    assert int(conv.logical_votes().abs().sum()) > 0


def test_autocast_and_one_dimension() -> None:
    conv = TernaryConv1d(3, 4, 3, stride=2, padding=1)
    x = torch.randn(2, 3, 9)
    with torch.autocast("cpu", torch.bfloat16):
        y = conv(x)
    assert (y.dtype, y.shape) == (torch.bfloat16, (2, 4, 5))
    assert torch.equal(y, conv(x.bfloat16()))


@every_backend
@pytest.mark.parametrize("name", ["convolution", "unfold_quantize", "fold_patches"])
def test_opcheck_accepts(name: str, backend: str) -> None:
    conv, _ = made(backend, "int8")
    x = torch.randn(2, 5, 9, 11, requires_grad=name == "convolution")
    arguments = {
        "convolution": (
            x,
            conv.anchor,
            torch.randn(12, requires_grad=True),
            *conv.vote_state(),
            [*WINDOW],
            "int8",
        ),
        "unfold_quantize": (x, [*WINDOW], backend),
        "fold_patches": (torch.randn(90, 30), [2, 9, 11, 5], [*WINDOW], backend),
    }[name]
    op = getattr(torch.ops.arb_ternary, name).default
    assert set(torch.library.opcheck(op, arguments).values()) == {"SUCCESS"}


def test_opcheck_covers_every_op() -> None:
    registered = {name for name, value in vars(convolution_ops).items() if isinstance(value, Op)}
    assert registered == {"convolution", "unfold_quantize", "fold_patches"}


@pytest.mark.parametrize("backend", [pytest.param("torch", marks=pytest.mark.slow), USABLE[0]])
def test_compiled_convolution_is_one_graph(backend: str) -> None:
    outcomes: list[tuple[Tensor, Tensor]] = []
    torch._dynamo.reset()
    for compiled in (False, True):
        torch.manual_seed(1)
        with use_backend(backend):
            conv = TernaryConv2d(3, 8, 3, padding=1, gradients="int8", bias=True)
        x = torch.randn(2, 3, 6, 7)
        run = torch.compile(conv, fullgraph=True, backend="aot_eager") if compiled else conv
        y = run(x)
        y.square().sum().backward()
        outcomes.append((y.detach(), conv.logical_votes()))
    for eager, graph in zip(*outcomes, strict=True):
        assert torch.equal(eager, graph)


def test_convolution_refuses_images_that_do_not_fit() -> None:
    conv = TernaryConv2d(3, 4, (3, 5))
    with pytest.raises(
        ValueError, match=r"\[4, 4\] with padding \[0, 0\] is smaller than the kernel \(3, 5\)"
    ):
        conv(torch.randn(1, 3, 4, 4))
    with pytest.raises(ValueError, match=r"float tensor \[B, 3, H, W\]"):
        conv(torch.randn(1, 2, 8, 8))
    with pytest.raises(ValueError, match=r"float tensor \[B, 3, H, W\]"):
        conv(torch.ones(1, 3, 8, 8, dtype=torch.int32))


@pytest.mark.parametrize("kernel", [1, 3, (2, 3)])
def test_float_activations_match_torch(kernel: int | tuple[int, int]) -> None:
    layer = TernaryConv2d(3, 5, kernel, stride=(1, 2), padding=1, activations="float")
    x = torch.randn(2, 3, 8, 9)
    weight = layer.dense_weight().view(5, 3, *layer.kernel_size)
    torch.testing.assert_close(
        layer(x),
        torch.nn.functional.conv2d(x, weight, stride=(1, 2), padding=1),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_vote_bits(bits: int) -> None:
    for module in (TernaryConv1d(2, 3, 3, vote_bits=bits), TernaryConv2d(2, 3, 3, vote_bits=bits)):
        assert module.shape.vote_bits == bits
        assert not module.logical_votes().any()


def test_core_exports_convolutions() -> None:
    assert arb_ternary.TernaryConv1d is TernaryConv1d
    assert arb_ternary.TernaryConv2d is TernaryConv2d
