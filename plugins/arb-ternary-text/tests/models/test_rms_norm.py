"""RMSNorm equals its formula and torch's implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from arb_ternary.ternary.embedding import TernaryRMSNorm
from arb_ternary_text.models.rms_norm import RMSNorm, rms_norm


def test_it_is_the_formula() -> None:
    x = torch.randn(3, 5, 8, dtype=torch.float64) * 7
    expected = x.numpy() / np.sqrt((x.numpy() ** 2).mean(-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(rms_norm(x, 1e-3).numpy(), expected, rtol=1e-14)


def test_its_gradient_is_the_numerical_one() -> None:
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, 1e-2), (x,))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-9)]
)
def test_it_agrees_with_torch_in_every_precision(dtype: torch.dtype, tolerance: float) -> None:
    values = torch.randn(9, 33)
    grad = torch.randn(9, 33).to(dtype)
    mine, theirs = (values.to(dtype).requires_grad_() for _ in range(2))
    y = rms_norm(mine, 1e-6)
    expected = F.rms_norm(theirs, (33,), eps=1e-6)
    y.backward(grad)
    expected.backward(grad)
    assert mine.grad is not None
    assert y.dtype == mine.grad.dtype == dtype
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=2 * tolerance, atol=2 * tolerance)


def test_a_row_of_zeros_stays_zero_with_a_finite_gradient() -> None:
    x = torch.zeros(2, 4, requires_grad=True)
    y = rms_norm(x, 1e-6)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 4))
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full((2, 4), 1e3))


def test_a_gain_multiplies_and_learns() -> None:
    norm = RMSNorm(4, eps=1e-6, gain=True)
    x = torch.randn(3, 4)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 0.0, -1.0]))
    y = norm(x)
    torch.testing.assert_close(y, rms_norm(x, 1e-6) * norm.weight)
    y.sum().backward()
    torch.testing.assert_close(norm.weight.grad, rms_norm(x, 1e-6).sum(0))
    assert not list(RMSNorm(4, eps=1e-6, gain=False).state_dict())


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(rms_norm(x, 1e-6).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("ternary", [False, True])
def test_a_stored_eps_is_used_and_saved_unrounded(ternary: bool) -> None:
    def make(eps: float) -> RMSNorm | TernaryRMSNorm:
        if ternary:
            return TernaryRMSNorm(8, eps=eps, stored_eps=True)
        return RMSNorm(8, eps=eps, gain=True, stored_eps=True)

    norm = make(1e-6)
    other = make(1e-6)
    norm.eps = 0.1234567890123
    x = torch.randn(3, 8)
    torch.testing.assert_close(norm(x), x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt())
    other.to(torch.bfloat16).load_state_dict(norm.to(torch.bfloat16).state_dict())
    assert other.eps == 0.1234567890123
    assert norm.state_dict()["_extra_state"].dtype == torch.float64
