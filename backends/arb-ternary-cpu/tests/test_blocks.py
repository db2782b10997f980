"""What lies between the products of a block, against float64 arithmetic and against the torch
backend's integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from arb_ternary.backends import reference
from arb_ternary_cpu.backend import build
from arb_ternary_cpu.isa import usable_isas

# For each instruction set.
pytestmark = pytest.mark.sampled("call")

Call = Callable[..., Any]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("swiglu", "relu2", "reglu2")
#: Unit roundoff of float32.
UNIT = 2.0**-24


def calls(isa: str | None) -> Call:
    """Call a kernel for blocks by its name without the namespace."""
    kernels = build(isa).kernels

    def run(name: str, *arguments: Any) -> Any:
        return kernels[name if name in kernels else f"text.{name}"](*arguments)

    return run


@pytest.fixture(params=usable_isas())
def call(request: pytest.FixtureRequest) -> Call:
    return calls(request.param)


def unit_of(dtype: torch.dtype) -> float:
    """Half the distance of 1 to the next number of the dtype."""
    return torch.finfo(dtype).eps / 2


def assert_near(found: Tensor, wanted: Tensor, roundings: float) -> None:
    """Up to ``roundings`` of float32, relative to the largest number of a row, and one of the
    result's dtype.
    """
    wanted = wanted.double()
    largest = wanted.abs().amax(dim=-1, keepdim=True)
    bound = roundings * UNIT * largest + unit_of(found.dtype) * wanted.abs() * (1 + 1e-6)
    smallest = torch.finfo(found.dtype).smallest_normal * torch.finfo(found.dtype).eps
    assert ((found.double() - wanted).abs() <= bound + smallest).all()


def roundings(columns: int) -> float:
    """Of a row whose mean is a sum of so many terms: those of a sum of 16 partial ones, and a dozen
    beside it.
    """
    return columns / 16 + 4 + 16


def assert_quantised(q: Tensor, scale: Tensor, y: Tensor) -> None:
    """Integers next to ``y / scale``: nothing is further from it than half a step and the rounding
    of ``y``.
    """
    largest = y.abs().amax(dim=1)
    columns = y.shape[1]
    torch.testing.assert_close(
        scale.double(), largest / 127, rtol=roundings(columns) * UNIT, atol=0
    )
    step = scale.double()[:, None]
    assert (
        (q.double() * step - y).abs() <= step * (0.5 + 127 * 2 * roundings(columns) * UNIT)
    ).all()


def normed(x: Tensor, eps: float | None) -> Tensor:
    return x if eps is None else x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def activated(gate: Tensor | None, up: Tensor, kind: str) -> Tensor:
    if kind == "swiglu":
        assert gate is not None
        return F.silu(gate) * up
    return F.relu(up).square() if gate is None else F.relu(gate).square() * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "eps"), [(3, 15, None), (1, 1, 0.1), (5, 16, 1e-6), (7, 161, 1e-6)]
)
def test_rows_are_normalised_and_quantised(
    call: Call, dtype: torch.dtype, rows: int, columns: int, eps: float | None
) -> None:
    x = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)) * 3).to(dtype)
    q, scale, r = call("normalise_quantize", x, eps)
    assert_quantised(q, scale, normed(x.double(), eps))
    if eps is None:
        assert r is None
        wanted_q, wanted_scale = reference.quantize_rows(x)
        assert torch.equal(q, wanted_q)
        assert torch.equal(scale, wanted_scale)
    else:
        wanted = (x.double().square().mean(-1) + eps).rsqrt()
        torch.testing.assert_close(r.double(), wanted, rtol=roundings(columns) * UNIT, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "rows", "columns", "eps"),
    [(1, 3, 15, None), (3, 2, 16, None), (2, 1, 1, 0.1), (3, 5, 16, 0.1), (1, 2, 161, 0.1)],
)
def test_the_gradient_of_a_norm_is_that_of_float64(
    call: Call, dtype: torch.dtype, count: int, rows: int, columns: int, eps: float | None
) -> None:
    made = torch.Generator().manual_seed(count * columns)
    x = torch.randn(rows, columns, generator=made).to(dtype)
    grads = [torch.randn(rows, columns, generator=made).to(dtype) for _ in range(count)]
    _, _, r = call("normalise_quantize", x, eps)
    found = call("normalise_quantize_backward", grads, None if r is None else x, r, x.shape)
    leaf = x.double().requires_grad_()
    normed(leaf, eps).backward(sum(grad.double() for grad in grads))  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert found.dtype == dtype
    # Terms of both signs cancel; they are as large as the gradient of the normalised row times r.
    scale = 1.0 if eps is None else (leaf.detach().square().mean(-1, keepdim=True) + eps).rsqrt()
    size = (torch.stack([grad.double().abs() for grad in grads]).sum(0) * scale).amax(
        -1, keepdim=True
    ) * (1 + columns)
    bound = roundings(columns) * UNIT * size + unit_of(dtype) * leaf.grad.abs() * (1 + 1e-6) + 1e-7
    assert ((found.double() - leaf.grad).abs() <= bound).all()


def gain_of(columns: int) -> Tensor:
    """Gains around 1."""
    return torch.rand(columns, generator=torch.Generator().manual_seed(columns)) + 0.5


def assert_sums(found: Tensor, wanted: Tensor | None, terms: int, size: float) -> None:
    """Sums of so many terms of this size, in float32."""
    assert wanted is not None
    assert (
        float((found.double() - wanted).abs().max())
        <= (terms + 16) * UNIT * size * terms**0.5 + 1e-7
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(3, 15), (1, 1), (300, 161)])
def test_a_gain_follows_the_norm_and_learns(
    call: Call, dtype: torch.dtype, rows: int, columns: int
) -> None:
    made = torch.Generator().manual_seed(columns)
    x, grad, other = (torch.randn(rows, columns, generator=made).to(dtype) for _ in range(3))
    gain = gain_of(columns)
    q, scale, r = call("normalise_quantize", x, 1e-6, gain)
    leaf = x.double().requires_grad_()
    factors = gain.double().requires_grad_()
    y = normed(leaf, 1e-6) * factors
    assert_quantised(q, scale, y.detach())
    y.backward(grad.double() + other.double())  # type: ignore[no-untyped-call]
    grad_gain = torch.full_like(gain, 2.0)
    found = call("normalise_quantize_backward", [grad, other], x, r, x.shape, gain, grad_gain)
    assert leaf.grad is not None
    size = (
        float((grad.double().abs() + other.double().abs()).max())
        * float(r.max())
        * 1.5
        * (1 + columns)
    )
    bound = roundings(columns) * UNIT * size + unit_of(dtype) * leaf.grad.abs() * (1 + 1e-6) + 1e-7
    assert ((found.double() - leaf.grad).abs() <= bound).all()
    # What was there stays.
    assert_sums(grad_gain - 2, factors.grad, rows, 2 + 8 * float(r.max()) * float(x.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(3, 15), (70, 161)])
def test_a_gain_follows_the_norm_of_an_activation(
    call: Call, kind: str, rows: int, columns: int
) -> None:
    made = torch.Generator().manual_seed(columns)
    gate, up, grad = (torch.randn(rows, columns, generator=made) for _ in range(3))
    gain = gain_of(columns)
    grad_gain = torch.zeros(columns)
    given_gate = None if kind == "relu2" else gate
    q, scale, r = call("activate_quantize", given_gate, up, kind, 1e-6, gain)
    leaves = [each.double().requires_grad_() for each in (gate, up)]
    factors = gain.double().requires_grad_()
    y = normed(activated(None if kind == "relu2" else leaves[0], leaves[1], kind), 1e-6) * factors
    assert_quantised(q, scale, y.detach())
    y.backward(grad.double())  # type: ignore[no-untyped-call]
    found = call("activate_quantize_backward", grad, given_gate, up, kind, r, gain, grad_gain)
    for one, leaf in zip(found, leaves, strict=True):
        if one is not None:
            assert leaf.grad is not None
            # Rows of one or two positive numbers are divided by little.
            size = float(r.max()) * 64 * (1 + columns)
            assert float((one.double() - leaf.grad).abs().max()) <= roundings(columns) * UNIT * size
    assert_sums(grad_gain, factors.grad, rows, 4 * 20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(3, 15), (1, 1), (300, 161)])
def test_factors_of_columns_learn(call: Call, dtype: torch.dtype, rows: int, columns: int) -> None:
    made = torch.Generator().manual_seed(columns)
    x, grad = (torch.randn(rows, columns, generator=made).to(dtype) for _ in range(2))
    factor = gain_of(columns)
    grad_factor = torch.full_like(factor, 2.0)
    found = call("scale_columns_backward", grad, x, factor, grad_factor)
    wanted = grad.double() * factor.double()
    assert found.dtype == dtype
    assert_near(found, wanted, 2)
    assert_sums(grad_factor - 2, (grad.double() * x.double()).sum(0), rows, 20)


@pytest.mark.parametrize("strides", ["heads first", "positions first", "turned around"])
@pytest.mark.parametrize("features", [2, 40])
def test_heads_in_pieces_are_one_row(call: Call, strides: str, features: int) -> None:
    batch = 2
    heads = 3
    length = 5
    x = torch.randn(batch, heads, length, features)
    if strides == "positions first":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif strides == "turned around":
        x = x.transpose(1, 3).contiguous().transpose(1, 3)
    rows = x.transpose(1, 2).reshape(batch * length, heads * features)
    found = call("normalise_quantize", x, 1e-6)
    wanted = call("normalise_quantize", rows, 1e-6)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    grad = torch.randn_like(rows)
    back = call("normalise_quantize_backward", [grad], x, found[2], x.shape)
    of_rows = call("normalise_quantize_backward", [grad], rows, wanted[2], rows.shape)
    assert torch.equal(back.transpose(1, 2).reshape(rows.shape), of_rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns", "eps"), [(3, 15, None), (1, 1, 1e-6), (2, 161, 1e-6)])
def test_activations_and_their_gradients_are_those_of_float64(
    call: Call, dtype: torch.dtype, kind: str, rows: int, columns: int, eps: float | None
) -> None:
    made = torch.Generator().manual_seed(columns)
    gate, up, grad = (torch.randn(rows, columns, generator=made).to(dtype) for _ in range(3))
    has_gate = kind != "relu2"
    q, scale, r = call("activate_quantize", gate if has_gate else None, up, kind, eps)
    leaves = [each.double().requires_grad_() for each in (gate, up)]
    y = normed(activated(leaves[0] if has_gate else None, leaves[1], kind), eps)
    assert_quantised(q, scale, y.detach())
    y.backward(grad.double())  # type: ignore[no-untyped-call]
    found = call("activate_quantize_backward", grad, gate if has_gate else None, up, kind, r)
    assert (found[0] is None) != has_gate
    for one, leaf in zip(found, leaves, strict=True):
        if one is not None:
            assert leaf.grad is not None
            factor = 1.0 if r is None else float(r.max())
            size = (
                factor
                * grad.double().abs().amax()
                * (1 + columns)
                * max(1.0, float(gate.abs().max()), float(up.abs().max())) ** 3
            )
            bound = (
                roundings(columns) * UNIT * size
                + unit_of(dtype) * leaf.grad.abs() * (1 + 1e-6)
                + 1e-7
            )
            assert ((one.double() - leaf.grad).abs() <= bound).all()


def test_silu_has_a_relative_error_of_a_few_roundings(call: Call) -> None:
    gate = torch.linspace(-80, 80, 100_003).view(1, -1)
    ones = torch.ones_like(gate)
    _, silu = call("activate_quantize_backward", ones, gate, ones, "swiglu", None)
    wanted = F.silu(gate.double())
    # exp to 4e-7, two more roundings and that of the result; below -16 the whole value is that of
    # exp.
    error = ((silu.double() - wanted).abs() / wanted.abs().clamp_min(1e-300))[gate != 0]
    assert error.max() < 4e-7 + 3 * UNIT


def test_what_is_not_finite_reaches_the_scale(call: Call) -> None:
    for bad in (float("nan"), float("inf")):
        x = torch.ones(2, 20)
        x[1, 18] = bad
        for q, scale, _ in (
            call("normalise_quantize", x, 1e-6),
            call("activate_quantize", torch.ones_like(x), x, "swiglu", None),
            call("activate_quantize", x, torch.ones_like(x), "swiglu", 1e-6),
            call("activate_quantize", None, x, "relu2", 1e-6),
        ):
            assert scale[0].isfinite()
            assert not scale[1].isfinite()
            assert q[0].abs().max() == 127


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "features", "eps", "turns", "gains"),
    [
        (1, 2, None, True, False),
        (3, 10, 0.1, True, False),
        (2, 32, 0.1, True, True),
        (4, 72, None, True, False),
        (2, 34, None, False, False),
        (2, 6, 0.1, False, True),
    ],
)
def test_heads_are_normalised_and_turned(
    call: Call,
    dtype: torch.dtype,
    heads: int,
    features: int,
    eps: float | None,
    turns: bool,
    gains: bool,
) -> None:
    batch = 2
    length = 3
    made = torch.Generator().manual_seed(features)
    x = torch.randn(batch * length, heads * features, generator=made).to(dtype)
    angle = torch.rand(length, features // 2, generator=made) * 7
    angles = (angle.cos(), angle.sin()) if turns else None
    gain = gain_of(features) if gains else None
    y, r = call("turn_heads", x, angles, heads, length, eps, gain)
    leaf = x.double().requires_grad_()
    factors = gain_of(features).double().requires_grad_()
    split = normed(leaf.view(batch, length, heads, features), eps).transpose(1, 2)
    split = split * factors if gains else split
    if angles is not None:
        cos, sin = (each.double() for each in angles)
        first, second = split.chunk(2, dim=-1)
        split = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    assert y.is_contiguous()
    assert_near(y, split.detach(), roundings(features))
    if eps is not None:
        wanted = (leaf.detach().view(-1, heads, features).square().mean(-1) + eps).rsqrt()
        torch.testing.assert_close(r.double(), wanted, rtol=roundings(features) * UNIT, atol=0)
    grad = torch.randn(y.shape, generator=made).to(dtype)
    split.backward(grad.double())  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    for given_grad in (grad, grad.transpose(1, 2).contiguous().transpose(1, 2)):
        grad_gain = None if gain is None else torch.zeros_like(gain)
        found = call(
            "turn_heads_backward",
            given_grad,
            None if r is None else x,
            angles,
            r,
            gain,
            grad_gain,
        )
        if grad_gain is not None:
            assert_sums(grad_gain, factors.grad, batch * length * heads, 20)
        size = (
            1.5
            * grad.double().abs().amax()
            * (1 + features)
            * (1.0 if r is None else float(r.max()))
        )
        bound = (
            roundings(features) * UNIT * size + unit_of(dtype) * leaf.grad.abs() * (1 + 1e-6) + 1e-7
        )
        assert ((found.double() - leaf.grad).abs() <= bound).all()


@pytest.mark.parametrize("isa", usable_isas())
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    content=st.sampled_from(
        ("normal", "zeros", "tiny", "not finite", "infinite", "scales of zero", "scales of nan")
    ),
    words=st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**32)),
)
def test_both_integer_gradients_are_those_of_the_torch_backend(
    isa: str, rows: int, columns: int, dtype: torch.dtype, content: str, words: tuple[int, int, int]
) -> None:
    torch.manual_seed(rows * columns)
    grad = torch.randn(rows, columns)
    row_scale = torch.rand(rows) + 0.01
    if content == "zeros":
        grad.zero_()
    elif content == "tiny":
        grad *= 1e-38
    elif content == "not finite":
        grad[0, 0] = float("nan")
        row_scale[-1] = float("inf")
    elif content == "infinite":
        grad[0, 0] = float("inf")
        row_scale[0] = 0.0
    elif content == "scales of zero":
        row_scale.zero_()
    elif content == "scales of nan":
        row_scale[0] = float("nan")
    grad = grad.to(dtype)
    run: Any = build(isa).kernels["quantize_gradients"]
    q, scale, folded, folded_scale = run(grad, row_scale, *words, words[2] + 1)
    wanted = reference.KERNELS["quantize_gradient"](grad, *words)
    wanted_folded = reference.KERNELS["quantize_gradient"](
        grad * row_scale.to(dtype).unsqueeze(1), words[0], words[1], words[2] + 1
    )
    for one, other in zip((q, scale, folded, folded_scale), (*wanted, *wanted_folded), strict=True):
        assert torch.equal(one, other)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    kernels: Mapping[str, Any] = build().kernels
    x = torch.randn(700, 160)
    gate = torch.randn(700, 160)
    angles = (torch.randn(100, 20), torch.randn(100, 20))

    def results() -> list[Tensor]:
        q, scale, r = kernels["text.normalise_quantize"](x, 1e-6)
        sums = [torch.zeros(160), torch.zeros(160), torch.zeros(40)]
        hidden = kernels["text.activate_quantize"](gate, x, "swiglu", 1e-6)
        y, r_heads = kernels["text.turn_heads"](x, angles, 4, 100, 1e-6)
        return [
            q,
            scale,
            r,
            y,
            *hidden,
            kernels["text.normalise_quantize_backward"]([gate, x], x, r, x.shape),
            *kernels["text.activate_quantize_backward"](gate, gate, x, "swiglu", hidden[2]),
            kernels["text.turn_heads_backward"](y, x, angles, r_heads),
            *kernels["quantize_gradients"](x, scale, 1, 2, 3, 4),
            kernels["text.normalise_quantize_backward"](
                [gate, x], x, r, x.shape, x[0].clone(), sums[0]
            ),
            *kernels["text.activate_quantize_backward"](
                gate, gate, x, "swiglu", hidden[2], x[0].clone(), sums[1]
            ),
            kernels["text.turn_heads_backward"](y, x, angles, r_heads, x[0, :40].clone(), sums[2]),
            kernels["text.scale_columns_backward"](gate, x, x[0].clone(), sums[0]),
            *sums,
        ]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = results()
        torch.set_num_threads(3)
        for one, other in zip(alone, results(), strict=True):
            assert torch.equal(one, other)
    finally:
        torch.set_num_threads(before)


#: Rows ``x``, their factors and their size.
NORMED = (torch.ones(2, 3), torch.ones(2), (2, 3))


def test_tensors_without_elements_give_such(call: Call) -> None:
    q, scale, r = call("normalise_quantize", torch.empty(0, 8), 1e-6)
    assert (q.shape, scale.shape, r.shape) == ((0, 8), (0,), (0,))
    assert call("normalise_quantize", torch.ones(3, 0), None)[1].tolist() == [0, 0, 0]
    assert call("turn_heads", torch.empty(0, 8), None, 2, 4, None)[0].shape == (0, 2, 4, 4)
    assert call("activate_quantize", None, torch.empty(0, 8), "relu2", None)[0].shape == (0, 8)
    assert call("quantize_gradients", torch.empty(0, 4), torch.empty(0), 1, 2, 3, 4)[0].shape == (
        0,
        4,
    )


@pytest.mark.parametrize(
    ("name", "arguments", "fault"),
    [
        ("normalise_quantize", (torch.ones(3), 1e-6), "2 or 4 dimensions"),
        (
            "normalise_quantize",
            (torch.ones(2, 3, dtype=torch.float64), 1e-6),
            "float32, bfloat16 and float16",
        ),
        ("normalise_quantize_backward", ([], None, None, (2, 3)), "1 to 3 gradients"),
        (
            "normalise_quantize_backward",
            ([torch.ones(2, 3)], None, torch.ones(2), (2, 3)),
            "x must be",
        ),
        (
            "normalise_quantize_backward",
            ([torch.ones(2, 4)], None, None, (2, 3)),
            "grad must be",
        ),
        ("normalise_quantize", (torch.ones(2, 3), 1e-6, torch.ones(4)), "gain must be"),
        (
            "normalise_quantize",
            (torch.ones(2, 3), None, torch.ones(3)),
            "gain needs rows that are normalised",
        ),
        (
            "normalise_quantize_backward",
            ([torch.ones(2, 3)], *NORMED, torch.ones(3)),
            "given together",
        ),
        (
            "normalise_quantize_backward",
            ([torch.ones(2, 3)], *NORMED, None, torch.ones(3)),
            "given together",
        ),
        (
            "normalise_quantize_backward",
            ([torch.ones(2, 3)], *NORMED, *(torch.ones(3), torch.ones(2))),
            "grad_gain must",
        ),
        (
            "activate_quantize",
            (None, torch.ones(2, 4), "relu2", 0.1, torch.ones(3)),
            "gain must be",
        ),
        (
            "scale_columns_backward",
            (torch.ones(2, 3), torch.ones(2, 4), *[torch.ones(3)] * 2),
            "x must be",
        ),
        (
            "scale_columns_backward",
            (torch.ones(2, 3), torch.ones(2, 3), *[torch.ones(4)] * 2),
            "factor must be",
        ),
        (
            "scale_columns_backward",
            (torch.ones(3), torch.ones(3), *[torch.ones(3)] * 2),
            "2 dimensions",
        ),
        ("turn_heads", (torch.ones(4, 8), None, 2, 2, 0.1, torch.ones(8)), "gain must be"),
        ("activate_quantize", (None, torch.ones(2, 4), "swiglu", None), "needs a gate"),
        (
            "activate_quantize",
            (torch.ones(2, 4), torch.ones(2, 4), "relu2", None),
            "has no gate",
        ),
        (
            "activate_quantize",
            (torch.ones(2, 4), torch.ones(2, 4), "gelu", None),
            "must be one of",
        ),
        (
            "activate_quantize",
            (torch.ones(2, 5), torch.ones(2, 4), "swiglu", None),
            "gate must be",
        ),
        ("turn_heads", (torch.ones(4, 6), None, 2, 2, None), "even number"),
        ("turn_heads", (torch.ones(4, 8), None, 2, 3, None), r"B \* 3"),
        (
            "turn_heads",
            (torch.ones(4, 8), (torch.ones(2, 3), torch.ones(2, 3)), 2, 2, None),
            "cos must be",
        ),
        ("turn_heads_backward", (torch.ones(2, 2, 2, 3), None, None, None), "even C"),
        (
            "turn_heads_backward",
            (torch.ones(2, 2, 2, 4), None, None, torch.ones(4, 2)),
            "x is needed",
        ),
        ("quantize_gradients", (torch.ones(2, 4), torch.ones(3), 1, 2, 3, 4), "row_scale must be"),
        ("quantize_gradients", (torch.ones(4), torch.ones(1), 1, 2, 3, 4), "2 dimensions"),
    ],
)
def test_wrong_arguments_are_named(name: str, arguments: tuple[Any, ...], fault: str) -> None:
    with pytest.raises((ValueError, TypeError), match=fault):
        calls(None)(name, *arguments)
