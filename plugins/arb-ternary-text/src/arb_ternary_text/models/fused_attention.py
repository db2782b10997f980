"""Causal attention of a block as one node of the graph, by the kernels of a backend, scores
included.

For backward it keeps the rows that its linears read and write, and a number for each query and
head: no scores, and neither normed nor turned heads.

Shapes: as in :mod:`~arb_ternary_text.models.attention`; ``M`` rows ``(b, s)`` of ``D`` features.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from arb_ternary.ternary.module import TernaryModule
from arb_ternary_text.models.fused import Kernels, eps_of, factor_of, gain_of
from arb_ternary_text.models.fused_linear import (
    FusedLinear,
    factor_grad,
    grad_buffer_like,
    join,
    scaled,
    weights_of,
)

# : Longest sequence over which the kernels were measured to be faster than torch's:
# plugins/arb-ternary-bench/reports/cpu-kernels.md.
_LONGEST: Final = 2048


class Modules(NamedTuple):
    """Linears of queries, keys, values and the output; norms in front, of queries, of keys, and
    behind the heads.
    """

    linears: tuple[nn.Module, nn.Module, nn.Module, nn.Module]
    norms: tuple[nn.Module, nn.Module, nn.Module, nn.Module]


class _Plan(NamedTuple):
    """What forward and backward share beside tensors; ``heads`` are those of queries and of
    keys.
    """

    kernels: Kernels
    linears: tuple[FusedLinear, ...]
    eps: tuple[float | None, ...]
    heads: tuple[int, int]
    length: int


class _Attention(torch.autograd.Function):
    """Norm, quantisation, queries, keys and values; attention; norm, quantisation, output.

    Vectors: gains in front, of queries, of keys and behind the heads, then the factors of each
    linear.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_MD: Tensor,
        _anchor: Tensor | None,
        plan: _Plan,
        cos: Tensor,
        sin: Tensor,
        *vectors: Tensor | None,
    ) -> Tensor:
        kernels = plan.kernels
        (*inner, output) = plan.linears
        eps, query_eps, key_eps, seen_eps = plan.eps
        gain, query_gain, key_gain, seen_gain, *factors = vectors
        q_MD, scale_M, r_M = kernels["normalise_quantize"](x_MD, eps, gain)
        products = [linear.multiply(q_MD, scale_M, x_MD.dtype) for linear in inner]
        of_heads = ((cos, sin), *plan.heads, plan.length, query_eps, key_eps, query_gain, key_gain)
        seen_ME, logs = kernels["attend"](*map(scaled, products, factors), *of_heads)
        q_ME, seen_scale_M, seen_r_M = kernels["normalise_quantize"](seen_ME, seen_eps, seen_gain)
        product_MD = output.multiply(q_ME, seen_scale_M, x_MD.dtype)
        rows = (None if r_M is None else x_MD, q_MD, scale_M, r_M)
        of_seen = (
            seen_ME,
            logs,
            q_ME,
            seen_scale_M,
            seen_r_M,
            None if factors[-1] is None else product_MD,
        )
        ctx.save_for_backward(
            *rows, *products, *of_seen, cos, sin, *vectors, *weights_of(plan.linears)
        )
        ctx.plan = plan
        return scaled(product_MD, factors[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, ...]:
        x_MD, q_MD, scale_M, r_M, *rest = ctx.saved_tensors
        products = rest[:3]
        (seen_ME, logs, q_ME, seen_scale_M, seen_r_M, product_MD, cos, sin, *rest) = rest[3:]
        (gain, query_gain, key_gain, seen_gain, *factors) = rest[:8]
        plan = ctx.plan
        kernels = plan.kernels
        (*inner, output) = plan.linears
        of_gains = [grad_buffer_like(each) for each in (gain, query_gain, key_gain, seen_gain)]
        needs_x = ctx.needs_input_grad[0]
        needs = ctx.needs_input_grad[5:]
        needs_rows = needs_x or needs[0]
        reached = (
            needs_rows or any(needs[1:-1]) or any(linear.anchor is not None for linear in inner)
        )
        grad_MD, of_output = factor_grad(kernels, grad_MD, product_MD, factors[-1])
        grad_ME = output.backward(grad_MD, q_ME, seen_scale_M, needs_input=reached)
        grad_x = None
        of_inner = (None,) * len(inner)
        if grad_ME is not None:
            if seen_r_M is not None:
                back = kernels["normalise_quantize_backward"]
                gains = (seen_gain, of_gains[3])
                grad_ME = back([grad_ME], seen_ME, seen_r_M, seen_ME.shape, *gains)
            heads = map(scaled, products, factors)
            of_heads = ((cos, sin), *plan.heads, plan.length, *plan.eps[1:3])
            gains = (query_gain, key_gain, *of_gains[1:3])
            given = kernels["attend_backward"](grad_ME, *heads, seen_ME, logs, *of_heads, *gains)
            grads, of_inner = zip(
                *map(partial(factor_grad, kernels), given, products, factors), strict=True
            )
            found = [
                linear.backward(grad, q_MD, scale_M, needs_input=needs_rows)
                for linear, grad in zip(inner, grads, strict=True)
            ]
            if needs_rows:
                grad_x = kernels["normalise_quantize_backward"](
                    found, x_MD, r_M, q_MD.shape, gain, of_gains[0]
                )
        return grad_x, None, None, None, None, *of_gains, *of_inner, of_output


def serves(x_BSD: Tensor) -> bool:
    """Whether sequences are short enough."""
    return x_BSD.shape[1] <= _LONGEST


def attention(
    kernels: Kernels,
    x_BSD: Tensor,
    modules: Modules,
    heads: tuple[int, int],
    angles: tuple[Tensor, Tensor],
) -> Tensor:
    """What attention, in which each position sees itself and those before it, adds to the residual
    stream ``x_BSD``.

    Args:
        kernels: from ``kernels_for`` of all the modules.
        x_BSD: the residual stream.
        modules: linears and norms.
        heads: of queries, and of keys and values.
        angles: cosines and sines, float32 ``[S, C / 2]``.
    """
    batch, length, width = x_BSD.shape
    linears, anchor = join(modules.linears, kernels)
    plan = _Plan(
        kernels, tuple(linears), tuple(eps_of(norm) for norm in modules.norms), heads, length
    )
    vectors = (*map(gain_of, modules.norms), *map(factor_of, modules.linears))
    y_MD: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        TernaryModule.in_autocast(x_BSD).reshape(batch * length, width),
        anchor,
        plan,
        *angles,
        *vectors,
    )
    for linear in linears:
        linear.expect_votes(y_MD)
    return y_MD.view(batch, length, -1)
