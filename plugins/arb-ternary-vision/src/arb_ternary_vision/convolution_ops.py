"""Convolutions of int8 patches: the ops, their gradient, and what stands in for kernels that a
backend lacks.

A patch is a row of :func:`~arb_ternary.backends.ops.linear`, quantised by its own absolute maximum.
Windows and rows are those of :mod:`arb_ternary_vision.patches`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from arb_ternary.backends.dispatch import kernel
from arb_ternary.backends.ops import linear_backward
from arb_ternary.backends.registration import op
from arb_ternary.backends.select import get_backend
from arb_ternary.backends.vote_state import VoteState
from arb_ternary_vision.patches import fold_rows, places, unfold_rows

#: The ops that a backend may have for convolutions. The signatures are those of the calls below.
CONVOLUTION_OPS: Final = ("vision.unfold_quantize", "vision.convolve", "vision.fold_patches")


def _own(backend: str, name: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    own: Callable[..., Any] = get_backend(backend).kernels.get(name, otherwise)
    return own


@op()
def unfold_quantize(x: Tensor, window: Sequence[int], backend: str) -> tuple[Tensor, Tensor]:
    """The patches of ``x`` as int8 rows ``[M, K]``, and their float32 scales ``[M]``."""

    def unfolded(x: Tensor, window: Sequence[int]) -> tuple[Tensor, Tensor]:
        q, scale = kernel(backend, "quantize_rows")(unfold_rows(x, window))
        return q, scale

    q, scale = _own(backend, "vision.unfold_quantize", unfolded)(x, window)
    return q, scale


@unfold_quantize.register_fake
def _(x: Tensor, window: Sequence[int], *_: object) -> tuple[Tensor, Tensor]:
    high, wide = places(x.shape[2:], window)
    rows = x.shape[0] * high * wide
    columns = x.shape[1] * window[0] * window[1]
    return x.new_empty((rows, columns), dtype=torch.int8), x.new_empty(rows, dtype=torch.float32)


@op()
def fold_patches(rows: Tensor, size: Sequence[int], window: Sequence[int], backend: str) -> Tensor:
    """:func:`fold_rows`, by the backend's kernel if it has one; kernels take float32 only."""
    fold = fold_rows
    if rows.dtype is torch.float32 and rows.numel():
        fold = _own(backend, "vision.fold_patches", fold_rows)
    folded: Tensor = fold(rows, size, window)
    return folded


@fold_patches.register_fake
def _(rows: Tensor, size: Sequence[int], *_: object) -> Tensor:
    return rows.new_empty((*size,))


@op()
def convolution(
    x: Tensor,
    anchor: Tensor | None,
    bias: Tensor | None,
    state: VoteState,
    window: Sequence[int],
    gradients: str,
) -> Tensor:
    """The patches of ``x`` times ``W.T``, plus ``bias``: ``[M, N]`` in the dtype of ``x``; else as
    int8 ``linear``.

    Backward makes the int8 patches once more: they are more than ``x``.
    """
    if (
        x.dim() != 4
        or x.shape[1] * window[0] * window[1] != state.sizes[1]
        or not x.is_floating_point()
    ):
        wanted = state.sizes[1] // (window[0] * window[1])
        raise ValueError(
            f"x must be a float tensor [B, {wanted}, H, W], got {x.dtype} {[*x.shape]}"
        )
    places(x.shape[2:], window)

    def multiplied(
        x: Tensor, weight: Tensor, exponent: Tensor, bias: Tensor | None, *_: object
    ) -> Tensor:
        q, scale = unfold_quantize(x, window, state.backend)
        y: Tensor = kernel(state.backend, "linear")(
            q, scale, weight, exponent, bias, state.shape, x.dtype
        )
        return y

    run = _own(state.backend, "vision.convolve", multiplied)
    y: Tensor = run(x, state.weight, state.exponent, bias, state.shape, window)
    return y


@convolution.register_fake
def _(
    x: Tensor, anchor: object, bias: object, state: VoteState, window: Sequence[int], *_: object
) -> Tensor:
    high, wide = places(x.shape[2:], window)
    return x.new_empty((x.shape[0] * high * wide, state.sizes[0]))


def _setup(
    ctx: Any,
    output: Tensor,
    x: Tensor,
    anchor: object,
    bias: object,
    state: VoteState,
    window: Sequence[int],
    gradients: str,
) -> None:
    ctx.casts = anchor is not None
    ctx.has_bias = bias is not None
    ctx.x_dtype = x.dtype
    ctx.gradients = gradients
    ctx.window = window
    ctx.save_for_backward(x, state.weight, state.exponent)
    ctx.state = state


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    x, *_ = ctx.saved_tensors
    backend = ctx.state.backend
    q = x
    scale = None
    if ctx.casts:
        q, scale = unfold_quantize(x, ctx.window, backend)
    grad_rows = linear_backward(
        grad_y,
        q,
        scale,
        ctx.state,
        gradients=ctx.gradients,
        dtype=ctx.x_dtype,
        needs_input=ctx.needs_input_grad[0],
        casts=ctx.casts,
    )
    grad_bias = grad_y.to(torch.float32).sum(dim=0) if ctx.has_bias else None
    if grad_rows is None:
        return None, None, grad_bias
    batch, channels, height, width = x.shape
    folded = fold_patches(grad_rows, (batch, height, width, channels), ctx.window, backend)
    return folded.permute(0, 3, 1, 2), None, grad_bias


convolution.register_autograd(_backward, setup_context=_setup)
