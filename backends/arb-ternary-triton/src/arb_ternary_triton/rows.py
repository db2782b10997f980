"""Quantise rows of activations, and gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from arb_ternary_triton.arguments import check_float
from arb_ternary_triton.kernels.rows import (
    largest_kernel,
    quantize_gradient_kernel,
    quantize_rows_kernel,
)
from arb_ternary_triton.launch import INTERPRETED, cdiv, launch, power_of_two_up
from arb_ternary_triton.noise import hash_keys


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
