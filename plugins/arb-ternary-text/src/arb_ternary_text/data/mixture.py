"""A mixture of token streams, each with a share of the samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from numpy.typing import NDArray

from arb_ternary.errors import DataError
from arb_ternary.protocols.data import Batch, BatchRequest
from arb_ternary_text.data.sampler import Sampler, permutation, window_count
from arb_ternary_text.data.source import StreamSource
from arb_ternary_text.data.tokenizers import Tokenizer

if TYPE_CHECKING:
    from arb_ternary_text.data.loader import SampledBatches


class MixtureSampler(Sampler):
    """A sampler of the windows of several streams.

    An epoch has as many samples as there are windows. Each stream has its share of them, at random
    places, and goes through its own windows, permutation after permutation, at its own pace: one
    with a large share begins again while another is not through. Windows are numbered over all
    streams, in their order.

    Args:
        windows: number of windows of each stream.
        shares: share of each stream, relative to their sum.
        batch_size: samples per batch.
        seed: chooses the permutations.
    """

    _kind = "a mixture"

    def __init__(
        self, windows: Sequence[int], shares: Sequence[float], batch_size: int, seed: int
    ) -> None:
        self._windows = list(windows)
        self._first = first_windows(windows)
        #: Number of the first slot of each stream in an epoch, and of all.
        self._slots = [0]
        for count in range(1, len(shares) + 1):
            share = sum(shares[:count]) / sum(shares)
            self._slots.append(round(share * sum(windows)))
        #: The orders of the last two passes over each stream.
        self._orders = [lru_cache(maxsize=2)(permutation) for _ in windows]
        super().__init__(sum(windows), batch_size, seed, "random", "the mixture")

    def batch(self, cursor: int) -> NDArray[np.int64]:
        """Return the numbers of the windows of batch ``cursor``, int64 ``[B]``."""
        slots_B = super().batch(cursor)
        first = cursor * self.batch_size
        found = np.empty_like(slots_B)
        for row, slot in enumerate(slots_B.tolist()):
            epoch = (first + row) // self.samples
            found[row] = self._window(slot, epoch)
        return found

    def _window(self, slot: int, epoch: int) -> int:
        """Return the window that a slot of an epoch reads."""
        stream = int(np.searchsorted(self._slots, slot, side="right")) - 1
        per_epoch = self._slots[stream + 1] - self._slots[stream]
        drawn = epoch * per_epoch + slot - self._slots[stream]
        pass_number, place = divmod(drawn, self._windows[stream])
        # Streams of one size are not read in one order.
        seed = self.seed + ((stream + 1) << 32)
        order = self._orders[stream](self._windows[stream], seed, pass_number)
        return int(self._first[stream] + order[place])

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "slots": list(self._slots)}


def first_windows(windows: Sequence[int]) -> NDArray[np.int64]:
    """Return the number of the first window of each stream over all streams, and of all windows."""
    return np.cumsum([0, *windows])


@attrs.frozen(eq=False)
class MixtureSource:
    """Token streams of one tokenizer, of which each has a share of the training samples.

    Held-out samples are those of all streams, one stream after another.

    Attributes:
        name: name of the source in listings and errors.
        parts: the streams.
        shares: share of each, relative to their sum.
    """

    name: str
    parts: tuple[StreamSource, ...]
    shares: tuple[float, ...]

    @property
    def tokenizer(self) -> Tokenizer:
        """Turns text into the ids of the streams."""
        return self.parts[0].tokenizer

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""
        return self.tokenizer.vocabulary_size

    def fingerprint(self) -> str:
        """Return the SHA-256 in hexadecimal of all streams and shares."""
        parts = [part.fingerprint() for part in self.parts]
        return hashlib.sha256(f"{parts} {list(self.shares)}".encode()).hexdigest()

    def batches(self, request: BatchRequest) -> SampledBatches:
        """Return batches of windows, each stream with its share.

        Raises:
            DataError: a stream is too short, or the order is sequential.
        """
        from arb_ternary_text.data.loader import SampledBatches

        if request.order == "sequential":
            raise DataError(
                f"data {self.name}: order: sequential continues one text from batch to batch, and "
                f"a mixture has several",
                "Set order: random, or give one folder as `train`.",
            )
        windows = self._windows(request.block_size)
        sampler = MixtureSampler(windows, self.shares, request.batch_size, request.seed)
        firsts = first_windows(windows)
        return SampledBatches(
            sampler,
            lambda indices_B: self._read(indices_B, firsts, request.block_size),
            workers=request.workers,
            pin_memory=request.pin_memory,
        )

    def samples_per_epoch(self, block_size: int) -> int:
        """Return the number of windows of all streams."""
        return sum(self._windows(block_size))

    def held_out(self, batch_size: int, block_size: int, limit: int | None) -> Iterator[Batch]:
        """Yield batches of windows of the validation streams; the limit is shared by length."""
        lengths = [len(part.validation) for part in self.parts]
        for part, length in zip(self.parts, lengths, strict=True):
            own = None if limit is None else max(1, round(limit * length / sum(lengths)))
            yield from part.held_out(batch_size, block_size, own)

    def attachments(self) -> Mapping[str, Any]:
        """Return the tokenizer as ``from_json`` reads it."""
        return {"tokenizer": self.tokenizer.to_json()}

    def _windows(self, block_size: int) -> list[int]:
        return [window_count(len(part.train), block_size, part.name) for part in self.parts]

    def _read(
        self, indices_B: NDArray[np.int64], firsts: NDArray[np.int64], block_size: int
    ) -> Batch:
        """Read windows by their numbers over all streams."""
        import torch

        from arb_ternary_text.data.loader import read_windows

        tokens = torch.empty(len(indices_B), block_size + 1, dtype=torch.int64)
        streams_B = np.searchsorted(firsts, indices_B, side="right") - 1
        for number, part in enumerate(self.parts):
            rows = np.flatnonzero(streams_B == number)
            if len(rows):
                own = read_windows(part.train, indices_B[rows] - firsts[number], block_size)
                tokens[torch.from_numpy(rows)] = own.data
        return Batch(tokens, torch.from_numpy(indices_B.copy()))
