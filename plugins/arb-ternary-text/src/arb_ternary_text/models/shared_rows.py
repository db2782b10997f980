"""Products of the same rows with several linears, with fewer launches on a GPU.

The rows are quantised once, and backward rounds the gradients of all products in one call. Results
have the bits of separate calls of the linears: integers are equal, and gradients of the rows are
added in the order in which autograd adds them, last linear first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from arb_ternary.backends.ops import quantize_related
from arb_ternary.backends.select import get_backend
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_text.models.block_kernels import Kernels, is_plain_linear
from arb_ternary_text.models.linear_use import LinearUse, first_anchor, weights_of
from arb_ternary_text.models.scaled_linear import ScaledTernaryLinear

#: Linears that ``quantize_several`` takes at most.
_MOST = 3


class _Products(torch.autograd.Function):
    """One quantisation, one product per linear."""

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, _anchor: Tensor | None, uses: Sequence[LinearUse]
    ) -> tuple[Tensor, ...]:
        kernels: Kernels = get_backend(uses[0].state.backend).kernels
        q_MK, scale_M = kernels["quantize_rows"](x_MK)
        ctx.save_for_backward(q_MK, scale_M, *weights_of(uses))
        ctx.uses = uses
        return tuple(use.multiply(kernels, q_MK, scale_M, x_MK.dtype) for use in uses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_MK, scale_M, *_ = ctx.saved_tensors
        uses: Sequence[LinearUse] = ctx.uses
        needs_rows = ctx.needs_input_grad[0]
        whole = [grad.contiguous() for grad in grads]
        pairs: list[Any] = [None] * len(uses)
        casts_all = all(use.anchor is not None for use in uses)
        if needs_rows and casts_all and uses[0].module.gradients == "int8":
            pairs = list(quantize_related(whole, scale_M, [use.state for use in uses]))
        total: Tensor | None = None
        for use, grad, pair in reversed(list(zip(uses, whole, pairs, strict=True))):
            found = use.backward(grad, q_MK, scale_M, needs_input=needs_rows, both=pair)
            total = found if total is None or found is None else total + found
        return total, None, None


def _sharing(x: Tensor, modules: Sequence[nn.Module]) -> list[TernaryLinear] | None:
    """Return the linears if they can be one node of the graph, and their backend gains by it."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or not x.numel():
        return None
    linears = [module for module in modules if is_plain_linear(module)]
    if len(linears) < len(modules) or not 1 < len(linears) <= _MOST:
        return None
    alike = {(each.backend, each.gradients) for each in linears}
    if len(alike) != 1 or "quantize_several" not in get_backend(linears[0].backend).kernels:
        return None
    # The kernels index the elements of a gradient in 32 bits.
    rows = x.numel() // x.shape[-1]
    widest = max(each.out_features for each in linears)
    return linears if rows * widest < 1 << 32 else None


def multiply_all(x: Tensor, modules: Sequence[nn.Module]) -> list[Tensor]:
    """Return ``linear(x)`` of each of some linears, for ``x [..., K]``."""
    linears = _sharing(x, modules)
    if linears is None:
        return [module(x) for module in modules]
    x = TernaryLinear.in_autocast(x)
    uses = [LinearUse.of(each) for each in linears]
    rows_MK = x.reshape(-1, x.shape[-1])
    products = _Products.apply(rows_MK, first_anchor(uses), uses)  # type: ignore[no-untyped-call]
    found = []
    for use, product in zip(uses, products, strict=True):
        use.expect_votes(product)
        y = product.view(*x.shape[:-1], -1)
        if isinstance(use.module, ScaledTernaryLinear):
            y = y * use.module.learning_factors().to(y.dtype)
        found.append(y)
    return found
