"""Coordinate descent: each trit, then each exponent, becomes the best one given all others, several
times over.

The objective of a row is ``(q - w) H (q - w)^T`` with ``q = T 2**E``. With ``g = H (q - w)`` the
best value of one weight, the others as they are, is ``q[k] - g[k] / H[k, k]``; the trit nearest to
it is taken. No step makes the objective larger.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary_upcycle.projection.rounded import EXPONENTS

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
    """Better trits and exponents, in place; returns the values that single weights would have,
    float32 ``[K, R]``.

    Args:
        weight_KR: what is rounded, transposed, float32.
        trits_KR: float32, changed.
        exponent_JR: float32 ``[J, R]``, changed where ``move``.
        hessian: ``H``, float32 ``[K, K]``.
        size: columns that share an exponent.
        passes: rounds over all columns; fewer where one changes nothing.
        move: whether exponents may change, each by one at a time.
    """
    columns = weight_KR.shape[0]
    diagonal = hessian.diagonal()
    gradient = hessian @ (_dense(trits_KR, exponent_JR, size) - weight_KR)
    for _ in range(passes):
        changed = False
        scale = _wide(torch.exp2(exponent_JR), size, columns)
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
    """Double or halve groups where that lowers the objective, trits as they are; True where one
    moved.
    """
    moved = False
    for number in range(exponent_JR.shape[0]):
        some = slice(number * size, min((number + 1) * size, trits_KR.shape[0]))
        part = trits_KR[some] * torch.exp2(exponent_JR[number])
        within = hessian[some, some] @ part
        square = (within * part).sum(dim=0)
        slope = (gradient[some] * part).sum(dim=0)
        # q -> c q changes the objective by 2 (c - 1) q g + (c - 1)^2 q H q.
        more = 2 * slope + square
        less = -slope + square / 4
        step = torch.where((more < 0) & (more <= less), 1.0, torch.where(less < 0, -0.5, 0.0))
        power = exponent_JR[number] + torch.sign(step)
        step.masked_fill_((power < EXPONENTS[0]) | (power > EXPONENTS[1]), 0.0)
        if bool(step.any()):
            moved = True
            exponent_JR[number] += torch.sign(step)
            gradient.addmm_(hessian[:, some], part * step)
    return moved


def _dense(trits_KR: Tensor, exponent_JR: Tensor, size: int) -> Tensor:
    return trits_KR * _wide(torch.exp2(exponent_JR), size, trits_KR.shape[0])


def _wide(values_JR: Tensor, size: int, columns: int) -> Tensor:
    return (
        values_JR if values_JR.shape[0] == 1 else values_JR.repeat_interleave(size, dim=0)[:columns]
    )
