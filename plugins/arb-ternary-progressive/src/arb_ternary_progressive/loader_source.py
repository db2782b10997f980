"""A dataloader as the data of a run: epoch after epoch, resumable in the middle of one.

Nothing is required of the dataloader but that it can be iterated, and that it then gives the same
batches in the same order as the first time that it was iterated in the same epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from arb_ternary.errors import DataError, UsageProblem
from arb_ternary.protocols.data import Batch, BatchRequest
from arb_ternary_progressive.samples import as_batch
from arb_ternary_train.seeding import derive_seed


class LoaderBatches:
    """The ``Batches`` of a dataloader, epoch after epoch.

    Torch's global generator is seeded before each epoch, so that a dataloader that shuffles with it
    repeats its order.
    """

    continues = False

    def __init__(self, base: Iterable[Any], seed: int) -> None:
        self._base = base
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> LoaderBatches:
        return self

    def __next__(self) -> Batch:
        if self._batches is not None:
            for raw in self._batches:
                self._position += 1
                return as_batch(raw)
            check_not_empty(self._base, self._epoch, self._position)
            self._epoch += 1
            self._position = 0
        self._batches = self._start()
        return next(self)

    def _start(self) -> Iterator[Any]:
        """Return the batches of the epoch that are left."""
        before = torch.random.get_rng_state()
        torch.manual_seed(derive_seed(self._seed, "epoch", self._epoch))
        batches = iter(self._base)
        for _ in range(self._position):
            next(batches, None)
        if self._position:
            # Resumed in the middle of an epoch: the loop has restored the generator already.
            torch.random.set_rng_state(before)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and the number of batches of it that were given."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``."""
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._batches = None

    def close(self) -> None:
        """Drop the iterator of the current epoch."""
        self._batches = iter(())


class LoaderSource:
    """The ``DataSource`` of a dataloader, which decides the batch size and has no held-out samples.

    Args:
        base: the dataloader.
        vocabulary_size: number of token ids.
    """

    name = "dataloader"

    def __init__(self, base: Iterable[Any], vocabulary_size: int) -> None:
        self.base = base
        self.vocabulary_size = vocabulary_size

    def batches(self, request: BatchRequest) -> LoaderBatches:
        """Return the batches of the dataloader; only the seed of ``request`` is used."""
        return LoaderBatches(self.base, request.seed)

    def fingerprint(self) -> str:
        """Return the name of the class; nothing else is known before an epoch."""
        return type(self.base).__name__

    def samples_per_epoch(self, block_size: int) -> int:
        """Raise UsageProblem: a dataloader counts batches; see :func:`batches_per_epoch`."""
        raise UsageProblem(
            "dataloader: the number of its samples is not known", "Count its batches."
        )

    def held_out(self, batch_size: int, block_size: int, limit: int | None) -> Iterator[Batch]:
        """Raise UsageProblem: there are none."""
        raise UsageProblem("dataloader: it has no held-out samples")


def batches_per_epoch(base: Iterable[Any]) -> int:
    """Return the number of batches of a dataloader.

    A dataloader without a length is iterated once to count them.

    Raises:
        UsageProblem: it can be iterated only once.
        DataError: there is not a single batch.
    """
    try:
        count = len(base)  # type: ignore[arg-type]
    except TypeError:
        if isinstance(base, Iterator):
            raise UsageProblem(
                "dataloader: it is an iterator, so the steps of an epoch cannot be counted",
                f"Set training.steps_per_stack. {_iterator_hint(base)}",
            ) from None
        count = sum(1 for _ in base)
    check_not_empty(base, 0, count)
    return count


def check_not_empty(base: Iterable[Any], epoch: int, batches: int) -> None:
    """Raise DataError if an epoch of a dataloader had no batch."""
    if not batches:
        raise DataError(
            f"dataloader: {type(base).__name__} gives no batch in epoch {epoch}",
            _iterator_hint(base),
        )


def _iterator_hint(base: Iterable[Any]) -> str:
    if not isinstance(base, Iterator):
        return ""
    return (
        "An iterator can be iterated only once; give the object that makes it: a list, a torch "
        "DataLoader, ..."
    )
