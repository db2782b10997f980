"""Quantise rows of activations, and gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from arb_ternary.counters.hashing import hash_keys
from arb_ternary_triton.arguments import check_float, check_readable
from arb_ternary_triton.kernels.rows import (
    largest_kernel,
    largest_of_both_kernel,
    quantize_both_kernel,
    quantize_gradient_kernel,
    quantize_rows_kernel,
)
from arb_ternary_triton.launch import INTERPRETED, cdiv, launch, power_of_two_up

#: Words of the counter hash: seed, step, stream, and the stream for the folded gradient.
Words = tuple[int, int, int, int]
#: A rounded gradient and its scale, and the same of the gradient with the scales of its rows.
QuantizedPair = tuple[Tensor, Tensor, Tensor, Tensor]


def _quantize(x_MK: Tensor, eps: float, norm: bool) -> tuple[Tensor, Tensor]:
    rows, columns = x_MK.shape
    x = check_float(x_MK, "x", (rows, columns))
    q = torch.empty((rows, columns), dtype=torch.int8, device=x.device)
    if not columns:
        return q, torch.zeros(rows, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)

    # A program takes several rows if they are short.
    largest_chunk = 1 << 16 if INTERPRETED else 4096
    elements = 1 << 16 if INTERPRETED else 1024
    chunk = min(power_of_two_up(columns), largest_chunk)
    rows_per_program = min(power_of_two_up(rows), max(1, elements // chunk))
    launch(
        quantize_rows_kernel,
        (cdiv(rows, rows_per_program),),
        x,
        q,
        scale,
        rows,
        columns,
        eps,
        NORM=norm,
        ROWS=rows_per_program,
        CHUNK=chunk,
        warps=4 if rows_per_program * chunk <= 2048 else 8,
    )
    return q, scale


def quantize_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows by their largest absolute value.

    ``s = max|x| / 127`` and ``q = round_half_even(x / s)`` with IEEE division. Zero rows give
    zeros. A row that is not finite gives zeros and a scale that is not finite.

    Returns:
        ``q`` int8 ``[M, K]`` and ``s`` float32 ``[M]``.
    """
    return _quantize(x_MK, 0.0, False)


def rms_norm_quantize(x_MK: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Apply RMSNorm without gain and :func:`quantize_rows` in one kernel.

    The norm is ``x * rsqrt(mean(x**2) + eps)`` in float32.
    """
    return _quantize(x_MK, eps, True)


def quantize_gradient(grad_MN: Tensor, seed: int, step: int, stream: int) -> tuple[Tensor, Tensor]:
    """Round a gradient stochastically to int8 with one power-of-two scale.

    Returns:
        ``q`` int8 ``[M, N]`` and the scale, float32.
    """
    grad = check_float(grad_MN, "grad", tuple(grad_MN.shape))
    count = grad.numel()
    q = torch.empty(grad.shape, dtype=torch.int8, device=grad.device)
    if not count:
        return q, torch.ones((), device=grad.device)
    scale = torch.empty((), dtype=torch.float32, device=grad.device)
    largest = torch.zeros((), dtype=torch.int32, device=grad.device)
    chunk = min(power_of_two_up(count), 1 << 18) if INTERPRETED else 1024
    grid = (cdiv(count, chunk),)
    launch(largest_kernel, grid, grad, largest, count, CHUNK=chunk)
    keys = hash_keys(seed, step, stream, count)
    launch(
        quantize_gradient_kernel,
        grid,
        grad,
        largest,
        q,
        scale,
        count,
        keys.first,
        keys.second,
        WIDE=keys.wide,
        CHUNK=chunk,
    )
    return q, scale


def quantize_gradients(
    grad_MN: Tensor, row_scale_M: Tensor, seed: int, step: int, stream: int, folded_stream: int
) -> QuantizedPair:
    """Quantise a gradient, and the same with the scales of its rows, in one pass each.

    Returns:
        What :func:`quantize_gradient` returns for ``grad``, and for ``grad * row_scale`` in the
        dtype of the gradient, which has fewer than 2**32 elements.
    """
    (found,) = quantize_several([grad_MN], row_scale_M, [(seed, step, stream, folded_stream)])
    return found


def _quantize_apart(
    grad_MN: Tensor, row_scale_M: Tensor, seed: int, step: int, stream: int, folded_stream: int
) -> QuantizedPair:
    """Do the work of :func:`quantize_gradients` by two calls.

    Kernels have no float64, in which the product with the scales is rounded.
    """
    folded_MN = grad_MN * row_scale_M.to(grad_MN.dtype).unsqueeze(1)
    return (
        *quantize_gradient(grad_MN, seed, step, stream),
        *quantize_gradient(folded_MN, seed, step, folded_stream),
    )


def quantize_several(
    grads: Sequence[Tensor], row_scale_M: Tensor, words: Sequence[Words]
) -> list[QuantizedPair]:
    """:func:`quantize_gradients` of one to three gradients ``[M, N_i]`` with the same rows.

    Args:
        grads: the gradients, of one dtype.
        row_scale_M: scales of the rows, float32.
        words: what to draw from, for each gradient.
    """
    if grads[0].dtype is torch.float64:
        return [
            _quantize_apart(grad, row_scale_M, *each)
            for grad, each in zip(grads, words, strict=True)
        ]
    count = len(grads)
    rows = grads[0].shape[0]
    is_bfloat16 = grads[0].dtype is torch.bfloat16
    checked = [check_float(grad, "grad", (rows, grad.shape[1])) for grad in grads]
    row_scale = check_readable(row_scale_M, "row_scale", torch.float32, (rows,))
    device = row_scale.device
    q = [torch.empty((2, *grad.shape), dtype=torch.int8, device=device) for grad in checked]
    scales = torch.ones((count, 2), device=device)
    largest = torch.zeros((count, 2), dtype=torch.int32, device=device)
    # The kernels do not read a gradient, or its numbers, beyond the count.
    padded = [*checked, *[checked[0]] * (3 - count)]
    columns = [grad.shape[1] for grad in padded]
    elements = 1 << 16 if INTERPRETED else 1024
    tile_columns = min(power_of_two_up(max(columns)), elements)
    tile_rows = min(power_of_two_up(rows), elements // tile_columns)
    grid = (cdiv(rows, tile_rows) * cdiv(max(columns), tile_columns), count)
    launch(
        largest_of_both_kernel,
        grid,
        *padded,
        row_scale,
        largest,
        rows,
        *columns,
        BFLOAT16=is_bfloat16,
        ROWS=tile_rows,
        COLUMNS=tile_columns,
    )
    keys = [0, 0, 0]
    folded_keys = [0, 0, 0]
    for index, (seed, step, stream, folded_stream) in enumerate(words):
        keys[index] = hash_keys(seed, step, stream, 1).first
        folded_keys[index] = hash_keys(seed, step, folded_stream, 1).first
    launch(
        quantize_both_kernel,
        grid,
        *padded,
        row_scale,
        largest,
        *q,
        *[q[0]] * (3 - count),
        scales,
        rows,
        *columns,
        *keys,
        *folded_keys,
        BFLOAT16=is_bfloat16,
        ROWS=tile_rows,
        COLUMNS=tile_columns,
    )
    return [(pair[0], scale[0], pair[1], scale[1]) for pair, scale in zip(q, scales, strict=True)]
