"""Chooses, from pairs of positions, which rotary planes of a block's heads are kept.

A plane of a head adds ``Re(z e^{i theta d})`` to the score of positions ``t`` and ``t - d``, where
``z = q conj(k)`` of its query and key as complex numbers before they are rotated. A plane that is
no longer rotated can add ``Re(C z)``, with a constant ``C``. The effect of an error ``e(t, s)`` in
the scores on the attention of ``t`` is, to second order, half its variance under that attention:
so pairs are weighted with the teacher's attention, and every row is centred.

Shapes: ``N`` samples, ``S`` positions, ``H`` query heads, ``G`` key heads, ``P`` planes per head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arb_ternary_text.models.attention import visibility
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.rotary import rotary_angles

#: Most rows of a sample whose pairs are used, evenly spread.
_ROWS = 64


def pair_moments(query_NSE: Tensor, key_NSE: Tensor, config: DecoderConfig) -> Tensor:
    """Return second moments of ``(Re z, -Im z, Re(z e^{i theta d}))`` of every plane.

    Args:
        query_NSE: queries before the rotary embedding, all heads of a position in a row.
        key_NSE: keys in the same layout.
        config: the teacher's options.

    Returns:
        sums over samples, rows (at most 64 per sample) and pairs, float64 ``[H, 3 P, 3 P]``.
    """
    length = query_NSE.shape[1]
    device = query_NSE.device
    planes = query_NSE.shape[2] // config.heads // 2
    cos_SP, sin_SP = rotary_angles(
        0,
        length,
        2 * planes,
        config.rotary_base,
        scaling=config.rotary_scaling,
        factors=config.rotary_factors,
        dtype=torch.float32,
        device=device,
    )
    rotation_SP = torch.complex(cos_SP, sin_SP)
    seen_SS, is_causal = visibility(
        length, length, config.sliding_window, causal=config.causal, device=device
    )
    if seen_SS is None:
        seen_SS = torch.ones(length, length, dtype=torch.bool, device=device)
        if is_causal:
            seen_SS = seen_SS.tril()
    step = -(-length // _ROWS)
    rows_R = torch.arange(step - 1, length, step, device=device)

    size = 3 * planes
    moments = torch.zeros(config.heads, size, size, dtype=torch.float64, device=device)
    shared = config.heads // config.key_heads
    for query_SE, key_SE in zip(query_NSE, key_NSE, strict=True):
        query_HSP = _complex(query_SE, config.heads)
        key_GSP = _complex(key_SE, config.key_heads)
        for head in range(config.heads):
            key_SP = key_GSP[head // shared]
            moments[head] += _moments_of(query_HSP[head], key_SP, rotation_SP, seen_SS, rows_R)
    return moments


def choose_planes(moments_HFF: Tensor, key_heads: int, count: int, ridge: float) -> Tensor:
    """Return the planes of each key head that stay rotary: int64 ``[G, count]``, ascending.

    Planes are dropped one after another: the next is the one with which all dropped planes, each
    with its best constant, leave the smallest error, summed over the query heads of the key head.
    """
    planes = moments_HFF.shape[-1] // 3
    chosen = []
    for moments_mFF in moments_HFF.view(key_heads, -1, *moments_HFF.shape[1:]):
        dropped = torch.empty(0, dtype=torch.int64, device=moments_HFF.device)
        kept = torch.arange(planes, device=moments_HFF.device)
        while len(kept) > count:
            tried_KD = torch.cat((dropped.expand(len(kept), -1), kept[:, None]), dim=1)
            _, errors_mK = _constants(moments_mFF, tried_KD, ridge)
            worst = int(errors_mK.sum(dim=0).argmin())
            dropped = tried_KD[worst]
            kept = torch.cat((kept[:worst], kept[worst + 1 :]))
        chosen.append(kept)
    return torch.stack(chosen)


def fit_constants(moments_HFF: Tensor, kept_GK: Tensor, ridge: float) -> Tensor:
    """Return the constants ``C`` of the planes of each query head, complex128 ``[H, P]``.

    They are 1 for planes that are kept. Those of the dropped planes together minimise the weighted
    squared error in the scores, plus ``ridge`` times the mean of the features' moments times ``|C -
    1|^2``.
    """
    planes = moments_HFF.shape[-1] // 3
    shared = len(moments_HFF) // len(kept_GK)
    found = torch.ones(len(moments_HFF), planes, dtype=torch.complex128, device=moments_HFF.device)
    for head, moments_FF in enumerate(moments_HFF):
        every = torch.arange(planes, device=moments_HFF.device)
        dropped_D = every[~torch.isin(every, kept_GK[head // shared])]
        if len(dropped_D):
            constants, _ = _constants(moments_FF[None], dropped_D[None], ridge)
            found[head, dropped_D] = torch.complex(*constants[0, 0].chunk(2))
    return found


def _constants(moments_mFF: Tensor, dropped_KD: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Fit the constants of ``K`` sets of ``D`` dropped planes.

    With ``d = c - (1, 0)`` the fit minimises ``|F d - r|^2 + ridge |d|^2``, where ``r`` is the
    error at ``C = 1``.

    Returns:
        real and imaginary parts of the constants, ``[m, K, 2 D]``, and the error that they leave,
        ``[m, K]``.
    """
    planes = moments_mFF.shape[-1] // 3
    size = dropped_KD.shape[1]
    index_K3D = torch.cat((dropped_KD, dropped_KD + planes, dropped_KD + 2 * planes), dim=1)
    all_mKFF = moments_mFF[:, index_K3D[:, :, None], index_K3D[:, None, :]]
    system = all_mKFF[..., : 2 * size, : 2 * size]
    # The error at C = 1 is the sum of the rotated parts less that of the real parts.
    sign = torch.zeros(3 * size, dtype=torch.float64, device=moments_mFF.device)
    sign[:size] = -1
    sign[2 * size :] = 1
    with_error = all_mKFF @ sign
    goal = with_error[..., : 2 * size]
    mean = system.diagonal(dim1=-2, dim2=-1).mean(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
    identity = torch.eye(2 * size, dtype=torch.float64, device=moments_mFF.device)
    moved: Tensor = torch.linalg.solve(system + (ridge * mean)[..., None, None] * identity, goal)
    start = torch.cat((torch.ones(size), torch.zeros(size))).to(moved)
    return moved + start, with_error @ sign - (moved * goal).sum(dim=-1)


def _complex(x_SE: Tensor, heads: int) -> Tensor:
    """Return the planes as complex numbers ``[heads, S, P]``, of features ``p`` and ``p + P``."""
    parts = x_SE.float().view(x_SE.shape[0], heads, 2, -1)
    return torch.complex(parts[:, :, 0].contiguous(), parts[:, :, 1].contiguous()).transpose(0, 1)


def _moments_of(
    query_SP: Tensor, key_SP: Tensor, rotation_SP: Tensor, seen_SS: Tensor, rows_R: Tensor
) -> Tensor:
    scale = (2 * query_SP.shape[1]) ** -0.5
    rotated_query_RP = (query_SP * rotation_SP)[rows_R]
    rotated_key_SP = key_SP * rotation_SP
    scores_RS = (rotated_query_RP @ rotated_key_SP.mH).real * scale
    weight_RS = scores_RS.masked_fill(~seen_SS[rows_R], -torch.inf).softmax(dim=-1)
    still_RSP = query_SP[rows_R][:, None] * key_SP.conj()
    rotated_RSP = (rotated_query_RP[:, None] * rotated_key_SP.conj()).real
    features_RSF = torch.cat((still_RSP.real, -still_RSP.imag, rotated_RSP), dim=-1)
    mean_R1F = weight_RS[:, None] @ features_RSF
    weighted = ((features_RSF - mean_R1F) * weight_RS.sqrt()[..., None]).flatten(0, 1)
    moments_FF: Tensor = (weighted.T @ weighted).double()
    return moments_FF
