"""Damping, and weights that compensate for errors in the inputs of a linear.

``X`` are the student's inputs of a linear on ``M`` calibration tokens, ``Y`` the teacher's at the
same place, both ``[M, K]``. A student whose earlier layers are rounded reads other inputs than its
teacher. The weights that compensate best are ``argmin_V |X V^T - Y W^T|^2 + l |V - W|^2``, which is
``W' = W (Y^T X + l I) (X^T X + l I)^-1``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def damped(gram: Tensor, damping: float) -> Tensor:
    """Return ``X^T X + l I`` in float64; ``l`` is ``damping`` times the mean of the diagonal.

    Inputs that are always 0 get a diagonal of 1 if it would be 0, so that it can be inverted.
    """
    wide = gram.to(torch.float64, copy=True)
    diagonal = wide.diagonal()
    diagonal += ridge(gram, damping)
    diagonal.masked_fill_(diagonal == 0, 1.0)
    return wide


def ridge(gram: Tensor, damping: float) -> float:
    """Return ``l``."""
    return damping * float(gram.diagonal().to(torch.float64).mean())


def corrected(weight: Tensor, gram: Tensor, cross: Tensor, damping: float) -> Tensor:
    """Return ``W'``, float64 ``[N, K]``.

    Args:
        weight: ``W [N, K]``.
        gram: ``X^T X [K, K]``.
        cross: ``Y^T X [K, K]``.
        damping: ``l`` over the mean of the diagonal of ``X^T X``.
    """
    system = damped(gram, damping)
    moved = cross.to(torch.float64, copy=True)
    moved.diagonal().add_(ridge(gram, damping))
    # W' S = W C, with S symmetric: S W'^T = C^T W^T.
    factor = torch.linalg.cholesky(system)
    right = (weight.to(torch.float64) @ moved).mT
    return torch.cholesky_solve(right, factor).mT.contiguous()
