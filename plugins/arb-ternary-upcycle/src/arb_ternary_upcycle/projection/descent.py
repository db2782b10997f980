"""Coordinate descent: each trit, then each exponent, is set to its best value given all others.

The objective of a row is ``(q - w) H (q - w)^T`` with ``q = T 2**E``. With ``g = H (q - w)`` the
best value of one weight, the others fixed, is ``q[k] - g[k] / H[k, k]``; the nearest trit is taken.
No step increases the objective.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary_upcycle.projection.rounded import EXPONENTS, spread_transposed

#: Columns of a block: within one, every column updates those after it.
_BLOCK: Final = 32


def descend(
    weight_KR: Tensor,
    trits_KR: Tensor,
    exponent_JR: Tensor,
    hessian: Tensor,
    size: int,
    passes: int,
    *,
    move: bool,
) -> Tensor:
    """Improve trits and exponents in place.

    Args:
        weight_KR: the weights, transposed, float32.
        trits_KR: float32, changed.
        exponent_JR: float32 ``[J, R]``, changed if ``move``.
        hessian: ``H``, float32 ``[K, K]``.
        size: columns that share an exponent.
        passes: most passes over all columns; a pass without a change is the last.
        move: whether exponents may change, by one at a time.

    Returns:
        the values that single weights would have given all others, float32 ``[K, R]``.
    """
    columns = weight_KR.shape[0]
    diagonal = hessian.diagonal()
    gradient = hessian @ (_dense(trits_KR, exponent_JR, size) - weight_KR)
    for _ in range(passes):
        changed = False
        scale = spread_transposed(torch.exp2(exponent_JR), size, columns)
        for start in range(0, columns, _BLOCK):
            stop = min(start + _BLOCK, columns)
            inside = gradient[start:stop].clone()
            steps = torch.empty_like(gradient[start:stop])
            for i, k in enumerate(range(start, stop)):
                s = scale[k] if scale.shape[0] > 1 else scale[0]
                best = (trits_KR[k] - inside[i] / (diagonal[k] * s)).round_().clamp_(-1, 1)
                torch.sub(best, trits_KR[k], out=steps[i]).mul_(s)
                trits_KR[k] = best
                if k + 1 < stop:
                    inside[i + 1 :].addr_(hessian[k + 1 : stop, k], steps[i])
            if bool(steps.any()):
                changed = True
                gradient.addmm_(hessian[:, start:stop], steps)
        if move:
            changed |= _move_exponents(trits_KR, exponent_JR, gradient, hessian, size)
        if not changed:
            break
    return _dense(trits_KR, exponent_JR, size) - gradient / diagonal[:, None]


def _move_exponents(
    trits_KR: Tensor, exponent_JR: Tensor, gradient: Tensor, hessian: Tensor, size: int
) -> bool:
    """Double or halve groups where that lowers the objective; return whether one changed."""
    moved = False
    for number in range(exponent_JR.shape[0]):
        some = slice(number * size, min((number + 1) * size, trits_KR.shape[0]))
        part = trits_KR[some] * torch.exp2(exponent_JR[number])
        within = hessian[some, some] @ part
        square = (within * part).sum(dim=0)
        slope = (gradient[some] * part).sum(dim=0)
        # q -> c q changes the objective by 2 (c - 1) q g + (c - 1)^2 q H q.
        doubled = 2 * slope + square
        halved = -slope + square / 4
        step = torch.where(halved < 0, -0.5, 0.0)
        step = torch.where((doubled < 0) & (doubled <= halved), 1.0, step)
        power = exponent_JR[number] + torch.sign(step)
        step.masked_fill_((power < EXPONENTS[0]) | (power > EXPONENTS[1]), 0.0)
        if bool(step.any()):
            moved = True
            exponent_JR[number] += torch.sign(step)
            gradient.addmm_(hessian[:, some], part * step)
    return moved


def _dense(trits_KR: Tensor, exponent_JR: Tensor, size: int) -> Tensor:
    return trits_KR * spread_transposed(torch.exp2(exponent_JR), size, trits_KR.shape[0])
