"""Batches of samples, and of windows of a token stream, read ahead by threads.

Threads are enough: a batch is a copy from memory or from a mapped file, during which numpy and
torch release the interpreter lock, and there is no Python work per sample that would hold it.
Nothing is pickled, no process inherits an initialised accelerator, and no worker has a random
state: the samples of a batch are a pure function of the sampler's cursor. So the bits are the same
for any number of workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from arb_ternary.errors import EnvironmentProblem
from arb_ternary.protocols.data import Batch
from arb_ternary_text.data.memmap import TokenFile
from arb_ternary_text.data.sampler import Sampler

#: Batches in flight per worker: one being read and one ready.
_AHEAD = 2


class SampledBatches:
    """An endless iterator over the batches of ``sampler``, on the host.

    The position is ``sampler.cursor``, the number of the next batch that the caller has not
    received. Batches that were read ahead do not count, and setting the cursor or loading a state
    drops them. Call :meth:`close` at the end. One thread may iterate at a time.

    Args:
        sampler: chooses the samples.
        read: returns the batch of the samples int64 ``[B]``; a pure function, which several threads
            call.
        workers: number of threads that read ahead; 0 reads each batch when it is asked for.
        pin_memory: put batches into page-locked memory, from which they can be copied to the
            accelerator during computation.

    Raises:
        EnvironmentProblem: ``pin_memory`` is set and there is no accelerator.
    """

    def __init__(
        self,
        sampler: Sampler,
        read: Callable[[NDArray[np.int64]], Batch],
        *,
        workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        if pin_memory and not torch.accelerator.is_available():
            raise EnvironmentProblem(
                "pin_memory: page-locked memory needs an accelerator, and this machine has none",
                "Set pin_memory: false.",
            )
        self.sampler = sampler
        self.read = read
        self.workers = workers
        self.pin_memory = pin_memory
        self._executor = None
        if workers:
            self._executor = ThreadPoolExecutor(workers, thread_name_prefix="arb-data")
        self._ahead: deque[tuple[int, Future[Batch]]] = deque()
        self._shard = (0, 0, 1, 1)  # number of a first batch, rank, ranks, batches per step
        self._closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the batch at the cursor, and move the cursor on by one.

        Raises:
            DataError: a sample cannot be read; the cursor stays where it is.
        """
        if self._closed:
            raise ValueError("the batch loader is closed")
        cursor = self.sampler.cursor
        if self._executor is None or not self._is_own(cursor):
            batch = self._read(self.sampler.batch(cursor))
        else:
            while self._ahead and self._ahead[0][0] < cursor:
                self._ahead.popleft()[1].cancel()
            if self._ahead and self._ahead[0][0] != cursor:
                self._drop()
            self._fill(cursor)
            batch = self._ahead[0][1].result()
            self._ahead.popleft()
            self._fill(cursor + 1)
        self.sampler.cursor = cursor + 1
        return batch

    def shard(self, rank: int, size: int, count: int) -> None:
        """Read ahead only what one of several processes draws.

        Of every ``count`` batches from the next one on it draws those with index ``j`` and ``j %
        size == rank``, and skips the others.
        """
        self._shard = (self.sampler.cursor, rank, size, count)

    def skip(self, count: int) -> None:
        """Skip the next ``count`` batches without reading them."""
        self.sampler.cursor += count

    @property
    def continues(self) -> bool:
        """Whether each row of the next batch continues that row of the last (``Sampler``)."""
        return self.sampler.continues(self.sampler.cursor)

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state; batches that were read ahead do not count."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken.

        Raises:
            DataError: the state belongs to other samples or settings.
        """
        self.sampler.load_state_dict(state)

    def close(self) -> None:
        """Stop reading ahead and wait for the threads; the sampler keeps its cursor."""
        self._closed = True
        self._drop()
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def _is_own(self, number: int) -> bool:
        first, rank, size, count = self._shard
        return (number - first) % count % size == rank

    def _fill(self, cursor: int) -> None:
        """Start reading the batches from ``cursor`` on.

        Indices are computed here, so that threads share no state.
        """
        assert self._executor is not None
        wanted = self._ahead[-1][0] + 1 if self._ahead else cursor
        while len(self._ahead) < _AHEAD * self.workers:
            if self._is_own(wanted):
                indices_B = self.sampler.batch(wanted)
                self._ahead.append((wanted, self._executor.submit(self._read, indices_B)))
            wanted += 1

    def _drop(self) -> None:
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def _read(self, indices_B: NDArray[np.int64]) -> Batch:
        batch = self.read(indices_B)
        if not self.pin_memory:
            return batch
        extras = {name: tensor.pin_memory() for name, tensor in batch.extras.items()}
        return Batch(batch.data.pin_memory(), batch.sample_ids.pin_memory(), extras)


def read_windows(stream: NDArray[Any], indices_B: NDArray[np.int64], block_size: int) -> Batch:
    """Read windows of ``stream``: tokens int64 ``[B, S + 1]``, with the indices as sample ids.

    Raises:
        DataError: an id in a token file is outside the vocabulary; the message names the file and
            the index.
    """
    # A view of the base class: slicing the subclass costs more than copying a window.
    raw = np.asarray(stream)
    tokens = np.empty((len(indices_B), block_size + 1), dtype=np.int64)
    for row, index in enumerate(indices_B.tolist()):
        start = index * block_size
        tokens[row] = raw[start : start + block_size + 1]
        if isinstance(stream, TokenFile):
            stream.check(tokens[row], start)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(indices_B.copy()))


def evaluation_indices(
    samples: int, batch_size: int, limit: int | None
) -> Iterator[NDArray[np.int64]]:
    """Yield the sample indices of each batch of an evaluation.

    Args:
        samples: number of samples.
        batch_size: samples per batch.
        limit: largest number of batches, whose samples are spread evenly over all, because the
            first ones would be a biased part; None = all.
    """
    wanted = samples if limit is None else min(samples, limit * batch_size)
    indices = np.arange(wanted, dtype=np.int64) * samples // max(1, wanted)
    return (indices[start : start + batch_size] for start in range(0, wanted, batch_size))
