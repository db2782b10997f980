"""The samples of a batch as a pure function of a seed and a cursor.

A stream of ``L`` tokens is cut once into ``(L - 1) // S`` windows. Window ``i`` starts at token
``i * S`` and reads ``S + 1`` tokens, so that neighbouring windows share one token and every
prediction is made exactly once per epoch. The cut never moves: the index of a window identifies the
sample in every epoch and in both orders, and caches and masks may use it as a key. Tokens after the
last whole window are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from arb_ternary.errors import DataError

Order = Literal["random", "sequential"]

_MASK: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15


def window_count(stream_length: int, block_size: int, name: str = "the token stream") -> int:
    """Return the number of windows of ``block_size + 1`` tokens, each sharing one with the next.

    Raises:
        DataError: not even one window fits; ``name`` says which stream.
    """
    windows = (stream_length - 1) // block_size
    if windows < 1:
        remedy = "Use a longer text."
        if stream_length > 1:
            remedy = f"Lower the block size to at most {stream_length - 1}, or use a longer text."
        raise DataError(
            f"{name}: {stream_length} tokens are too few for a block of {block_size}: "
            f"{block_size + 1} are needed",
            remedy,
        )
    return windows


def permutation(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return a permutation of ``range(size)`` that depends on ``(size, seed, epoch)`` only.

    It is the order of the splitmix64 sequence (Steele, Lea and Flood 2014) that starts at a hash of
    seed and epoch. It is written out here because numpy may change its streams between versions,
    and a resumed run must see the order that it left. Equal 64-bit keys keep the order of the
    index.
    """
    start = _mix((_mix(seed & _MASK) + epoch) & _MASK)
    keys = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GAMMA) + np.uint64(start)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(keys ^ (keys >> np.uint64(31)), kind="stable").astype(np.int64, copy=False)


def _mix(value: int) -> int:
    """Make one step of splitmix64 on a Python integer."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Sampler:
    """The indices of the samples in each batch, with a resumable cursor.

    ``order="random"``: epochs follow each other without a gap, each a permutation of all samples. A
    batch may take its first rows from one epoch and its last from the next, so that no sample is
    dropped, even if the batch is larger than an epoch. ``order="sequential"``: row ``b`` reads its
    own contiguous ``1/B`` of the samples, so that state carried from batch to batch continues the
    same text. Up to ``B - 1`` samples at the end are not used.

    Args:
        samples: number of samples.
        batch_size: ``B``, samples per batch.
        seed: chooses the permutations of the random order; the sequential order does not depend on
            it.
        order: ``random`` or ``sequential``.
        name: name of the samples in error messages.

    Attributes:
        cursor: number of the next batch. ``state_dict`` is this number and the fields that decide
            what it counts.

    Raises:
        DataError: there are too few samples.
    """

    #: Name of the class in error messages.
    _kind = "a sampler"

    def __init__(
        self,
        samples: int,
        batch_size: int,
        seed: int = 0,
        order: Order = "random",
        name: str = "the samples",
    ) -> None:
        self.samples = samples
        self.batch_size = batch_size
        self.seed = seed
        self.order: Order = order
        self.name = name
        self.cursor = 0
        # A batch between two epochs needs the orders of both.
        self._permutation = lru_cache(maxsize=2)(permutation)
        self._require_enough()

    def batch(self, cursor: int) -> NDArray[np.int64]:
        """Return the sample indices of batch number ``cursor``, int64 ``[B]``.

        They do not depend on ``self.cursor``.
        """
        rows_B = np.arange(self.batch_size, dtype=np.int64)
        if self.order == "sequential":
            return rows_B * self.batches_per_epoch + cursor % self.batches_per_epoch
        first = cursor * self.batch_size
        epoch, offset = divmod(first, self.samples)
        parts = []
        wanted = self.batch_size
        while wanted:
            order = self._permutation(self.samples, self.seed, epoch)
            part = order[offset : offset + wanted]
            parts.append(part)
            wanted -= len(part)
            epoch += 1
            offset = 0
        return np.concatenate(parts)

    @property
    def batches_per_epoch(self) -> int:
        """Number of whole batches in one pass over the samples; 0 if a batch is larger."""
        return self.samples // self.batch_size

    def continues(self, cursor: int) -> bool:
        """Return whether each row of batch ``cursor`` continues the same row of the batch before.

        If it does not, state carried from the batch before must be cleared: always in random order,
        and at the start of every epoch in sequential order.
        """
        return self.order == "sequential" and cursor % self.batches_per_epoch != 0

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor and what it counts, as plain numbers and strings."""
        return {"cursor": self.cursor, **self._settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the cursor of ``state``.

        Raises:
            DataError: the state is of a sampler with another seed, batch size, order or other
                samples. All fields that differ are named, and the sampler is left as it was.
        """
        settings = self._settings()
        other_fields = sorted({"cursor", *settings} ^ set(state))
        if other_fields:
            raise DataError(
                f"sampler state: the fields differ from those of {self._kind}: "
                f"{', '.join(other_fields)}"
            )
        different = [
            f"{key} was {state[key]!r} and is {now!r}"
            for key, now in settings.items()
            if state[key] != now
        ]
        if different:
            raise DataError(
                f"sampler state: {self.name} cannot continue at batch {state['cursor']}: "
                f"{'; '.join(different)}",
                "A resumed run must read the same samples in the same order: restore the setting, "
                "or start a new run.",
            )
        cursor = state["cursor"]
        if not isinstance(cursor, int) or isinstance(cursor, bool) or cursor < 0:
            raise DataError(
                f"sampler state: cursor must be a whole number that is not negative, not {cursor!r}"
            )
        self.cursor = cursor

    def _require_enough(self) -> None:
        """Raise DataError if the samples do not fill one batch."""
        if self.samples < 1:
            raise DataError(f"{self.name}: there are no samples")
        if self.order == "sequential" and self.samples < self.batch_size:
            raise DataError(
                f"{self.name}: {self.samples} samples are too few for {self.batch_size} parallel "
                f"streams",
                f"Lower the batch size to at most {self.samples}.",
            )

    def _settings(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "samples": self.samples,
            "order": self.order,
        }


class WindowSampler(Sampler):
    """A :class:`Sampler` of the windows of a stream.

    Args:
        stream_length: number of tokens in the stream.
        block_size: ``S``, predictions per sample.
        batch_size: ``B``, samples per batch.
        seed: as for :class:`Sampler`.
        order: as for :class:`Sampler`; rows of the sequential order read on in the same text.
        name: name of the stream in error messages.

    Raises:
        DataError: the stream is too short for one block, or for ``B`` parallel streams.
    """

    _kind = "a window sampler"

    def __init__(
        self,
        stream_length: int,
        block_size: int,
        batch_size: int,
        seed: int = 0,
        order: Order = "random",
        name: str = "the token stream",
    ) -> None:
        self.stream_length = stream_length
        self.block_size = block_size
        super().__init__(
            window_count(stream_length, block_size, name), batch_size, seed, order, name
        )

    def _require_enough(self) -> None:
        if self.order == "sequential" and self.samples < self.batch_size:
            raise DataError(
                f"{self.name}: {self.stream_length} tokens are too few for {self.batch_size} "
                f"parallel streams of at least one block of {self.block_size}: there are "
                f"{self.samples} blocks",
                f"Lower the batch size to at most {self.samples}, or the block size.",
            )

    def _settings(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "block_size": self.block_size,
            "batch_size": self.batch_size,
            "stream_length": self.stream_length,
            "order": self.order,
        }
