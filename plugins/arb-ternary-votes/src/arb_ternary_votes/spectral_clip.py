"""Gradients whose largest singular values are cut to one size, before votes are cast from them.

The gradient ``G = U S V^T`` of one weight in one micro-batch has a few large singular values, so
most of a vote is about the few directions of these values. The gain of
:mod:`arb_ternary_votes.orthogonal`, which evens out all of them, comes from those few. Here the
:data:`RANK` largest are cut to the least of them, and the others stay::

    H = (G - P (1 - s_r / s) P^T G) / |.|

    P: the r largest left directions; |.|: the root of the mean square

``P`` is found by a subspace iteration (Halko, Martinsson and Tropp, 2011) from the same random
matrix every time, with one more product with ``G G^T``: ``10 r N K`` multiplications, where three
rounds of Newton and Schulz have 9 ``N^2 K`` and more. ``H`` has the same size in every micro-batch.
Nothing is kept from one step to the next.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Final

import torch
from torch import Tensor

from arb_ternary_votes.weight_gradients import TINY, arguments_of, even

#: What a module's ``transform`` is set to.
TRANSFORM: Final = f"{__name__}:arguments"

#: Number of singular values that are cut; at most a quarter of all.
RANK: Final = 32

#: No value is cut below this share of the largest: a batch of few samples has fewer directions
#: than are looked for.
FLOOR: Final = 1 / 256

_SEED: Final = 0x5EED


def clipped(gradient: Tensor) -> Tensor:
    """Return ``H`` of the module's docstring, float32 ``[N, K]``.

    The gradient is float32 or bfloat16. For a gradient of zeros ``H`` is zero. If the gradient has
    a number that is not finite, every element is NaN and casts no vote.
    """
    rank = min(RANK, max(1, min(gradient.shape) // 4))
    whole = gradient.float()
    if not whole.numel():
        return whole
    # 0 if all numbers are finite, else NaN: decompositions of such numbers fail.
    poison = (whole * 0).sum()
    # Numbers near 1, so that squares of squares neither overflow nor vanish.
    finite = whole.nan_to_num(0.0, 0.0, 0.0)
    finite = finite / finite.abs().amax().clamp_min(TINY)
    tall = finite.shape[0] > finite.shape[1]
    x = finite.T if tall else finite
    directions, values = _largest(x, rank)
    least = torch.maximum(values[0], FLOOR * values[-1])
    cut = 1 - least / torch.maximum(values, least).clamp_min(TINY)
    flat = x - directions @ (cut.unsqueeze(1) * (directions.T @ x))
    return even(flat.T.contiguous() if tall else flat) + poison


def _largest(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return about the largest left singular vectors of a wide ``x`` and their singular values.

    Vectors are ``[N, r]``; values rise.
    """
    first: Tensor = torch.linalg.qr(x @ _start(x.shape[1], rank, x.device))[0]
    basis: Tensor = torch.linalg.qr(x @ (x.T @ first))[0]
    inside = basis.T @ x
    squares, rotation = torch.linalg.eigh(inside @ inside.T)
    return basis @ rotation, squares.clamp_min(0.0).sqrt()


@cache
def _start(columns: int, rank: int, device: torch.device) -> Tensor:
    """Return the same normal numbers every time, float32 ``[K, r]``."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randn(columns, rank, generator=generator).to(device)


#: The arguments of a cast whose gradient is :func:`clipped`.
arguments: Final = partial(arguments_of, clipped)
