"""Exact integer matrix products on top of the library's int8 GEMM.

``torch._int_mm`` uses the int8 units of the machine. On a processor without VNNI its kernels may
pass through saturating 16-bit sums, or are a plain loop, 75 times slower than a float32 product of
the same shape (AMD EPYC with AVX2, torch 2.13.0). Therefore it is used only if there are such units
and a worst-case product is right. Otherwise the product is taken in float32 over stretches of the
inner dimension that are short enough to be exact.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor

#: Whole numbers up to this one are exact in float32, and so is every partial sum below it.
_FLOAT_EXACT: Final = 1 << 24
#: Exponents that spread at most this far share one int8 matrix: 1 << 6 = 64.
INT8_SPREAD: Final = 6
#: Largest spread of exponents whose sum over K = 2**16 fits in 64 bits: 127 * 2**16 * 2**40 <
#: 2**63.
MAX_SPREAD: Final = 40


def _float_product(a_MK: Tensor, b_KN: Tensor, largest_product: int) -> Tensor:
    """``a @ b`` in float32, over stretches of K whose sums are exact."""
    rows, inner = a_MK.shape
    columns = b_KN.shape[1]
    stretch = _FLOAT_EXACT // max(largest_product, 1)
    total = torch.zeros(rows, columns, dtype=torch.int32, device=a_MK.device)
    for start in range(0, inner, stretch):
        some = slice(start, start + stretch)
        a = a_MK[:, some].to(torch.float32)
        b = b_KN[some].to(torch.float32)
        total += (a @ b).to(torch.int32)
    return total


def _has_int8_units() -> bool:
    """Whether the processor sums products of int8 in one instruction.

    A processor that is not an x86 is assumed to do so.
    """
    known = torch.cpu.get_capabilities()
    if known.get("architecture") != "x86_64":
        return True
    return bool(known.get("avx512_vnni") or known.get("avx_vnni"))


@cache
def _library_is_exact(device_type: str) -> bool:
    """Whether the library's int8 GEMM is right for the largest intermediate sums on this device."""
    if device_type not in ("cpu", "cuda"):
        return False
    if device_type == "cpu" and not _has_int8_units():
        return False
    for left, right in ((127, 127), (127, -127), (-127, 127), (-128, 127)):
        a = torch.full((32, 256), left, dtype=torch.int8, device=device_type)
        b = torch.full((256, 32), right, dtype=torch.int8, device=device_type)
        try:
            product = torch._int_mm(a, b)
        except RuntimeError:
            return False
        if not bool((product == left * right * 256).all()):
            return False
    return True


def _plain_strides(matrix: Tensor) -> Tensor:
    """Return a copy of a matrix with one row or one column, else the matrix itself.

    The stride of a dimension of size 1 may be anything. The CPU library misinterprets the transpose
    of such a matrix: its product then reads memory outside the matrix.
    """
    return matrix.clone(memory_format=torch.contiguous_format) if 1 in matrix.shape else matrix


def _padded_product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """``a @ b`` by the CUDA library.

    It takes more than 16 rows, an inner dimension of more than 16, and multiples of 16 only (seen
    on an H100 with CUDA 13.0).
    """
    rows, inner = a_MK.shape
    columns = b_KN.shape[1]
    more_inner = -inner % 32
    a = _aligned(a_MK, more_rows=max(-rows % 16, 32 - rows), more_columns=more_inner)
    b = _aligned(b_KN, more_rows=more_inner, more_columns=-columns % 16)
    return torch._int_mm(a, b)[:rows, :columns]


def _aligned(matrix: Tensor, *, more_rows: int, more_columns: int) -> Tensor:
    """Return a matrix with more rows and columns of zeros, whose lines start at 16 bytes."""
    if more_rows or more_columns:
        return torch.nn.functional.pad(matrix, (0, more_columns, 0, more_rows))
    lines_aligned = max(matrix.stride()) % 16 == 0 and min(matrix.stride()) == 1
    if lines_aligned and matrix.data_ptr() % 16 == 0:
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


def int_matmul(a_MK: Tensor, b_KN: Tensor, largest_product: int = 127 * 127) -> Tensor:
    """``a @ b`` of int8 matrices, exact: int32 ``[M, N]``, or int64 where 32 bits could overflow.

    ``largest_product`` bounds ``|a * b|`` of single elements. It determines how long a stretch of
    the inner dimension fits in 32 bits.
    """
    rows, inner = a_MK.shape
    columns = b_KN.shape[1]
    if 0 in (rows, inner, columns):
        return torch.zeros(rows, columns, dtype=torch.int32, device=a_MK.device)
    stretch = (2**31 - 1) // max(largest_product, 1)
    if inner > stretch:
        total = torch.zeros(rows, columns, dtype=torch.int64, device=a_MK.device)
        for start in range(0, inner, stretch):
            some = slice(start, start + stretch)
            total += int_matmul(a_MK[:, some], b_KN[some], largest_product)
        return total
    if not _library_is_exact(a_MK.device.type):
        return _float_product(a_MK, b_KN, largest_product)
    if a_MK.device.type == "cpu":
        return torch._int_mm(_plain_strides(a_MK), _plain_strides(b_KN))
    return _padded_product(a_MK, b_KN)


def check_spread(spread: int) -> None:
    """Refuse a spread of exponents for which 64 bits do not hold the sum at K = 2**16."""
    if spread > MAX_SPREAD:
        raise ValueError(
            f"exponents spread over {spread}; the exact integer product takes at most {MAX_SPREAD}"
        )


def shifted_weight_product(a_MK: Tensor, trits_KN: Tensor, shift_KN: Tensor) -> Tensor:
    """``sum_k a[m, k] * (t[k, n] << shift[k, n])``, exact, of int8 matrices.

    The result is int32 ``[M, N]`` if no shift exceeds 6 (then one int8 GEMM does it) and 32 bits
    hold the sums, else int64.

    Args:
        a_MK: int8.
        trits_KN: int8 trits.
        shift_KN: non-negative shifts that broadcast to ``[K, N]``.

    Raises:
        ValueError: a shift exceeds 40; 64 bits would not hold the sum for K = 2**16.
    """
    largest = int(shift_KN.amax()) if shift_KN.numel() else 0
    check_spread(largest)
    if largest <= INT8_SPREAD:
        weight = trits_KN << shift_KN.to(torch.int8)
        return int_matmul(a_MK, weight, 127 << largest)

    # One product for each band of shifts that int8 holds, shifted by the start of the band.
    width = INT8_SPREAD + 1
    rows = a_MK.shape[0]
    columns = trits_KN.shape[1]
    total = torch.zeros(rows, columns, dtype=torch.int64, device=a_MK.device)
    shift = shift_KN.expand(trits_KN.shape).to(torch.int64)
    band_KN = torch.div(shift, width, rounding_mode="floor")
    within = (shift - band_KN * width).to(torch.int8)
    for band in range(largest // width + 1):
        weight = torch.where(band_KN == band, trits_KN << within, 0)
        product = int_matmul(a_MK, weight, 127 << INT8_SPREAD)
        total += product.to(torch.int64) << (band * width)
    return total
