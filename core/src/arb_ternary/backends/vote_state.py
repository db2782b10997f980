"""A ternary weight and its training state: one object for module, dispatch and kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from arb_ternary.backends.protocol import WeightShape
from arb_ternary.counters.hashing import hash_words, new_control

#: Exponents for which ``2**E`` is a normal float32.
EXPONENT_RANGE: Final = (-126, 127)


class VoteLimits(NamedTuple):
    """How scaled votes are clipped and rounded.

    Attributes:
        vote_limit: largest vote in 256ths, 1..32512; no vote is larger than a full accumulator.
        exponent_shift: right shift of the sum of the votes of a group, which makes the vote for its
            exponent, 0..31.
        noise_shift: number of powers of two by which the noise of rounding is narrower than a vote,
            0..16.
    """

    vote_limit: int = 256
    exponent_shift: int = 0
    noise_shift: int = 0

    def check(self) -> VoteLimits:
        """Return these limits.

        Raises:
            ValueError: one is outside its range.
        """
        ranges = {"vote_limit": (1, 127 * 256), "exponent_shift": (0, 31), "noise_shift": (0, 16)}
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} must be in {low}..{high}, got {value}")
        return self

    def largest_vote(self, *, shifts: bool) -> int:
        """Return the largest vote of one cast, by shifts or by factors.

        The limit and a noise just below 1 add up to the next float32.
        """
        if shifts:
            return -(-self.vote_limit // 256)
        return math.floor(self.vote_limit / 256 + 0.5 + 2.0 ** -(self.noise_shift + 1))


class VoteState(NamedTuple):
    """A ternary weight and its training state.

    It is a tuple, so that an op of torch takes its fields as arguments: ``ops.cast_votes(grad, x,
    scale, *state)``. The tensors are those of the module. A kernel changes those that its docstring
    names in place, and no others.

    Attributes:
        weight: uint8, the trits in the layout of ``backend``.
        exponent: int8 ``[N, J]``.
        origin: int8, broadcastable to ``[N, J]``: the initial exponents.
        votes: the accumulators, in the layout of ``backend``.
        exponent_votes: int8 ``[N, J]``; None if the exponents do not learn by residual votes.
        stats: float32 ``[1 + N + K]``: count of NaN gradients, row and column sums of squares of
            the gradient.
        control: int64 ``[4]``, see :mod:`arb_ternary.counters.hashing`; always on the host.
        limits: int64 ``[3]``, the fields of :class:`VoteLimits`; always on the host. It is a
            tensor, so that a schedule does not recompile a graph.
        magnitudes: float32 ``[N + K]``: row and column sums of ``|gradient|``; None under sign
            votes.
        vote_scale: ``[N + K]``, rows then columns, by which gradients become votes: float32
            factors, or int32 right shifts; None under sign votes.
        correlation: int16 ``[N, J]``: sums of scores; None unless the exponents of an embedding
            learn by correlation.
        steps: int32 ``[N, J]``: number of updates that ``correlation`` sums.
        sizes: ``N``, ``K``, ``G`` and the bits of an accumulator.
        backend: name of the backend that owns the layout.
        sums: int16 ``[N, K]``, to which the votes of a cast are added instead of to the
            accumulators; None to add them to the accumulators. Ops handle it, kernels ignore it.
        exponent_sums: int32 ``[N, J]``, the same for exponents; None also if they do not learn.
        first_row: index of the first row in the whole weight, if the state is that of some of its
            rows: hashes use the indices of the whole weight.
        transform: ``module:function`` that changes the arguments of the cast of a linear,
            ``(grad, x, scale, state) -> (grad, x, scale, state)``; None to cast the votes of the
            gradient itself.
    """

    weight: Tensor
    exponent: Tensor
    origin: Tensor
    votes: Tensor
    exponent_votes: Tensor | None
    stats: Tensor
    control: Tensor
    limits: Tensor
    magnitudes: Tensor | None
    vote_scale: Tensor | None
    correlation: Tensor | None
    steps: Tensor | None
    sizes: Sequence[int]
    backend: str
    sums: Tensor | None = None
    exponent_sums: Tensor | None = None
    first_row: int = 0
    transform: str | None = None

    @property
    def shape(self) -> WeightShape:
        """The logical shape of the weight."""
        return weight_shape(*self.sizes)

    @property
    def learned(self) -> Tensor:
        """``exponent_votes`` of a state whose exponents learn by them; ValueError for others."""
        if self.exponent_votes is None:
            raise ValueError("the exponents of this state do not learn by votes")
        return self.exponent_votes

    @property
    def scaling(self) -> tuple[Tensor, Tensor]:
        """``magnitudes`` and ``vote_scale`` of a state of scaled votes; ValueError for others."""
        if self.magnitudes is None or self.vote_scale is None:
            raise ValueError("this state casts sign votes: it has no magnitudes and no vote_scale")
        return self.magnitudes, self.vote_scale

    def check_scaling(self, integer: bool) -> VoteLimits:
        """Return the limits by which a gradient becomes scaled votes.

        Args:
            integer: whether the gradient is exact: of int8 operands and a scale.

        Raises:
            ValueError: a limit is outside its range, or the gradient or the limits do not fit votes
                by shifts.
        """
        limits = VoteLimits(*self.limits.tolist()).check()
        if self.scaling[1].dtype == torch.int32:
            if not integer:
                raise ValueError(
                    "votes by shifts (an int32 vote_scale) need an int8 gradient and its scale"
                )
            if limits.noise_shift:
                raise ValueError(
                    "votes by shifts (an int32 vote_scale) are rounded with all noise: noise_shift "
                    "0"
                )
        return limits

    def draw(self) -> tuple[int, int, int]:
        """Return ``seed, step, stream`` of the counter hash; a use is added to ``stream``."""
        return hash_words(self.control)


@cache
def weight_shape(*sizes: int) -> WeightShape:
    """Return the shape of these sizes.

    It is cached, because every call of an op needs one, and making one costs more than a look-up.
    """
    return WeightShape(*sizes)


def new_state(
    shape: WeightShape,
    weight: Tensor,
    exponent: Tensor,
    votes: Tensor,
    backend: str,
    **others: Tensor | None,
) -> VoteState:
    """Return the state of a weight that has cast no votes, on the device of ``weight``.

    ``others`` are further fields, which replace the initial values.
    """
    device = weight.device
    made = VoteState(
        weight=weight,
        exponent=exponent,
        origin=exponent.clone(),
        votes=votes,
        exponent_votes=torch.zeros_like(exponent),
        stats=torch.zeros(1 + shape.out_features + shape.in_features, device=device),
        control=new_control(),
        limits=torch.tensor(VoteLimits()),
        magnitudes=None,
        vote_scale=None,
        correlation=None,
        steps=None,
        sizes=(shape.out_features, shape.in_features, shape.group_size, shape.vote_bits),
        backend=backend,
    )
    return made._replace(**others)  # type: ignore[arg-type]
