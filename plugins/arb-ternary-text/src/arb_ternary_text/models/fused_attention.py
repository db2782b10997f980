"""Causal attention of a block as one node of the graph, by the kernels of a backend, scores included.

For backward it keeps the rows that its linears read and write, and a number for each query and head: no scores, and
neither normed nor turned heads.

Shapes: as in :mod:`~arb_ternary_text.models.attention`; ``M`` rows ``(b, s)`` of ``D`` features.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from arb_ternary.ternary.module import TernaryModule
from arb_ternary_text.models.fused import Kernels, eps_of
from arb_ternary_text.models.fused_linear import FusedLinear, join, weights_of

__all__ = ["Modules", "attention", "serves"]

#: Longest sequence over which the kernels were measured to be faster than torch's: docs/explanation/cpu-kernels.md.
_LONGEST: Final = 2048


class Modules(NamedTuple):
    """Linears of queries, keys, values and the output; norms in front, of queries, of keys, and behind the heads."""

    linears: tuple[nn.Module, nn.Module, nn.Module, nn.Module]
    norms: tuple[nn.Module, nn.Module, nn.Module, nn.Module]


class _Plan(NamedTuple):
    """What forward and backward share beside tensors; ``heads`` are those of queries and of keys."""

    kernels: Kernels
    linears: tuple[FusedLinear, ...]
    eps: tuple[float | None, ...]
    heads: tuple[int, int]
    length: int


class _Attention(torch.autograd.Function):
    """Norm, quantisation, queries, keys and values; attention; norm, quantisation, output."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, _anchor: Tensor | None, plan: _Plan, cos: Tensor, sin: Tensor) -> Tensor:
        kernels, (*inner, output) = plan.kernels, plan.linears
        eps, query_eps, key_eps, seen_eps = plan.eps
        q_MD, scale_M, r_M = kernels["normalise_quantize"](x_MD, eps)
        heads = [linear.multiply(q_MD, scale_M, x_MD.dtype) for linear in inner]
        seen_ME, logs = kernels["attend"](*heads, (cos, sin), *plan.heads, plan.length, query_eps, key_eps)
        q_ME, seen_scale_M, seen_r_M = kernels["normalise_quantize"](seen_ME, seen_eps)
        rows = (None if r_M is None else x_MD, q_MD, scale_M, r_M)
        of_seen = (seen_ME, logs, q_ME, seen_scale_M, seen_r_M)
        ctx.save_for_backward(*rows, *heads, *of_seen, cos, sin, *weights_of(plan.linears))
        ctx.plan = plan
        return output.multiply(q_ME, seen_scale_M, x_MD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, ...]:
        x_MD, q_MD, scale_M, r_M, *rest = ctx.saved_tensors
        query, key, value, seen_ME, logs, q_ME, seen_scale_M, seen_r_M, cos, sin, *_ = rest
        plan: _Plan = ctx.plan
        kernels, (*inner, output) = plan.kernels, plan.linears
        needs_input = ctx.needs_input_grad[0]
        reached = needs_input or any(linear.anchor is not None for linear in inner)
        grad_ME = output.backward(grad_MD, q_ME, seen_scale_M, needs_input=reached)
        grad_x = None
        if grad_ME is not None:
            if seen_r_M is not None:
                grad_ME = kernels["normalise_quantize_backward"]([grad_ME], seen_ME, seen_r_M, seen_ME.shape)
            operands = (grad_ME, query, key, value, seen_ME, logs, (cos, sin), *plan.heads, plan.length, *plan.eps[1:3])
            found = [
                linear.backward(grad, q_MD, scale_M, needs_input=needs_input)
                for linear, grad in zip(inner, kernels["attend_backward"](*operands), strict=True)
            ]
            if needs_input:
                grad_x = kernels["normalise_quantize_backward"](found, x_MD, r_M, q_MD.shape)
        return grad_x, None, None, None, None


def serves(x_BSD: Tensor) -> bool:
    """Whether sequences are short enough."""
    return x_BSD.shape[1] <= _LONGEST


def attention(
    kernels: Kernels, x_BSD: Tensor, modules: Modules, heads: tuple[int, int], angles: tuple[Tensor, Tensor]
) -> Tensor:
    """What attention, in which each position sees itself and those before it, adds to the residual stream ``x_BSD``.

    Args:
        kernels: from ``kernels_for`` of all the modules.
        x_BSD: the residual stream.
        modules: linears and norms.
        heads: of queries, and of keys and values.
        angles: cosines and sines, float32 ``[S, C / 2]``.
    """
    batch, length, width = x_BSD.shape
    linears, anchor = join(modules.linears, kernels)
    plan = _Plan(kernels, tuple(linears), tuple(eps_of(norm) for norm in modules.norms), heads, length)
    y_MD: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        TernaryModule.in_autocast(x_BSD).reshape(batch * length, width), anchor, plan, *angles
    )
    for linear in linears:
        linear.expect_votes(y_MD)
    return y_MD.view(batch, length, -1)
