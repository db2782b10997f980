"""What pairs of positions say about the rotary planes of a block's heads.

A plane of a head gives ``Re(z e^{i theta d})`` to the score of positions ``t`` and ``t - d``, where
``z = q conj(k)`` of its query and key as complex numbers before they are turned. A plane that is no
longer turned can give ``Re(C z)``, with a constant ``C``. What an error ``e(t, s)`` in the scores
does to the attention of ``t`` is, to second order, half its variance under that attention: so pairs
are weighted with the teacher's attention, and every row is centred.

Shapes: ``N`` samples, ``S`` positions, ``H`` query heads, ``G`` key heads, ``P`` planes of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arb_ternary_text.models.attention import visibility
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.rotary import rotary_angles

#: Rows of a sample whose pairs are looked at, at most, evenly spread.
_ROWS = 64


def pair_moments(query_NSE: Tensor, key_NSE: Tensor, config: DecoderConfig) -> Tensor:
    """Second moments ``[H, 3 P, 3 P]``, float64, of ``(Re z, -Im z, Re(z e^{i theta d}))`` of every
    plane.

    Summed over samples, rows (64 of a sample at most) and pairs.

    Args:
        query_NSE: queries before the rotary embedding, all heads of a position in a row.
        key_NSE: keys likewise.
        config: the teacher's options.
    """
    length = query_NSE.shape[1]
    planes = query_NSE.shape[2] // config.heads // 2
    cos_SP, sin_SP = rotary_angles(
        0,
        length,
        2 * planes,
        config.rotary_base,
        scaling=config.rotary_scaling,
        factors=config.rotary_factors,
        dtype=torch.float32,
        device=query_NSE.device,
    )
    turn_SP = torch.complex(cos_SP, sin_SP)
    seen_SS, is_causal = visibility(
        length, length, config.sliding_window, causal=config.causal, device=query_NSE.device
    )
    if seen_SS is None:
        whole = torch.ones(length, length, dtype=torch.bool, device=query_NSE.device)
        seen_SS = whole.tril() if is_causal else whole
    rows_R = torch.arange(
        -(-length // _ROWS) - 1, length, -(-length // _ROWS), device=query_NSE.device
    )
    moments = torch.zeros(
        config.heads, 3 * planes, 3 * planes, dtype=torch.float64, device=query_NSE.device
    )
    shared = config.heads // config.key_heads
    for query_SE, key_SE in zip(query_NSE, key_NSE, strict=True):
        query_HSP = _complex(query_SE, config.heads)
        key_GSP = _complex(key_SE, config.key_heads)
        for head in range(config.heads):
            moments[head] += _moments_of(
                query_HSP[head],
                key_GSP[head // shared],
                turn_SP,
                seen_SS,
                rows_R,
                scale=(2 * planes) ** -0.5,
            )
    return moments


def choose_planes(moments_HFF: Tensor, key_heads: int, count: int, ridge: float) -> Tensor:
    """The planes of each key head that stay turned: int64 ``[G, count]``, ascending.

    One after another that plane is dropped with which the dropped ones together, each with its best
    constant, leave the smallest error, summed over the query heads of the key head.
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
    """Constants ``C`` of all planes of each query head: complex128 ``[H, P]``; 1 where a plane is
    kept.

    Those of the dropped planes together have the smallest weighted squared error in the scores,
    plus ``ridge`` times the mean of the features' moments times ``|C - 1|^2``.
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
    """Real and imaginary parts of the best constants, ``[m, K, 2 D]``, and the error that they
    leave, ``[m, K]``.

    Of ``K`` sets of ``D`` dropped planes. With ``d = c - (1, 0)`` what is made small is ``|F d -
    r|^2 + ridge |d|^2``, ``r`` being the error at ``C = 1``.
    """
    planes = moments_mFF.shape[-1] // 3
    size = dropped_KD.shape[1]
    index_K3D = torch.cat((dropped_KD, dropped_KD + planes, dropped_KD + 2 * planes), dim=1)
    all_mKFF = moments_mFF[:, index_K3D[:, :, None], index_K3D[:, None, :]]
    system = all_mKFF[..., : 2 * size, : 2 * size]
    # The error at C = 1 is the sum of the turned parts less that of the real parts.
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
    """``[heads, S, P]``: features ``p`` and ``p + P`` of a head are the real and the imaginary part
    of plane ``p``.
    """
    parts = x_SE.float().view(x_SE.shape[0], heads, 2, -1)
    return torch.complex(parts[:, :, 0].contiguous(), parts[:, :, 1].contiguous()).transpose(0, 1)


def _moments_of(
    query_SP: Tensor,
    key_SP: Tensor,
    turn_SP: Tensor,
    seen_SS: Tensor,
    rows_R: Tensor,
    *,
    scale: float,
) -> Tensor:
    turned_query_RP = (query_SP * turn_SP)[rows_R]
    turned_key_SP = key_SP * turn_SP
    scores_RS = (turned_query_RP @ turned_key_SP.mH).real * scale
    weight_RS = scores_RS.masked_fill(~seen_SS[rows_R], -torch.inf).softmax(dim=-1)
    still_RSP = query_SP[rows_R][:, None] * key_SP.conj()
    turned_RSP = (turned_query_RP[:, None] * turned_key_SP.conj()).real
    features_RSF = torch.cat((still_RSP.real, -still_RSP.imag, turned_RSP), dim=-1)
    mean_R1F = weight_RS[:, None] @ features_RSF
    weighted = ((features_RSF - mean_R1F) * weight_RS.sqrt()[..., None]).flatten(0, 1)
    return (weighted.T @ weighted).double()
