"""Run pieces of sequences through a model, and keep their keys and values.

:class:`RowRunner` decodes all pieces of a step together by a kernel of the backend.
:class:`ModuleRunner` calls the model for one piece after another, which works for every model and
backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary_text.models.cache import FIRST_CAPACITY, CacheNumbers, KeyValueCache
from arb_ternary_text.models.generate import CachedModel, cache_maker, common_length
from arb_ternary_text.models.row_decode import RowDecoder, row_decoder


@frozen
class Piece:
    """Consecutive ids of a sequence that a step reads.

    Attributes:
        seat: the seat of the sequence.
        start: position of the first id.
        ids: at least one id.
        wanted: number of ids at the end after which logits are wanted.
    """

    seat: int
    start: int
    ids: Sequence[int]
    wanted: int


class Runner(ABC):
    """Runs pieces of sequences, each of which has a seat.

    Attributes:
        block_size: positions of a block.
        block_bytes: bytes of a block.
        shares_blocks: whether sequences with the same beginning may use the same blocks.
    """

    block_size: int = 32
    block_bytes: int
    shares_blocks: bool

    @abstractmethod
    def allocate(self, seats: int, blocks: int) -> None:
        """Make room for sequences; called once, first."""

    @abstractmethod
    def positions(self, length: int) -> int:
        """Return for how many positions a sequence of ``length`` needs blocks."""

    @abstractmethod
    def begin(self, seat: int, blocks: Sequence[int], beginning: Sequence[int]) -> int:
        """Begin a sequence whose keys and values go to ``blocks``.

        Returns:
            How many of the ids of ``beginning`` need not be read, besides those of known blocks.
        """

    @abstractmethod
    def end(self, seat: int) -> None:
        """Forget the sequence of a seat."""

    @abstractmethod
    def run(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Read pieces of different sequences; return for each its logits ``[wanted, V]``."""


class RowRunner(Runner):
    """Decodes all pieces together: weights are read once per step.

    Logits are the same to the last bit, whatever else is in the step, and however a prompt is cut
    into pieces.
    """

    shares_blocks = True

    def __init__(self, decoder: RowDecoder, numbers: CacheNumbers) -> None:
        self._decoder = decoder
        self._numbers = numbers
        self.block_bytes = self.block_size * decoder.bytes_per_position(numbers)

    def allocate(self, seats: int, blocks: int) -> None:
        self._blocks = self._decoder.new_blocks(blocks, self.block_size, self._numbers)
        self._tables = torch.zeros(seats, blocks, dtype=torch.int64)

    def positions(self, length: int) -> int:
        return length

    def begin(self, seat: int, blocks: Sequence[int], beginning: Sequence[int]) -> int:
        del beginning  # blocks are all that is known
        self._tables[seat, : len(blocks)] = torch.tensor(blocks)
        return 0

    def end(self, seat: int) -> None:
        """Do nothing: the blocks of a seat are not read before the next ``begin``."""

    def run(self, pieces: Sequence[Piece]) -> list[Tensor]:
        ids: list[int] = []
        seats: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for piece in pieces:
            count = len(piece.ids)
            ids += piece.ids
            seats += [piece.seat] * count
            positions += range(piece.start, piece.start + count)
            wanted += range(len(ids) - piece.wanted, len(ids))
        logits_WV = self._decoder.decode(
            torch.tensor(ids, dtype=torch.int64),
            self._blocks,
            self._tables,
            torch.tensor(seats, dtype=torch.int64),
            torch.tensor(positions, dtype=torch.int64),
            torch.tensor(wanted, dtype=torch.int64),
        )
        return list(logits_WV.split_with_sizes([piece.wanted for piece in pieces]))


class ModuleRunner(Runner):
    """Calls the model for one piece after another, each sequence with a cache of its own.

    The cache of the last sequence that ended is kept until the next one begins, which may begin in
    the same way. Without a sliding window that one continues a copy of it.

    Logits do not depend on other sequences. How a prompt is cut into pieces may change their last
    bits, as it may in any use of the model with a cache.
    """

    shares_blocks = False

    def __init__(
        self, model: CachedModel, device: torch.device, numbers: CacheNumbers, longest_piece: int
    ) -> None:
        self._model = model
        self._device = device
        self._new_cache = cache_maker(model, numbers)
        self._longest_piece = longest_piece
        tried = self._new_cache()
        self._forward([0], tried, 1)
        self.block_bytes = self.block_size * tried.bytes_per_token()

    def allocate(self, seats: int, blocks: int) -> None:
        del blocks  # memory is allocated as sequences grow
        self._caches: list[KeyValueCache | None] = [None] * seats
        self._ids: list[list[int]] = [[] for _ in range(seats)]
        self._left: tuple[list[int], KeyValueCache] | None = None

    def positions(self, length: int) -> int:
        # What a cache allocates: see KeyValueCache.reserve().
        window = self._model.sliding_window
        if window is not None:
            return max(window + self._longest_piece, 2 * window)
        return min(max(2 * length, FIRST_CAPACITY), self._model.max_length)

    def begin(self, seat: int, blocks: Sequence[int], beginning: Sequence[int]) -> int:
        del blocks  # they are only counted
        cache = self._new_cache()
        shared = 0
        if self._left is not None:
            ids, left = self._left
            shared = common_length(ids, beginning)
            if shared:
                # A copy, because the other has room for as many positions as its sequence needed.
                left.rewind(shared)
                cache.load_state_dict(left.state_dict())
            self._left = None
        self._caches[seat] = cache
        self._ids[seat] = list(beginning[:shared])
        return shared

    def end(self, seat: int) -> None:
        cache = self._caches[seat]
        # One with a window has dropped what another sequence would need.
        if cache is not None and cache.window is None:
            self._left = (self._ids[seat], cache)
        self._caches[seat] = None

    def run(self, pieces: Sequence[Piece]) -> list[Tensor]:
        results = []
        for piece in pieces:
            cache = self._caches[piece.seat]
            assert cache is not None
            assert cache.length == piece.start
            results.append(self._forward(piece.ids, cache, piece.wanted))
            self._ids[piece.seat] += piece.ids
        return results

    def _forward(self, ids: Sequence[int], cache: KeyValueCache, wanted: int) -> Tensor:
        tokens_1S = torch.tensor([list(ids)], dtype=torch.int64, device=self._device)
        next_logits: Any = getattr(self._model, "next_logits", None)
        if wanted <= 1 and next_logits is not None:
            last_1V: Tensor = next_logits(tokens_1S, cache)
            return last_1V[:wanted]
        logits_SV = self._model(tokens_1S, cache)[0]
        return logits_SV[len(ids) - wanted :]


def make_runner(
    model: CachedModel, device: torch.device, numbers: CacheNumbers, longest_piece: int
) -> Runner:
    """Return the best runner for a model.

    Raises:
        UsageProblem: the model cannot make such a cache.
    """
    cache_maker(model, numbers)
    decoder = row_decoder(model) if device.type == "cpu" else None
    if decoder is not None:
        return RowRunner(decoder, numbers)
    return ModuleRunner(model, device, numbers, longest_piece)
