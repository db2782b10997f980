"""Passes over a dataloader, which a training can leave in the middle of one and come back to.

Nothing is asked of the dataloader but that it can be passed over, and that it then gives the same
batches in the same order as the first time that it was passed over in the same epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from arb_ternary.errors import DataError, UsageProblem
from arb_ternary.protocols.data import Batch, BatchRequest
from arb_ternary_progressive.samples import as_samples
from arb_ternary_train.seeding import derive_seed


class Passes:
    """Passes over ``base``, one an epoch.

    Attributes:
        epoch: the pass that was begun last, from 0.
        position: batches of it that were given.
    """

    def __init__(self, base: Iterable[Any]) -> None:
        self.base = base
        self.epoch = self.position = 0
        self.resumed = False

    @property
    def next_epoch(self) -> int:
        """The epoch of the next pass: the one to be gone on with after :meth:`load_state_dict`,
        else a new one.
        """
        return self.epoch + int(not self.resumed and self.position > 0)

    def start(self) -> Iterator[Any]:
        """The batches of the next pass; after :meth:`load_state_dict`, those that are left of it.

        Raises:
            DataError: there is not one batch.
        """
        self.epoch = self.next_epoch
        self.position = self.position if self.resumed else 0
        self.resumed = False
        batches = iter(self.base)
        for _ in range(self.position):
            next(batches, None)
        return self._left(batches)

    def _left(self, batches: Iterator[Any]) -> Iterator[Any]:
        for raw in batches:
            self.position += 1
            yield raw
        if not self.position:
            raise DataError(
                f"dataloader: {type(self.base).__name__} gives no batch in epoch {self.epoch}",
                _once(self.base),
            )

    def state_dict(self) -> dict[str, int]:
        """Where the next batch is: the epoch, and the number of batches of it that were given."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next pass goes on where ``state`` was taken."""
        self.epoch = int(state["epoch"])
        self.position = int(state["position"])
        self.resumed = True


class LoaderBatches:
    """The ``Batches`` of a dataloader: pass after pass.

    Before each pass torch's global generator is seeded, so that a dataloader that shuffles by it
    repeats its order.
    """

    continues = False

    def __init__(self, base: Iterable[Any], seed: int) -> None:
        self._passes = Passes(base)
        self._seed = seed
        self._batches: Iterator[Any] = iter(())

    def __iter__(self) -> LoaderBatches:
        return self

    def __next__(self) -> Batch:
        for raw in self._batches:
            return as_samples(raw).batch()
        before = torch.random.get_rng_state()
        torch.manual_seed(derive_seed(self._seed, "epoch", self._passes.next_epoch))
        self._batches = self._passes.start()
        if self._passes.position:
            # Resumed in the middle of a pass: the generator was where the loop has put it back to.
            torch.random.set_rng_state(before)
        return next(self)

    def state_dict(self) -> dict[str, Any]:
        """See ``Batches``."""
        return self._passes.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Batches``."""
        self._passes.load_state_dict(state)
        self._batches = iter(())

    def close(self) -> None:
        """Let go of the pass."""
        self._batches = iter(())


class LoaderSource:
    """The ``DataSource`` of a dataloader. It has batches of its own size, and no held-out samples.

    Args:
        base: the dataloader.
        vocabulary_size: number of token ids.
    """

    name = "dataloader"

    def __init__(self, base: Iterable[Any], vocabulary_size: int) -> None:
        self.base = base
        self.vocabulary_size = vocabulary_size

    def batches(self, request: BatchRequest) -> LoaderBatches:
        """Its batches as they come; of the request only the seed counts."""
        return LoaderBatches(self.base, request.seed)

    def fingerprint(self) -> str:
        """Of everything that can be known before a pass."""
        return type(self.base).__name__

    def samples_per_epoch(self, block_size: int) -> int:
        """A dataloader counts batches; see :func:`batches_in_a_pass`."""
        raise UsageProblem(
            "dataloader: the number of its samples is not known", "Count its batches."
        )

    def held_out(self, batch_size: int, block_size: int, limit: int | None) -> Iterator[Batch]:
        """There are none."""
        raise UsageProblem("dataloader: it has no held-out samples")


def batches_in_a_pass(base: Iterable[Any]) -> int:
    """Batches of one pass over a dataloader; one that does not know its length is passed over to
    count them.

    Raises:
        UsageProblem: it can be passed over only once.
        DataError: there is not one batch.
    """
    try:
        count = len(base)  # type: ignore[arg-type]
    except TypeError:
        if isinstance(base, Iterator):
            raise UsageProblem(
                "dataloader: it is an iterator, so that the steps of an epoch cannot be counted",
                f"Set training.steps_per_stack. {_once(base)}",
            ) from None
        count = sum(1 for _ in base)
    if not count:
        raise DataError(f"dataloader: {type(base).__name__} gives no batch in epoch 0")
    return count


def _once(base: Iterable[Any]) -> str:
    if not isinstance(base, Iterator):
        return ""
    return (
        "An iterator can be passed over once only; give what makes it: a list, a torch "
        "DataLoader, ..."
    )
