"""The op of a convolution with int8 activations, its gradient, and defaults for missing kernels.

Each patch is a row of :func:`~arb_ternary.backends.ops.linear` and is quantised by its own absolute
maximum. Windows and rows are those of :mod:`arb_ternary_vision.patches`.
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
from arb_ternary_vision.patches import fold_rows, output_size, unfold_rows

#: Kernels for convolutions that a backend may have. Their signatures are those of the calls below.
CONVOLUTION_OPS: Final = ("vision.unfold_quantize", "vision.convolve", "vision.fold_patches")


def _kernel_or(backend: str, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backend's kernel ``name``, or ``default`` if it has none."""
    found: Callable[..., Any] = get_backend(backend).kernels.get(name, default)
    return found


@op()
def unfold_quantize(x: Tensor, window: Sequence[int], backend: str) -> tuple[Tensor, Tensor]:
    """Return the patches of ``x`` as int8 rows ``[M, K]``, and their float32 scales ``[M]``."""

    def default(x: Tensor, window: Sequence[int]) -> tuple[Tensor, Tensor]:
        q, scale = kernel(backend, "quantize_rows")(unfold_rows(x, window))
        return q, scale

    q, scale = _kernel_or(backend, "vision.unfold_quantize", default)(x, window)
    return q, scale


@unfold_quantize.register_fake
def _(x: Tensor, window: Sequence[int], *_: object) -> tuple[Tensor, Tensor]:
    height, width = output_size(x.shape[2:], window)
    rows = x.shape[0] * height * width
    columns = x.shape[1] * window[0] * window[1]
    return x.new_empty((rows, columns), dtype=torch.int8), x.new_empty(rows, dtype=torch.float32)


@op()
def fold_patches(rows: Tensor, size: Sequence[int], window: Sequence[int], backend: str) -> Tensor:
    """Run :func:`fold_rows`, or the backend's kernel for it.

    Kernels take float32 only.
    """
    fold = fold_rows
    if rows.dtype is torch.float32 and rows.numel():
        fold = _kernel_or(backend, "vision.fold_patches", fold_rows)
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
    """Multiply the patches of ``x`` by ``W.T`` and add ``bias``: ``[M, N]`` in the dtype of ``x``.

    Everything else is as for the int8 ``linear``. Backward makes the int8 patches again instead of
    saving them, because they are larger than ``x``.
    """
    area = window[0] * window[1]
    fits = x.dim() == 4 and x.shape[1] * area == state.sizes[1]
    if not (fits and x.is_floating_point()):
        raise ValueError(
            f"x must be a float tensor [B, {state.sizes[1] // area}, H, W], got {x.dtype} "
            f"{[*x.shape]}"
        )
    # Refuse an image that is smaller than the kernel.
    output_size(x.shape[2:], window)

    def default(
        x: Tensor, weight: Tensor, exponent: Tensor, bias: Tensor | None, *_: object
    ) -> Tensor:
        q, scale = unfold_quantize(x, window, state.backend)
        y: Tensor = kernel(state.backend, "linear")(
            q, scale, weight, exponent, bias, state.shape, x.dtype
        )
        return y

    run = _kernel_or(state.backend, "vision.convolve", default)
    y: Tensor = run(x, state.weight, state.exponent, bias, state.shape, window)
    return y


@convolution.register_fake
def _(
    x: Tensor, anchor: object, bias: object, state: VoteState, window: Sequence[int], *_: object
) -> Tensor:
    height, width = output_size(x.shape[2:], window)
    return x.new_empty((x.shape[0] * height * width, state.sizes[0]))


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
    """Return gradients for (x, anchor, bias) and cast votes as a side effect."""
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
