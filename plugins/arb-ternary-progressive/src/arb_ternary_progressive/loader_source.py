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
from arb_ternary_progressive.samples import as_samples
from arb_ternary_train.seeding import derive_seed


class Epochs:
    """Iterates over ``base``, once per epoch.

    Attributes:
        epoch: the epoch that was begun last, from 0.
        position: batches of it that were given.
    """

    def __init__(self, base: Iterable[Any]) -> None:
        self.base = base
        self.epoch = 0
        self.position = 0
        self._resumed = False

    @property
    def next_epoch(self) -> int:
        """The epoch that :meth:`start` begins, or continues after :meth:`load_state_dict`."""
        begins_new = self.position > 0 and not self._resumed
        return self.epoch + int(begins_new)

    def start(self) -> Iterator[Any]:
        """Return the batches of the next epoch, or the rest of it after :meth:`load_state_dict`.

        Raises:
            DataError: there is not a single batch.
        """
        self.epoch = self.next_epoch
        if not self._resumed:
            self.position = 0
        self._resumed = False
        batches = iter(self.base)
        for _ in range(self.position):
            next(batches, None)
        return self._rest(batches)

    def _rest(self, batches: Iterator[Any]) -> Iterator[Any]:
        for raw in batches:
            self.position += 1
            yield raw
        if not self.position:
            raise DataError(
                f"dataloader: {type(self.base).__name__} gives no batch in epoch {self.epoch}",
                _iterator_hint(self.base),
            )

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and the number of batches of it that were given."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next :meth:`start` continue from ``state``."""
        self.epoch = int(state["epoch"])
        self.position = int(state["position"])
        self._resumed = True


class LoaderBatches:
    """The ``Batches`` of a dataloader, epoch after epoch.

    Torch's global generator is seeded before each epoch, so that a dataloader that shuffles with it
    repeats its order.
    """

    continues = False

    def __init__(self, base: Iterable[Any], seed: int) -> None:
        self._epochs = Epochs(base)
        self._seed = seed
        self._batches: Iterator[Any] = iter(())

    def __iter__(self) -> LoaderBatches:
        return self

    def __next__(self) -> Batch:
        for raw in self._batches:
            return as_samples(raw).batch()
        before = torch.random.get_rng_state()
        torch.manual_seed(derive_seed(self._seed, "epoch", self._epochs.next_epoch))
        self._batches = self._epochs.start()
        if self._epochs.position:
            # Resumed in the middle of an epoch: the loop has restored the generator already.
            torch.random.set_rng_state(before)
        return next(self)

    def state_dict(self) -> dict[str, Any]:
        """See ``Batches``."""
        return self._epochs.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Batches``."""
        self._epochs.load_state_dict(state)
        self._batches = iter(())

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
    if not count:
        raise DataError(f"dataloader: {type(base).__name__} gives no batch in epoch 0")
    return count


def _iterator_hint(base: Iterable[Any]) -> str:
    if not isinstance(base, Iterator):
        return ""
    return (
        "An iterator can be iterated only once; give the object that makes it: a list, a torch "
        "DataLoader, ..."
    )
