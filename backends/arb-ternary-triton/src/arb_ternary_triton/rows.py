"""Quantisation of rows and of gradients."""

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
    chunk = min(power_of_two_up(columns), 1 << 16 if INTERPRETED else 4096)
    # A program takes several rows where they are short.
    some = min(power_of_two_up(rows), max(1, (1 << 16 if INTERPRETED else 1024) // chunk))
    launch(
        quantize_rows_kernel,
        (cdiv(rows, some),),
        x, q, scale, rows, columns, eps,
        NORM=norm, ROWS=some, CHUNK=chunk, warps=4 if some * chunk <= 2048 else 8,
    )  # fmt: skip
    return q, scale


def quantize_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Per-row absolute-maximum quantisation: ``q`` int8 ``[M, K]`` and ``s`` float32 ``[M]``.

    ``s = max|x| / 127``, ``q = round_half_even(x / s)`` with IEEE division; zero rows give zeros, a
    row that is not finite a scale that is not finite and zeros.
    """
    return _quantize(x_MK, 0.0, False)


def rms_norm_quantize(x_MK: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm without gain, ``x * rsqrt(mean(x**2) + eps)`` in float32, then :func:`quantize_rows`,
    in one kernel.
    """
    return _quantize(x_MK, eps, True)


def quantize_gradient(grad_MN: Tensor, seed: int, step: int, stream: int) -> tuple[Tensor, Tensor]:
    """Stochastic rounding to int8 with one power-of-two scale: ``q`` int8 ``[M, N]`` and the scale,
    float32.
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
        *keys[:2],
        WIDE=keys[2],
        CHUNK=chunk,
    )
    return q, scale
