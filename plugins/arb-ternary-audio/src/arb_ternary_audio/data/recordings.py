"""Labelled sounds of one length, in memory.

Shapes: ``N`` sounds, ``L`` samples.
"""

from __future__ import annotations

import hashlib

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray


@frozen(eq=False)
class Recordings:
    """Mono sounds with labels.

    Attributes:
        samples: int16 ``[N, L]``.
        labels: int64 ``[N]``, indices into ``classes``.
        sample_rate: samples per second.
        classes: names.
    """

    samples: NDArray[np.int16] = field(repr=lambda samples: f"<{len(samples)} sounds>")
    labels: NDArray[np.int64] = field(repr=False)
    sample_rate: int
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, indices: NDArray[np.int64]) -> Recordings:
        """Return the sounds at ``indices``, in that order."""
        return Recordings(
            self.samples[indices], self.labels[indices], self.sample_rate, self.classes
        )

    def digest(self) -> str:
        """Return the SHA-256 of samples, labels, rate and names, in hexadecimal."""
        hasher = hashlib.sha256(f"{self.samples.shape} {self.sample_rate} {self.classes}".encode())
        hasher.update(np.ascontiguousarray(self.samples, dtype="<i2").data)
        hasher.update(np.ascontiguousarray(self.labels, dtype="<i8").data)
        return hasher.hexdigest()
