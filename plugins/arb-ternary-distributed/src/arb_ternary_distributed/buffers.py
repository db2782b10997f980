"""What a message with votes is made of: pieces of sums, each as the digits of the smallest base
that holds them.

How large a piece is follows from its shape, from the largest vote of a cast and from how often its
sender has cast, so that a receiver that knows these knows where in a message a piece lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary_distributed.digits import RAW, base_for, bytes_for
from arb_ternary_distributed.wire import wire_kernel

#: In place of a base, for sums that 16 bits do not hold: int32 as it is.
_WIDE: Final = 0
#: Largest vote that one cast has for an exponent, and for a bias.
_EXPONENT_VOTE: Final = 127
_BIAS_VOTE: Final = 1


@frozen(eq=False)
class Parcel:
    """A piece of sums, flat, as its sender packs it or its receiver adds to it.

    Attributes:
        values: int16 or int32 ``[n]``.
        base: of its digits.
    """

    values: Tensor
    base: int

    @property
    def size(self) -> int:
        """Bytes on the wire."""
        return (
            self.values.nbytes if self.base == _WIDE else bytes_for(self.values.numel(), self.base)
        )

    def packed(self, backend: str) -> Tensor:
        """The values as they travel, uint8."""
        if self.base == _WIDE:
            return self.values.view(torch.uint8)
        packed: Tensor = wire_kernel(backend, "distributed.digits_to_bytes")(
            self.values.to(torch.int16), self.base
        )
        return packed

    def add_(self, backend: str, received: Tensor) -> None:
        """Add what came, of this size, to the values."""
        if self.base == _WIDE:
            self.values.add_(received.clone().view(torch.int32))
        else:
            wire_kernel(backend, "distributed.add_digits_")(self.values, received, self.base)


def vote_parcels(
    votes: Tensor, exponent_votes: Tensor | None, casts: int, largest: int
) -> Iterator[Parcel]:
    """Those of some rows of a module that has cast so often since it was sent last; none without
    casts.

    Args:
        votes: int16 ``[n, K]``.
        exponent_votes: int32 ``[n, J]``; None where the exponents do not learn.
        casts: of the sender.
        largest: vote of a cast.
    """
    if not casts:
        return
    yield Parcel(votes.view(-1), base_for(largest * casts))
    if exponent_votes is not None:
        most = _EXPONENT_VOTE * casts
        yield Parcel(exponent_votes.view(-1), base_for(most) if most <= RAW // 2 else _WIDE)


def bias_parcel(bias: Tensor | None, casts: int) -> Iterator[Parcel]:
    """That of the sums of a bias, int16 ``[n]``, if there is one and its sender has cast."""
    if bias is not None and casts:
        yield Parcel(bias, base_for(_BIAS_VOTE * casts))
