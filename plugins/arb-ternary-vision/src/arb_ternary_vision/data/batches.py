"""Samples in memory, read by index: their batches in training and in evaluation.

A sample's place among the samples is its identity, in every epoch and in both orders.
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
    """Arrays of equally many samples; what is stored narrow is widened batch by batch.

    Attributes:
        name: what error messages call the samples.
        data: ``[N, ...]``: integers of ``levels``, or floats, which pass as float32.
        extras: further arrays ``[N, ...]`` by name, as ``Batch.extras`` will hold them.
        levels: the largest value of integers, which become float32 in [-1, 1]: 0 is -1 and
            ``levels`` is 1. None: ``data`` are floats in their final range already.

    Raises:
        DataError: there is no sample, or arrays are of unequal length.
    """

    name: str
    data: NDArray[Any] = attrs.field(repr=lambda array: f"<{array.dtype} {list(array.shape)}>")
    extras: Mapping[str, NDArray[Any]] = attrs.field(
        factory=dict, repr=lambda arrays: f"<{', '.join(arrays)}>"
    )
    levels: int | None = None

    def __attrs_post_init__(self) -> None:
        if not len(self.data):
            raise DataError(f"{self.name}: there is not one sample")
        for key, array in self.extras.items():
            if len(array) != len(self.data):
                raise DataError(f"{self.name}: {len(self.data)} samples, and {len(array)} of {key}")
        if (self.levels is None) != (self.data.dtype.kind == "f"):
            raise TypeError(
                f"{self.name}: levels belong to integers, not to floats: {self.data.dtype}, "
                f"{self.levels}"
            )

    def __len__(self) -> int:
        return len(self.data)

    def read(self, indices_B: NDArray[np.int64]) -> Batch:
        """The batch of the samples ``indices_B``: data float32 ``[B, ...]``, the indices as sample
        ids.
        """
        data = torch.from_numpy(self.data[indices_B]).to(torch.float32)
        if self.levels is not None:
            data = data.div_(self.levels / 2).sub_(1)
        extras = {name: torch.from_numpy(array[indices_B]) for name, array in self.extras.items()}
        return Batch(data, torch.from_numpy(indices_B.copy()), extras)

    def at(self, indices: NDArray[np.int64], name: str) -> Self:
        """The samples ``indices``, in that order, under another name."""
        extras = {key: array[indices] for key, array in self.extras.items()}
        return attrs.evolve(self, name=name, data=self.data[indices], extras=extras)

    def batches(self, request: BatchRequest) -> SampledBatches:
        """Endless batches; a permutation an epoch in random order. ``request.block_size`` means
        nothing here.

        Raises:
            DataError: the sequential order, and fewer samples than rows.
        """
        sampler = Sampler(len(self), request.batch_size, request.seed, request.order, self.name)
        return SampledBatches(
            sampler, self.read, workers=request.workers, pin_memory=request.pin_memory
        )

    def in_order(self, batch_size: int, limit: int | None) -> Iterator[Batch]:
        """All samples once, the last batch perhaps smaller; of at most ``limit`` batches, spread
        evenly over all.
        """
        return (
            self.read(indices_B) for indices_B in evaluation_indices(len(self), batch_size, limit)
        )

    def digest(self) -> str:
        """SHA-256 in hexadecimal of everything in the samples; the name does not count."""
        hasher = hashlib.sha256(repr(self.levels).encode())
        for name, array in [("", self.data), *sorted(self.extras.items())]:
            hasher.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
            hasher.update(np.ascontiguousarray(array).data)
        return hasher.hexdigest()
