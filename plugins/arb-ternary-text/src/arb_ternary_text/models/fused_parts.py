"""The parts of a block as one node of the graph each, by the kernels of a backend.

For backward they keep what torch's operations would keep, or less: the rows before a norm instead of those after it,
int8 rows once, and none of the activation's intermediate results.

Shapes: as in :mod:`~arb_ternary_text.models.attention`; ``M`` rows ``(b, s)`` of ``D`` features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from arb_ternary.ternary.module import TernaryModule
from arb_ternary_text.models.fused import Kernels, eps_of
from arb_ternary_text.models.fused_linear import FusedLinear, join, weights_of

__all__ = ["feed_forward", "output", "project_heads"]

_Angles = tuple[Tensor, Tensor]


class _Heads(NamedTuple):
    """One of queries, keys and values: its linear, how many heads it has, its norm's eps, and what turns it."""

    linear: FusedLinear
    heads: int
    eps: float | None
    angles: _Angles | None


class _Projected(torch.autograd.Function):
    """Norm, one quantisation, queries, keys and values; heads normed and turned."""

    @staticmethod
    def forward(
        ctx: Any, x_MD: Tensor, _anchor: Tensor | None, parts: tuple[_Heads, ...], eps: float | None, length: int
    ) -> tuple[Tensor, ...]:
        kernels = parts[0].linear.kernels
        q_MD, scale_M, r_M = kernels["normalise_quantize"](x_MD, eps)
        found, kept = [], []
        for part in parts:
            y_ME = part.linear.multiply(q_MD, scale_M, x_MD.dtype)
            y_BHSC, r_MH = kernels["turn_heads"](y_ME, part.angles, part.heads, length, part.eps)
            found.append(y_BHSC)
            kept += [None if r_MH is None else y_ME, r_MH]
        x_kept = None if r_M is None else x_MD
        angles = parts[0].angles or (None, None)
        ctx.save_for_backward(x_kept, q_MD, scale_M, r_M, *angles, *kept, *weights_of([part.linear for part in parts]))
        ctx.parts = parts
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_MD, q_MD, scale_M, r_M, cos, sin, *kept = ctx.saved_tensors
        needs_input, found, kernels = ctx.needs_input_grad[0], [], ctx.parts[0].linear.kernels
        for i, (part, grad) in enumerate(zip(ctx.parts, grads, strict=True)):
            angles = None if part.angles is None else (cos, sin)
            grad_ME = kernels["turn_heads_backward"](grad, kept[2 * i], angles, kept[2 * i + 1])
            found.append(part.linear.backward(grad_ME, q_MD, scale_M, needs_input=needs_input))
        grad_x = None
        if needs_input:
            grad_x = kernels["normalise_quantize_backward"](found, x_MD, r_M, q_MD.shape)
        return grad_x, None, None, None, None


class _Output(torch.autograd.Function):
    """Heads side by side, norm, quantisation, product."""

    @staticmethod
    def forward(ctx: Any, seen_BHSC: Tensor, _anchor: Tensor | None, linear: FusedLinear, eps: float | None) -> Tensor:
        q_ME, scale_M, r_M = linear.kernels["normalise_quantize"](seen_BHSC, eps)
        ctx.save_for_backward(None if r_M is None else seen_BHSC, q_ME, scale_M, r_M, *linear.saved)
        ctx.linear, ctx.size = linear, seen_BHSC.shape
        return linear.multiply(q_ME, scale_M, seen_BHSC.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, ...]:
        seen, q_ME, scale_M, r_M, *_ = ctx.saved_tensors
        linear: FusedLinear = ctx.linear
        grad_ME = linear.backward(grad_MD, q_ME, scale_M, needs_input=ctx.needs_input_grad[0])
        grad_seen = None
        if grad_ME is not None:
            grad_seen = linear.kernels["normalise_quantize_backward"]([grad_ME], seen, r_M, ctx.size)
        return grad_seen, None, None, None


class _FeedForward(torch.autograd.Function):
    """Norm, one quantisation, gate and up, activation, norm, quantisation, down."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MD: Tensor,
        _anchor: Tensor | None,
        linears: Sequence[FusedLinear],
        kind: str,
        eps: float | None,
        hidden_eps: float | None,
    ) -> Tensor:
        *inner, down = linears
        kernels = down.kernels
        q_MD, scale_M, r_M = kernels["normalise_quantize"](x_MD, eps)
        products = [linear.multiply(q_MD, scale_M, x_MD.dtype) for linear in inner]
        gate, up = (None, *products) if len(products) == 1 else products
        q_MF, hidden_scale_M, hidden_r_M = kernels["activate_quantize"](gate, up, kind, hidden_eps)
        rows = (None if r_M is None else x_MD, q_MD, scale_M, r_M)
        ctx.save_for_backward(*rows, gate, up, q_MF, hidden_scale_M, hidden_r_M, *weights_of(linears))
        ctx.linears, ctx.kind = linears, kind
        return down.multiply(q_MF, hidden_scale_M, x_MD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, ...]:
        x_MD, q_MD, scale_M, r_M, gate, up, q_MF, hidden_scale_M, hidden_r_M, *_ = ctx.saved_tensors
        *inner, down = ctx.linears
        kernels, needs_input = down.kernels, ctx.needs_input_grad[0]
        reached = needs_input or any(linear.anchor is not None for linear in inner)
        grad_MF = down.backward(grad_MD, q_MF, hidden_scale_M, needs_input=reached)
        grad_x = None
        if grad_MF is not None:
            parts = kernels["activate_quantize_backward"](grad_MF, gate, up, ctx.kind, hidden_r_M)
            grads = [grad for grad in parts if grad is not None]
            found = [
                linear.backward(grad, q_MD, scale_M, needs_input=needs_input)
                for linear, grad in zip(inner, grads, strict=True)
            ]
            if needs_input:
                grad_x = kernels["normalise_quantize_backward"](found, x_MD, r_M, q_MD.shape)
        return grad_x, None, None, None, None, None


def project_heads(
    kernels: Kernels,
    x_BSD: Tensor,
    norm: nn.Module,
    projections: Sequence[tuple[nn.Module, int, nn.Module]],
    angles: _Angles,
) -> tuple[Tensor, ...]:
    """Queries, keys and values ``[B, heads, S, C]``, of linear, heads and norm each; all but the last are turned.

    Args:
        kernels: from ``kernels_for``.
        x_BSD: the residual stream.
        norm: in front of the linears.
        projections: the linears with their numbers of heads and the norms of these.
        angles: cosines and sines, float32 ``[S, C / 2]``.
    """
    batch, length, width = x_BSD.shape
    linears, anchor = join([module for module, _, _ in projections], kernels)
    last = len(projections) - 1
    parts = tuple(
        _Heads(linear, heads, eps_of(head_norm), None if i == last else angles)
        for i, (linear, (_, heads, head_norm)) in enumerate(zip(linears, projections, strict=True))
    )
    found: tuple[Tensor, ...] = _Projected.apply(  # type: ignore[no-untyped-call]
        TernaryModule.in_autocast(x_BSD).reshape(batch * length, width), anchor, parts, eps_of(norm), length
    )
    for linear, y in zip(linears, found, strict=True):
        linear.expect_votes(y)
    return found


def output(kernels: Kernels, seen_BHSC: Tensor, norm: nn.Module, linear: nn.Module) -> Tensor:
    """The product of what the heads have seen, ``[B, S, D]``."""
    (fused,), anchor = join([linear], kernels)
    seen_BHSC = TernaryModule.in_autocast(seen_BHSC)
    y_MD: Tensor = _Output.apply(seen_BHSC, anchor, fused, eps_of(norm))  # type: ignore[no-untyped-call]
    fused.expect_votes(y_MD)
    batch, _, length, _ = seen_BHSC.shape
    return y_MD.view(batch, length, -1)


def feed_forward(
    kernels: Kernels,
    x: Tensor,
    norm: nn.Module,
    linears: Sequence[nn.Module],
    kind: str,
    hidden_norm: nn.Module,
) -> Tensor:
    """``down(norm(act(up(norm(x)))))`` of ``x [..., D]``; ``linears`` are gate (not for ``relu2``), up and down."""
    fused, anchor = join(linears, kernels)
    x_MD = TernaryModule.in_autocast(x).reshape(-1, x.shape[-1])
    y_MD: Tensor = _FeedForward.apply(  # type: ignore[no-untyped-call]
        x_MD, anchor, fused, kind, eps_of(norm), eps_of(hidden_norm)
    )
    for each in fused:
        each.expect_votes(y_MD)
    return y_MD.view(*x.shape[:-1], -1)
