"""Votes of three levels: the value of a step's sum of votes in quanta.

A vote is -1, 0 or 1 in a *unit* that is as large as the clip, so a micro-batch's votes take 1.6
bits per weight to send and 2 to hold, whatever the rate. Sums of a step are whole numbers, exact in
any order. The owner of a row turns its sums into quanta once, in fixed point::

    q[n, k] = (sum[n, k] * round(unit * 2**24) + (h >> 8)) >> 24

with ``h`` the counter hash of ``n * K + k``, the index in the whole table, in a stream of its own
and without the index of a micro-batch: the same with one process or many, and on every backend. The
mean of ``q`` is ``sum * unit``.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary.backends.protocol import KernelBackend
from arb_ternary.counters.hashing import HASH_USES, MICRO_BITS, SEED, STEP, STREAM, counter_hash

#: Use of the counter hash, besides those of core's kernels.
USE_VOTE_SUM: Final = 6
#: Quanta beyond which a unit is the same as a full accumulator.
LARGEST_UNIT: Final = 127.0

#: The op that a backend may have for :func:`sums_to_quanta`.
SUMS_TO_QUANTA: Final = "votes.sums_to_quanta"

_FRACTION_BITS: Final = 24
_MASK: Final = (1 << _FRACTION_BITS) - 1
#: Largest sum whose ``sum * fraction + noise`` fits 32 bits: 128 * (2**24 - 1) < 2**31.
_SMALL: Final = 127
#: Elements whose intermediates are held at a time.
_HELD: Final = 1 << 16


def in_quanta(
    sums: Tensor,
    unit: float,
    control: Tensor,
    first_row: int = 0,
    backend: KernelBackend | None = None,
) -> Tensor:
    """Return ``sums * unit`` in whole quanta, rounded stochastically; see the module's docstring.

    Args:
        sums: integer ``[n, width]``, some rows of a table of this width; sizes up to 2**31.
        unit: quanta that a vote is worth, 0 to :data:`LARGEST_UNIT`.
        control: control words of the module; seed, step and stream are used.
        first_row: the row of the table that ``sums`` begins at.
        backend: the backend whose kernel computes it, if it has one; the bits are the same.

    Returns:
        int32 ``[n, width]``, clamped to the range of int32.
    """
    factor = round(unit * (1 << _FRACTION_BITS))
    whole = factor >> _FRACTION_BITS
    fraction = factor & _MASK
    words = control.tolist()
    step = words[STEP] << MICRO_BITS
    stream = words[STREAM] * HASH_USES + USE_VOTE_SUM
    flat = sums.reshape(-1)
    start = first_row * sums.shape[1]

    own_kernel = None if backend is None else backend.kernels.get(SUMS_TO_QUANTA)
    if own_kernel is not None:
        computed = own_kernel(sums, whole, fraction, (words[SEED], step, stream), start)
        assert isinstance(computed, Tensor)
        return computed

    quanta = torch.empty(flat.shape, dtype=torch.int32, device=sums.device)
    for at in range(0, flat.numel(), _HELD):
        some = flat[at : at + _HELD]
        wide = some.to(torch.int32 if _small(some) else torch.int64)
        bits = counter_hash(
            some.numel(), words[SEED], step, stream, start=start + at, device=sums.device
        )
        rounded = bits.bitwise_right_shift_(32 - _FRACTION_BITS).bitwise_and_(_MASK)
        rounded = torch.add(wide * fraction, rounded).bitwise_right_shift_(_FRACTION_BITS)
        quanta[at : at + _HELD] = rounded.add_(wide, alpha=whole).clamp_(-(2**31), 2**31 - 1)
    return quanta.view(sums.shape)


def _small(sums: Tensor) -> bool:
    """Return whether products of ``sums`` with a fraction fit 32 bits.

    It is looked up on a CPU only: elsewhere reading the sums would cost a synchronisation.
    """
    if sums.device.type != "cpu":
        return False
    least, largest = torch.stack(sums.aminmax()).tolist()
    return bool(max(abs(least), abs(largest)) <= _SMALL)
