"""Rounding column by column, each column's error compensated by the columns still to come (GPTQ).

Frantar, Ashkboos, Hoefler and Alistarh, GPTQ, 2022, after Hassibi and Stork's optimal brain
surgeon. The objective of a row is ``(q - w) H (q - w)^T`` with ``H = X^T X + l I``. With ``H^-1 =
U^T U``, ``U`` upper triangular, the error of column ``k`` over ``U[k, k]``, times ``U[k, k:]``, is
subtracted from the rest of the row. Updates beyond a block of columns are one product per block.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

#: Columns of a block: within one, every column updates those after it.
_BLOCK: Final = 32


def inverse_factor(hessian: Tensor) -> Tensor:
    """Return ``U`` of ``H^-1 = U^T U``, float64; ``hessian``: float64, positive definite."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor


def compensate(weight_KR: Tensor, factor: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Round ``weight_KR``.

    Args:
        weight_KR: a matrix, transposed, its columns in the order in which they are rounded.
        factor: ``U`` for that order, float32 ``[K, K]``.
        scale: ``2**E`` of each weight, float32 ``[K, R]``, or ``[1, R]`` if a row has only one.

    Returns:
        trits, and the float weights just before they were rounded, both float32 ``[K, R]``.
    """
    left = weight_KR.clone()
    trits = torch.empty_like(left)
    columns = left.shape[0]
    each = scale.shape[0] > 1
    for start in range(0, columns, _BLOCK):
        stop = min(start + _BLOCK, columns)
        inside = left[start:stop]
        errors = torch.empty_like(left[start:stop])
        for i, k in enumerate(range(start, stop)):
            s = scale[k] if each else scale[0]
            torch.round(torch.div(inside[i], s, out=trits[k]), out=trits[k]).clamp_(-1, 1)
            torch.addcmul(inside[i], trits[k], s, value=-1, out=errors[i])
            errors[i] /= factor[k, k]
            if k + 1 < stop:
                inside[i + 1 :].addr_(factor[k, k + 1 : stop], errors[i], alpha=-1)
        left[stop:].addmm_(factor[start:stop, stop:].mT, errors, alpha=-1)
    return trits, left


def objective(difference_KR: Tensor, hessian: Tensor) -> Tensor:
    """Return ``d H d^T`` of each column of ``difference_KR``, float64 ``[R]``."""
    return (hessian @ difference_KR).mul_(difference_KR).sum(dim=0, dtype=torch.float64)
