"""Micro-batches that grow over a phase: the next 2, 4, ... batches of the data joined into one.

With the shares ``d`` of ``batch_doublings`` and ``n`` steps, step ``t`` (from 0) has ``2**k``
batches, where ``k`` is the number of ``d`` with ``floor(d * n) <= t``. The data are read in the
same order as in batches of one size. The position of the phase in the data is its position in those
batches, so nothing else needs to be stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from arb_ternary.protocols.data import Batch, Batches


def joined_at(doublings: Sequence[float], step: int, steps: int) -> int:
    """Return the number of batches in a micro-batch of step ``step`` (from 0) of ``steps``."""
    return int(2 ** sum(math.floor(share * steps) <= step for share in doublings))


def batches_in(doublings: Sequence[float], steps: int) -> int:
    """Return the number of batches in ``steps`` steps of one micro-batch each."""
    starts = [0, *sorted(math.floor(share * steps) for share in doublings), steps]
    return sum((end - start) << power for power, (start, end) in enumerate(pairwise(starts)))


def tokens_in(options: Any, steps: int) -> int:
    """Return the predictions that ``steps`` steps train on, by the ``LoopOptions`` of a phase."""
    doublings = getattr(options, "batch_doublings", None) or ()
    batches = batches_in(doublings, steps) * options.gradient_accumulation_steps
    return int(batches * options.batch_size * options.block_size)


class GrowingBatches:
    """``Batches`` that join several batches of another object, in their order.

    Args:
        batches: the batches to join; their samples have one shape.
        joined: returns the number of batches in the next one, at least 1.
    """

    def __init__(self, batches: Batches, joined: Callable[[], int]) -> None:
        self._batches = batches
        self._joined = joined

    @property
    def continues(self) -> bool:
        """See ``Batches``."""
        return self._batches.continues

    def __next__(self) -> Batch:
        """See ``Batches``."""
        parts = [next(self._batches) for _ in range(self._joined())]
        if len(parts) == 1:
            return parts[0]
        extras = {}
        for name in parts[0].extras:
            extras[name] = _concatenate([part.extras[name] for part in parts])
        return Batch(
            _concatenate([part.data for part in parts]),
            _concatenate([part.sample_ids for part in parts]),
            extras,
        )

    def state_dict(self) -> dict[str, Any]:
        """See ``Batches``."""
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Batches``."""
        self._batches.load_state_dict(state)

    def close(self) -> None:
        """See ``Batches``."""
        self._batches.close()


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Return the concatenated parts, in page-locked memory if they are."""
    joined = torch.cat([*parts])
    return joined.pin_memory() if parts[0].is_pinned() else joined
