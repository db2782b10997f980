"""The ops that backward calls: gradients to int8, and the casting of votes.

Arguments as in :mod:`arb_ternary.backends.ops`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from arb_ternary.backends.dispatch import Kernel, kernel
from arb_ternary.backends.protocol import NARROW_NOISE, WeightShape
from arb_ternary.backends.reference_scaled_votes import MAX_NOISE_SHIFT, MAX_VOTE_LIMIT
from arb_ternary.backends.registration import op
from arb_ternary.counters.control import MICRO, hash_words

__all__ = [
    "cast_bias_votes",
    "cast_embedding_scaled_votes",
    "cast_embedding_votes",
    "cast_scaled_votes",
    "cast_votes",
    "quantize_gradient",
]


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --- gradients to int8 -----------------------------------------------------------------------------------------------


@op()
def quantize_gradient(grad: Tensor, control: Tensor, use: int, backend: str) -> tuple[Tensor, Tensor]:
    """Stochastically rounded int8 gradient ``[M, N]`` and its power-of-two scale (float32 scalar)."""
    seed, step, stream = hash_words(control)
    q, scale = kernel(backend, "quantize_gradient")(grad, seed, step, stream + use)
    return q, scale


@quantize_gradient.register_fake
def _(grad: Tensor, control: Tensor, use: int, backend: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(grad, dtype=torch.int8), grad.new_empty((), dtype=torch.float32)


# --- votes -----------------------------------------------------------------------------------------------------------


@op(mutates_args=("votes", "exponent_votes", "stats", "control"))
def cast_votes(
    grad: Tensor,
    x: Tensor,
    scale: Tensor | None,
    packed: Tensor,
    votes: Tensor,
    exponent_votes: Tensor | None,
    stats: Tensor,
    control: Tensor,
    out_features: int,
    in_features: int,
    group_size: int,
    vote_bits: int,
    backend: str,
) -> None:
    """Cast one micro-batch's votes from ``grad [M, N]`` and ``x [M, K]``; counts the micro-batch in ``control``."""
    _check(grad.shape == (x.shape[0], out_features), f"grad must be [M, N], got {tuple(grad.shape)}")
    shape = WeightShape(out_features, in_features, group_size, vote_bits)
    kernel(backend, "cast_votes")(grad, x, scale, packed, votes, exponent_votes, stats, shape)
    control[MICRO] += 1


@cast_votes.register_fake
def _(*_arguments: object) -> None:
    return None


@op(mutates_args=("votes", "exponent_votes", "correlation", "steps", "stats", "control"))
def cast_embedding_votes(
    ids: Tensor,
    grad: Tensor,
    scale: Tensor | None,
    packed: Tensor,
    votes: Tensor,
    exponent_votes: Tensor | None,
    correlation: Tensor | None,
    steps: Tensor | None,
    stats: Tensor,
    control: Tensor,
    out_features: int,
    in_features: int,
    group_size: int,
    vote_bits: int,
    backend: str,
) -> None:
    """Cast the votes of looked-up rows: ``ids [M]``, ``grad [M, K]``; counts the micro-batch in ``control``."""
    shape = WeightShape(out_features, in_features, group_size, vote_bits)
    kernel(backend, "embedding_votes")(
        ids, grad, scale, packed, votes, exponent_votes, correlation, steps, stats, shape
    )
    control[MICRO] += 1


@cast_embedding_votes.register_fake
def _(*_arguments: object) -> None:
    return None


# --- scaled votes ----------------------------------------------------------------------------------------------------


def _limits(vote_limits: Tensor) -> tuple[int, int, int]:
    limit, exponent_shift, noise_shift = vote_limits.tolist()
    _check(1 <= limit <= MAX_VOTE_LIMIT, f"vote_limit must be in 1..{MAX_VOTE_LIMIT}, got {limit}")
    _check(0 <= exponent_shift <= 31, f"exponent_shift must be in 0..31, got {exponent_shift}")
    _check(0 <= noise_shift <= MAX_NOISE_SHIFT, f"noise_shift must be in 0..{MAX_NOISE_SHIFT}, got {noise_shift}")
    return limit, exponent_shift, noise_shift


def _scaled_kernel(backend: str, op: str, noise_shift: int) -> Kernel:
    """The kernel of a cast; ``noise_shift`` is passed on only where it is not 0, which every backend serves."""
    if noise_shift == 0:
        return kernel(backend, op)
    return partial(kernel(backend, op, needs=NARROW_NOISE), noise_shift=noise_shift)


@op(mutates_args=("votes", "exponent_votes", "stats", "magnitudes", "control"))
def cast_scaled_votes(
    grad: Tensor,
    x: Tensor,
    scale: Tensor | None,
    packed: Tensor,
    votes: Tensor,
    exponent_votes: Tensor | None,
    stats: Tensor,
    magnitudes: Tensor,
    vote_scale: Tensor,
    vote_limits: Tensor,
    control: Tensor,
    out_features: int,
    in_features: int,
    group_size: int,
    vote_bits: int,
    backend: str,
) -> None:
    """Cast one micro-batch's scaled votes from ``grad [M, N]`` and ``x [M, K]``; counts it in ``control``."""
    _check(grad.shape == (x.shape[0], out_features), f"grad must be [M, N], got {tuple(grad.shape)}")
    shape = WeightShape(out_features, in_features, group_size, vote_bits)
    limit, exponent_shift, noise_shift = _limits(vote_limits)
    _scaled_kernel(backend, "cast_scaled_votes", noise_shift)(
        grad,
        x,
        scale,
        packed,
        votes,
        exponent_votes,
        stats,
        magnitudes,
        vote_scale,
        limit,
        exponent_shift,
        *hash_words(control),
        shape,
    )
    control[MICRO] += 1


@cast_scaled_votes.register_fake
def _(*_arguments: object) -> None:
    return None


@op(mutates_args=("votes", "exponent_votes", "stats", "magnitudes", "control"))
def cast_embedding_scaled_votes(
    ids: Tensor,
    grad: Tensor,
    scale: Tensor | None,
    packed: Tensor,
    votes: Tensor,
    exponent_votes: Tensor | None,
    stats: Tensor,
    magnitudes: Tensor,
    vote_scale: Tensor,
    vote_limits: Tensor,
    control: Tensor,
    out_features: int,
    in_features: int,
    group_size: int,
    vote_bits: int,
    backend: str,
) -> None:
    """Cast the scaled votes of looked-up rows: ``ids [M]``, ``grad [M, K]``; counts the micro-batch in ``control``."""
    shape = WeightShape(out_features, in_features, group_size, vote_bits)
    limit, exponent_shift, noise_shift = _limits(vote_limits)
    _scaled_kernel(backend, "embedding_scaled_votes", noise_shift)(
        ids,
        grad,
        scale,
        packed,
        votes,
        exponent_votes,
        stats,
        magnitudes,
        vote_scale,
        limit,
        exponent_shift,
        *hash_words(control),
        shape,
    )
    control[MICRO] += 1


@cast_embedding_scaled_votes.register_fake
def _(*_arguments: object) -> None:
    return None


# --- votes of a bias --------------------------------------------------------------------------------------------------


@op(mutates_args=("votes",))
def cast_bias_votes(grad: Tensor, votes: Tensor) -> None:
    """``votes = sat8(votes - sign(grad))`` for ``grad [N]``; NaN casts no vote."""
    s = torch.sign(grad.nan_to_num(0.0)).to(torch.int16)
    votes.copy_((votes.to(torch.int16) - s).clamp_(-128, 127))


@cast_bias_votes.register_fake
def _(grad: Tensor, votes: Tensor) -> None:
    return None
