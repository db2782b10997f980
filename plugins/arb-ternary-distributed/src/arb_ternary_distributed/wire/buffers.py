"""Buffers of a message with votes: sums of some rows, as digits of the smallest base that fits.

The size of a buffer follows from its shape, from the largest vote of a cast and from how often its
sender has cast. A receiver that knows these knows where each buffer lies in a message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary_distributed.wire.digits import RAW, base_for, bytes_for
from arb_ternary_distributed.wire.kernels import wire_kernel

#: Stands for a base where sums do not fit 16 bits: int32 as it is.
_WIDE: Final = 0
#: Largest vote of one cast for an exponent, and for a bias.
_EXPONENT_VOTE: Final = 127
_BIAS_VOTE: Final = 1


@frozen(eq=False)
class VoteBuffer:
    """Some sums of votes, flat, which a sender packs or to which a receiver adds.

    Attributes:
        values: int16 or int32 ``[n]``.
        base: of the digits.
    """

    values: Tensor
    base: int

    @property
    def size(self) -> int:
        """Bytes on the wire."""
        if self.base == _WIDE:
            return self.values.nbytes
        return bytes_for(self.values.numel(), self.base)

    def pack(self, backend: str) -> Tensor:
        """Return the values as they travel, uint8."""
        if self.base == _WIDE:
            return self.values.view(torch.uint8)
        values = self.values.to(torch.int16)
        packed: Tensor = wire_kernel(backend, "distributed.digits_to_bytes")(values, self.base)
        return packed

    def add_(self, backend: str, received: Tensor) -> None:
        """Add received bytes of this size to the values."""
        if self.base == _WIDE:
            self.values.add_(received.clone().view(torch.int32))
        else:
            wire_kernel(backend, "distributed.add_digits_")(self.values, received, self.base)


def vote_buffers(
    votes: Tensor,
    exponent_votes: Tensor | None,
    casts: int,
    largest: int,
) -> Iterator[VoteBuffer]:
    """Yield the buffers for some rows of a module; none if its sender has not cast.

    Args:
        votes: int16 ``[n, K]``.
        exponent_votes: int32 ``[n, J]``; None if the exponents do not learn.
        casts: how often the sender has cast since it last sent votes of the module.
        largest: largest vote of a cast.
    """
    if not casts:
        return
    yield VoteBuffer(votes.view(-1), base_for(largest * casts))
    if exponent_votes is not None:
        most = _EXPONENT_VOTE * casts
        base = base_for(most) if most <= RAW // 2 else _WIDE
        yield VoteBuffer(exponent_votes.view(-1), base)


def bias_buffer(bias: Tensor, casts: int) -> Iterator[VoteBuffer]:
    """Yield the buffer for a bias, int16 ``[n]``; none if its sender has not cast."""
    if casts:
        yield VoteBuffer(bias, base_for(_BIAS_VOTE * casts))
