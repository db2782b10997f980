"""Products of the same rows in one node of the graph: the bits of separate calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arb_ternary import TernaryLinear
from arb_ternary.backends.select import get_backend
from arb_ternary.ternary.models import seed_votes
from arb_ternary_text.models import shared_rows
from arb_ternary_text.models.scaled_linear import ScaledTernaryLinear

pytestmark = pytest.mark.interpreted


def _linears(gradients: str, **options: Any) -> nn.ModuleList:
    torch.manual_seed(3)
    settings: dict[str, Any] = {"gradients": gradients, "backend": "triton", **options}
    scaled = ScaledTernaryLinear(40, 24, factors="rows", **settings)
    linears = nn.ModuleList(
        [TernaryLinear(40, 56, **settings), TernaryLinear(40, 8, **settings), scaled]
    )
    seed_votes(linears, 11)
    return linears


def _results(linears: nn.ModuleList, x: Tensor, *, together: bool) -> list[Tensor]:
    """Return products, the gradient of the rows, votes and statistics."""
    rows = x.clone().requires_grad_()
    modules: Sequence[nn.Module] = list(linears)
    if together:
        products = shared_rows.multiply_all(rows, modules)
    else:
        products = [linear(rows) for linear in modules]
    turned = [product.float().sin().sum() * (index + 1) for index, product in enumerate(products)]
    torch.stack(turned).sum().backward()
    assert rows.grad is not None
    votes = [tensor for linear in linears for tensor in (linear.votes, linear.stats)]
    return [*products, rows.grad, *votes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradients", ["int8", "float"])
@pytest.mark.parametrize("frozen", [False, True])
def test_products_of_the_same_rows_have_the_bits_of_separate_ones(
    frozen: bool, gradients: str, dtype: torch.dtype
) -> None:
    x = torch.randn(2, 7, 40).to(dtype)
    found = []
    for together in (False, True):
        linears = _linears(gradients)
        linears[1].frozen = frozen
        found.append(_results(linears, x, together=together))
    for separate, shared in zip(*found, strict=True):
        assert torch.equal(separate, shared)
    votes = found[1][4::2]
    assert [bool(each.any()) for each in votes] == [True, not frozen, True]


def test_rows_are_quantised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: Any = get_backend("triton").kernels
    calls: list[str] = []

    def counted(op: str) -> Any:
        def run(*arguments: Any) -> Any:
            calls.append(op)
            return kernels[op](*arguments)

        return run

    ops = ("quantize_rows", "quantize_several", "quantize_gradients", "quantize_gradient")
    replaced = {**kernels, **{op: counted(op) for op in ops}}
    monkeypatch.setattr(
        shared_rows, "get_backend", lambda _name: type("Counted", (), {"kernels": replaced})
    )
    monkeypatch.setattr("arb_ternary.backends.ops.get_backend", shared_rows.get_backend)
    _results(_linears("int8"), torch.randn(5, 40), together=True)
    assert calls == ["quantize_rows", "quantize_several"]


def test_a_linear_that_somebody_watches_is_called() -> None:
    linears = _linears("int8")
    seen = []
    linears[0].register_forward_hook(lambda *_: seen.append(True))
    shared_rows.multiply_all(torch.randn(5, 40), list(linears))
    assert seen == [True]
