"""Labelled sounds of one length, in memory.

Shapes: ``N`` sounds, ``L`` samples.
"""

from __future__ import annotations

import hashlib
from typing import Any

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
        for array in (
            self.samples.astype("<i2", copy=False),
            self.labels.astype("<i8", copy=False),
        ):
            hasher.update(np.ascontiguousarray(array).data)
        return hasher.hexdigest()


def as_pcm(waves: NDArray[Any]) -> NDArray[np.int16]:
    """Convert samples in [-1, 1] to 16-bit integers, rounded to the nearest; louder ones are
    clipped.
    """
    return np.clip(np.rint(waves * 32768.0), -32768, 32767).astype(np.int16)
