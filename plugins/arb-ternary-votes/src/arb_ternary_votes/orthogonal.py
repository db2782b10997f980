"""Orthogonalise half of a gradient before votes are cast from it.

The gradient ``G = U S V^T`` of one weight in one micro-batch has a few large singular values, so
most of a vote is about the few directions of these values. Muon (Jordan et al., 2024) steps by
``U V^T`` instead, in which all directions count equally. That needs a momentum over many steps: in
one micro-batch most directions are noise. Half of each needs none::

    H = G / |G| + O / |O|        O ~ U V^T, |.| the root of the mean square

``O`` comes from the iteration of Newton and Schulz, with Muon's polynomial and three of its five
rounds: singular values of less than a fortieth of the norm, which five rounds would enlarge as much
as any, stay small. ``H`` has the same size in every micro-batch. Nothing is kept from one step to
the next; in backward there is the whole gradient of one weight at a time.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from torch import Tensor

from arb_ternary_votes.weight_gradients import TINY, arguments_of, even

#: What a module's ``transform`` is set to.
TRANSFORM: Final = f"{__name__}:arguments"

#: Coefficients of an odd polynomial that drives singular values in (0, 1] to between 0.7 and 1.2,
#: and how often it is applied.
POLYNOMIAL: Final = (3.4445, -4.7750, 2.0315)
ROUNDS: Final = 3


def half_orthogonal(gradient: Tensor) -> Tensor:
    """Return ``H`` of the module's docstring, float32 ``[N, K]``.

    The gradient is float32 or bfloat16. For a gradient of zeros ``H`` is zero. If the gradient has
    a number that is not finite, every element is NaN and casts no vote.
    """
    return even(gradient.float()).add_(even(orthogonalised(gradient).float()))


def orthogonalised(gradient: Tensor) -> Tensor:
    """Return about ``U V^T`` of ``U S V^T``, in the dtype of ``gradient``: ``[N, K]``."""
    x: Tensor = gradient / gradient.float().norm().clamp_min(TINY).to(gradient.dtype)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    first, third, fifth = POLYNOMIAL
    for _ in range(ROUNDS):
        square = x @ x.T
        x = first * x + (third * square + fifth * square @ square) @ x
    return x.T if tall else x


#: The arguments of a cast whose gradient is :func:`half_orthogonal`.
arguments: Final = partial(arguments_of, half_orthogonal)
