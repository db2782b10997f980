"""The parts of a block as one node of the graph each, by the kernels of a backend.

For backward they keep what torch's operations would keep, or less: the rows before a norm instead
of those after it, int8 rows once, and none of the activation's intermediate results.

Shapes: as in :mod:`~arb_ternary_text.models.attention`; ``M`` rows ``(b, s)`` of ``D`` features.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

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

_Angles = tuple[Tensor, Tensor]


class _Heads(NamedTuple):
    """One of queries, keys and values: its linear, how many heads it has, its norm's eps, and what
    turns it.
    """

    linear: FusedLinear
    heads: int
    eps: float | None
    angles: _Angles | None


class _Projected(torch.autograd.Function):
    """Norm, one quantisation, queries, keys and values; heads normed and turned.

    Vectors: the gain in front, then those of the heads of each part, then the factors of each.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_MD: Tensor,
        _anchor: Tensor | None,
        parts: tuple[_Heads, ...],
        eps: float | None,
        length: int,
        *vectors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        kernels = parts[0].linear.kernels
        gain = vectors[0]
        gains = vectors[1 : 1 + len(parts)]
        factors = vectors[1 + len(parts) :]
        q_MD, scale_M, r_M = kernels["normalise_quantize"](x_MD, eps, gain)
        found = []
        kept = []
        for part, head_gain, factor in zip(parts, gains, factors, strict=True):
            product_ME = part.linear.multiply(q_MD, scale_M, x_MD.dtype)
            y_ME = scaled(product_ME, factor)
            y_BHSC, r_MH = kernels["turn_heads"](
                y_ME, part.angles, part.heads, length, part.eps, head_gain
            )
            found.append(y_BHSC)
            kept += [None if r_MH is None and factor is None else product_ME, r_MH]
        x_kept = None if r_M is None else x_MD
        angles = parts[0].angles or (None, None)
        weights = weights_of([part.linear for part in parts])
        ctx.save_for_backward(x_kept, q_MD, scale_M, r_M, *angles, *kept, *vectors, *weights)
        ctx.parts = parts
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_MD, q_MD, scale_M, r_M, cos, sin, *rest = ctx.saved_tensors
        parts: tuple[_Heads, ...] = ctx.parts
        count = len(parts)
        kernels = parts[0].linear.kernels
        kept = rest[: 2 * count]
        vectors = rest[2 * count : 4 * count + 1]
        gain = vectors[0]
        gains = vectors[1 : 1 + count]
        factors = vectors[1 + count :]
        of_vectors = [grad_buffer_like(each) for each in (gain, *gains)]
        needs_rows = ctx.needs_input_grad[0] or ctx.needs_input_grad[5]
        found = []
        for i, (part, grad) in enumerate(zip(parts, grads, strict=True)):
            angles = None if part.angles is None else (cos, sin)
            product_ME = kept[2 * i]
            r_MH = kept[2 * i + 1]
            y_ME = None if r_MH is None else scaled(product_ME, factors[i])
            grad_ME = kernels["turn_heads_backward"](
                grad, y_ME, angles, r_MH, gains[i], of_vectors[1 + i]
            )
            grad_ME, of_rows = factor_grad(kernels, grad_ME, product_ME, factors[i])
            of_vectors.append(of_rows)
            found.append(part.linear.backward(grad_ME, q_MD, scale_M, needs_input=needs_rows))
        grad_x = None
        if needs_rows:
            grad_x = kernels["normalise_quantize_backward"](
                found, x_MD, r_M, q_MD.shape, gain, of_vectors[0]
            )
        return grad_x, None, None, None, None, *of_vectors


class _Output(torch.autograd.Function):
    """Heads side by side, norm, quantisation, product. Vectors: the norm's gain, factors of
    rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        seen_BHSC: Tensor,
        _anchor: Tensor | None,
        linear: FusedLinear,
        eps: float | None,
        gain: Tensor | None,
        factor: Tensor | None,
    ) -> Tensor:
        q_ME, scale_M, r_M = linear.kernels["normalise_quantize"](seen_BHSC, eps, gain)
        product_MD = linear.multiply(q_ME, scale_M, seen_BHSC.dtype)
        rows = (
            None if r_M is None else seen_BHSC,
            q_ME,
            scale_M,
            r_M,
            None if factor is None else product_MD,
        )
        ctx.save_for_backward(*rows, gain, factor, *linear.saved)
        ctx.linear = linear
        ctx.size = seen_BHSC.shape
        return scaled(product_MD, factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, ...]:
        seen, q_ME, scale_M, r_M, product_MD, gain, factor, *_ = ctx.saved_tensors
        linear: FusedLinear = ctx.linear
        needs_rows = ctx.needs_input_grad[0] or ctx.needs_input_grad[4]
        grad_MD, of_rows = factor_grad(linear.kernels, grad_MD, product_MD, factor)
        grad_ME = linear.backward(grad_MD, q_ME, scale_M, needs_input=needs_rows)
        grad_seen = None
        of_gain = grad_buffer_like(gain)
        if grad_ME is not None:
            back = linear.kernels["normalise_quantize_backward"]
            grad_seen = back([grad_ME], seen, r_M, ctx.size, gain, of_gain)
        return grad_seen, None, None, None, of_gain, of_rows


class _FeedForward(torch.autograd.Function):
    """Norm, one quantisation, gate and up, activation, norm, quantisation, down.

    Vectors: the gains of both norms, then the factors of each linear.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_MD: Tensor,
        _anchor: Tensor | None,
        linears: Sequence[FusedLinear],
        kind: str,
        eps: float | None,
        hidden_eps: float | None,
        *vectors: Tensor | None,
    ) -> Tensor:
        *inner, down = linears
        gain, hidden_gain, *factors = vectors
        kernels = down.kernels
        q_MD, scale_M, r_M = kernels["normalise_quantize"](x_MD, eps, gain)
        products = [linear.multiply(q_MD, scale_M, x_MD.dtype) for linear in inner]
        gate, up = _gate_and_up(products, factors)
        q_MF, hidden_scale_M, hidden_r_M = kernels["activate_quantize"](
            gate, up, kind, hidden_eps, hidden_gain
        )
        product_MD = down.multiply(q_MF, hidden_scale_M, x_MD.dtype)
        rows = (None if r_M is None else x_MD, q_MD, scale_M, r_M, q_MF, hidden_scale_M, hidden_r_M)
        kept = None if factors[-1] is None else product_MD
        ctx.save_for_backward(*rows, *products, kept, *vectors, *weights_of(linears))
        ctx.linears = linears
        ctx.kind = kind
        return scaled(product_MD, factors[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, ...]:
        x_MD, q_MD, scale_M, r_M, q_MF, hidden_scale_M, hidden_r_M, *rest = ctx.saved_tensors
        *inner, down = ctx.linears
        count = len(inner)
        products = rest[:count]
        product_MD = rest[count]
        gain, hidden_gain, *factors = rest[count + 1 : 2 * count + 4]
        kernels = down.kernels
        (needs_x, *needs) = (ctx.needs_input_grad[i] for i in (0, *range(6, 9 + count)))
        needs_rows = needs_x or needs[0]
        reached = (
            needs_rows or any(needs[1:-1]) or any(linear.anchor is not None for linear in inner)
        )
        grad_MD, of_down = factor_grad(kernels, grad_MD, product_MD, factors[-1])
        grad_MF = down.backward(grad_MD, q_MF, hidden_scale_M, needs_input=reached)
        grad_x = None
        of_gains = [grad_buffer_like(gain), grad_buffer_like(hidden_gain)]
        of_inner = (None,) * count
        if grad_MF is not None:
            back = kernels["activate_quantize_backward"]
            gains = (hidden_gain, of_gains[1])
            parts = back(grad_MF, *_gate_and_up(products, factors), ctx.kind, hidden_r_M, *gains)
            given = [each for each in parts if each is not None]
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
        return grad_x, None, None, None, None, None, *of_gains, *of_inner, of_down


def _gate_and_up(
    products: Sequence[Tensor], factors: Sequence[Tensor | None]
) -> tuple[Tensor | None, Tensor]:
    """What the activation is of; there is no gate where there is one product."""
    first, *others = map(scaled, products, factors)
    return (first, *others) if others else (None, first)  # type: ignore[return-value]


def project_heads(
    kernels: Kernels,
    x_BSD: Tensor,
    norm: nn.Module,
    projections: Sequence[tuple[nn.Module, int, nn.Module]],
    angles: _Angles,
) -> tuple[Tensor, ...]:
    """Queries, keys and values ``[B, heads, S, C]``, of linear, heads and norm each; all but the
    last are turned.

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
    gains = [gain_of(each) for each in (norm, *(head_norm for _, _, head_norm in projections))]
    vectors = (*gains, *(factor_of(module) for module, _, _ in projections))
    found: tuple[Tensor, ...] = _Projected.apply(  # type: ignore[no-untyped-call]
        TernaryModule.in_autocast(x_BSD).reshape(batch * length, width),
        anchor,
        parts,
        eps_of(norm),
        length,
        *vectors,
    )
    for linear, y in zip(linears, found, strict=True):
        linear.expect_votes(y)
    return found


def output(kernels: Kernels, seen_BHSC: Tensor, norm: nn.Module, linear: nn.Module) -> Tensor:
    """The product of what the heads have seen, ``[B, S, D]``."""
    (fused,), anchor = join([linear], kernels)
    seen_BHSC = TernaryModule.in_autocast(seen_BHSC)
    vectors = gain_of(norm), factor_of(linear)
    y_MD: Tensor = _Output.apply(seen_BHSC, anchor, fused, eps_of(norm), *vectors)  # type: ignore[no-untyped-call]
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
    """``down(norm(act(up(norm(x)))))`` of ``x [..., D]``; ``linears`` are gate (not for ``relu2``),
    up and down.
    """
    fused, anchor = join(linears, kernels)
    x_MD = TernaryModule.in_autocast(x).reshape(-1, x.shape[-1])
    vectors = (gain_of(norm), gain_of(hidden_norm), *map(factor_of, linears))
    y_MD: Tensor = _FeedForward.apply(  # type: ignore[no-untyped-call]
        x_MD, anchor, fused, kind, eps_of(norm), eps_of(hidden_norm), *vectors
    )
    for each in fused:
        each.expect_votes(y_MD)
    return y_MD.view(*x.shape[:-1], -1)
