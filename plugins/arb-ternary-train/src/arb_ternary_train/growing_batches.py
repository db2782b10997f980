"""Micro-batches that grow over a phase: the next 2, 4, ... batches of the data, joined to one.

With the shares ``d`` of ``batch_doublings`` and ``n`` steps, step ``t`` (from 0) has ``2**k``
batches, ``k`` the number of ``d`` with ``floor(d * n) <= t``. The data are read in the order in
which batches of one size would read them, and where the phase is in them is the place in those
batches, so that nothing is to be stored beside it.
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
    """Batches that a micro-batch of step ``step`` (from 0) of ``steps`` is made of."""
    return int(2 ** sum(math.floor(share * steps) <= step for share in doublings))


def batches_in(doublings: Sequence[float], steps: int) -> int:
    """Batches that ``steps`` steps of one micro-batch are made of."""
    starts = [0, *sorted(math.floor(share * steps) for share in doublings), steps]
    return sum((end - start) << power for power, (start, end) in enumerate(pairwise(starts)))


def tokens_in(options: Any, steps: int) -> int:
    """Predictions that ``steps`` steps train on, by a phase's options of a training loop
    (``LoopOptions``).
    """
    batches = (
        batches_in(getattr(options, "batch_doublings", None) or (), steps)
        * options.gradient_accumulation_steps
    )
    return int(batches * options.batch_size * options.block_size)


class GrowingBatches:
    """``Batches`` of which each is several of another, in their order.

    Args:
        batches: those that are joined; their samples have one shape.
        joined: tells how many of them the next batch is made of, at least 1.
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
        extras = {
            name: _together([part.extras[name] for part in parts]) for name in parts[0].extras
        }
        return Batch(
            _together([part.data for part in parts]),
            _together([part.sample_ids for part in parts]),
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


def _together(parts: Sequence[Tensor]) -> Tensor:
    """The parts in a row, in page-locked memory where they are."""
    joined = torch.cat([*parts])
    return joined.pin_memory() if parts[0].is_pinned() else joined
