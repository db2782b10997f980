"""Factors a bilinear form with fewer features, with the least error of its values.

The score that query head ``h`` gets from some features is ``x^T M_h y`` with ``M_h = A_h^T K``,
where ``A_h`` are rows of its query and ``K`` rows of the key that it shares. With inputs of second
moment ``S`` its mean square is the squared norm of ``S^1/2 M_h S^1/2``. So the best ``r`` features,
one set of keys for all heads of the group, are those of the truncated SVD of these matrices stacked
(Eckart and Young, 1936). With ``S^1/2 A^T = Q_1 R_1`` (heads stacked) and ``S^1/2 K^T = Q_2 R_2``
that is the SVD of the small ``R_1 R_2^T``.

Shapes: ``m`` query heads per key head, ``F`` features, ``D`` inputs, ``r`` features that are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Singular values below this share of the largest are rounding.
_NEGLIGIBLE = 1e-12
#: Inputs that are multiplied at a time.
_ROWS = 4096


def second_moment_root(inputs_MD: Tensor) -> Tensor:
    """Return ``E[x x^T]^1/2``, float64 ``[D, D]``, symmetric."""
    moment_DD = torch.zeros(
        inputs_MD.shape[1], inputs_MD.shape[1], dtype=torch.float64, device=inputs_MD.device
    )
    for start in range(0, len(inputs_MD), _ROWS):
        wide = inputs_MD[start : start + _ROWS].double()
        moment_DD += wide.T @ wide
    values_D, vectors_DD = torch.linalg.eigh(moment_DD / len(inputs_MD))
    root_DD: Tensor = (vectors_DD * values_D.clamp_min(0).sqrt()) @ vectors_DD.T
    return root_DD


def factorise(
    query_mFD: Tensor, key_FD: Tensor, root_DD: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    """Return queries ``[m, r, D]`` and keys ``[r, D]``, float64, of ``r = rank`` features.

    If ``rank`` is at least ``F`` they are returned as they are. Otherwise rows are balanced: row
    ``j`` of the keys and of all queries together has the same whitened norm. A row that contributes
    nothing is 0 on both sides.
    """
    query_mFD = query_mFD.double()
    key_FD = key_FD.double()
    if rank >= len(key_FD):
        return query_mFD, key_FD
    _, query_factor_FF = torch.linalg.qr((root_DD @ query_mFD.mT).flatten(0, 1))
    _, key_factor_FF = torch.linalg.qr(root_DD @ key_FD.T)
    _, values_F, right_FF = torch.linalg.svd(query_factor_FF @ key_factor_FF.T)
    right_rF = right_FF[:rank]
    values_r = values_F[:rank]
    useful = values_r > _NEGLIGIBLE * values_F[:1]
    balance_r1 = torch.where(useful, values_r, 1.0).sqrt()[:, None]
    # The right singular vectors are Q_2 V. As a map of inputs they are V^T R_2^-T K, and V^T R_2 A
    # on the other side.
    inverse_FF = torch.linalg.pinv(key_factor_FF, rtol=_NEGLIGIBLE).T
    keys_rD = balance_r1 * (right_rF @ inverse_FF @ key_FD)
    queries_mrD = (right_rF @ key_factor_FF @ query_mFD) / balance_r1
    return queries_mrD * useful[:, None], keys_rD * useful[:, None]
