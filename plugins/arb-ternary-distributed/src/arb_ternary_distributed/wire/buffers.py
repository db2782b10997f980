"""Buffers of a message with votes: sums of some rows, as digits of the smallest base that fits.

The size of a buffer follows from its shape, from the largest vote of a cast and from how often its
sender has cast. A receiver that knows these knows where each buffer lies in a message.
"""

from __future__ import annotations

from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.ternary.module import TernaryModule
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
        backend: of the module.
        values: int16 or int32 ``[n]``.
        base: of the digits.
    """

    backend: str
    values: Tensor
    base: int

    @property
    def size(self) -> int:
        """Bytes on the wire."""
        if self.base == _WIDE:
            return self.values.nbytes
        return bytes_for(self.values.numel(), self.base)

    def pack(self) -> Tensor:
        """Return the values as they travel, uint8."""
        if self.base == _WIDE:
            return self.values.view(torch.uint8)
        values = self.values.to(torch.int16)
        pack = wire_kernel(self.backend, "distributed.digits_to_bytes")
        packed: Tensor = pack(values, self.base)
        return packed

    def add_(self, received: Tensor) -> None:
        """Add received bytes of this size to the values."""
        if self.base == _WIDE:
            self.values.add_(received.clone().view(torch.int32))
        else:
            wire_kernel(self.backend, "distributed.add_digits_")(self.values, received, self.base)


def vote_buffers(
    module: TernaryModule,
    votes: Tensor,
    exponent_votes: Tensor | None,
    bias: Tensor | None,
    casts: int,
) -> list[VoteBuffer]:
    """Return the buffers for some rows of a module; none if its sender has not cast.

    Args:
        module: whose votes.
        votes: int16 ``[n, K]``.
        exponent_votes: int32 ``[n, J]``; None if the exponents do not learn.
        bias: int16 ``[n]``; None if there is no bias.
        casts: how often the sender has cast since it last sent votes of the module.
    """
    if not casts:
        return []
    backend = module.backend
    found = [VoteBuffer(backend, votes.view(-1), base_for(module.largest_vote * casts))]
    if exponent_votes is not None:
        most = _EXPONENT_VOTE * casts
        base = base_for(most) if most <= RAW // 2 else _WIDE
        found.append(VoteBuffer(backend, exponent_votes.view(-1), base))
    if bias is not None:
        found.append(VoteBuffer(backend, bias, base_for(_BIAS_VOTE * casts)))
    return found
