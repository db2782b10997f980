"""Samples in memory, read by index: their batches in training and in evaluation.

The index of a sample is its identity, in every epoch and in both orders.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Self

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from arb_ternary.errors import DataError
from arb_ternary.protocols.data import Batch, BatchRequest
from arb_ternary_text.data.loader import SampledBatches, evaluation_indices
from arb_ternary_text.data.sampler import Sampler


@attrs.frozen(eq=False)
class MemorySamples:
    """Arrays of equal length; narrow dtypes are widened batch by batch.

    Attributes:
        name: name of the samples in error messages.
        data: ``[N, ...]``: integers from 0 to ``levels``, or floats, which are read as float32.
        extras: further arrays ``[N, ...]`` by name, which go to ``Batch.extras``.
        levels: the largest value of integers, which are read as float32 in [-1, 1]: 0 is -1 and
            ``levels`` is 1. None: ``data`` are floats in their final range already.

    Raises:
        DataError: there is no sample, or arrays are of unequal length.
    """

    name: str
    data: NDArray[Any] = attrs.field(repr=lambda array: f"<{array.dtype} {list(array.shape)}>")
    extras: Mapping[str, NDArray[Any]] = attrs.field(factory=dict, repr=False)
    levels: int | None = None

    def __attrs_post_init__(self) -> None:
        if not len(self.data):
            raise DataError(f"{self.name}: there is not one sample")
        for key, array in self.extras.items():
            if len(array) != len(self.data):
                raise DataError(f"{self.name}: {len(self.data)} samples, and {len(array)} of {key}")

    def __len__(self) -> int:
        return len(self.data)

    def read(self, indices_B: NDArray[np.int64]) -> Batch:
        """Return samples as a batch: data float32 ``[B, ...]``, the indices as sample ids."""
        data = torch.from_numpy(self.data[indices_B]).to(torch.float32)
        if self.levels is not None:
            data = data.div_(self.levels / 2).sub_(1)
        extras = {name: torch.from_numpy(array[indices_B]) for name, array in self.extras.items()}
        return Batch(data, torch.from_numpy(indices_B.copy()), extras)

    def take(self, indices: NDArray[np.int64], name: str) -> Self:
        """Return the samples at ``indices``, in that order, under another name."""
        extras = {key: array[indices] for key, array in self.extras.items()}
        return attrs.evolve(self, name=name, data=self.data[indices], extras=extras)

    def batches(self, request: BatchRequest) -> SampledBatches:
        """Return endless batches; in random order each epoch is one permutation.

        ``request.block_size`` is ignored.

        Raises:
            DataError: the order is sequential and there are fewer samples than rows.
        """
        sampler = Sampler(len(self), request.batch_size, request.seed, request.order, self.name)
        return SampledBatches(
            sampler, self.read, workers=request.workers, pin_memory=request.pin_memory
        )

    def in_order(self, batch_size: int, limit: int | None) -> Iterator[Batch]:
        """Yield all samples once; the last batch may be smaller.

        With a ``limit`` there are at most that many batches, spread evenly over all samples.
        """
        indices = evaluation_indices(len(self), batch_size, limit)
        return (self.read(indices_B) for indices_B in indices)

    def digest(self) -> str:
        """Return the SHA-256 in hexadecimal of everything in the samples except the name."""
        hasher = hashlib.sha256(repr(self.levels).encode())
        for name, array in [("", self.data), *sorted(self.extras.items())]:
            hasher.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
            hasher.update(np.ascontiguousarray(array).data)
        return hasher.hexdigest()
