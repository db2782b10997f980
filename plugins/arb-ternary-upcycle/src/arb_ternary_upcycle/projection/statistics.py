"""What a projection knows of a linear's inputs: products of them over calibration tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from arb_ternary_upcycle.projection.rounded import Rounded

__all__ = ["InputStatistics"]


class InputStatistics:
    """``X^T X``, ``Y^T X`` and ``Y^T Y`` over tokens, ``X`` the student's inputs and ``Y`` the teacher's.

    Products of some tokens at a time are float32, their sums float64.

    Attributes:
        gram: ``X^T X``, float64 ``[K, K]``.
        cross: ``Y^T X``.
        teacher: ``Y^T Y``.
        tokens: how many.
    """

    def __init__(self, columns: int) -> None:
        self.gram, self.cross, self.teacher = (torch.zeros(columns, columns, dtype=torch.float64) for _ in range(3))
        self.tokens = 0

    def add(self, student_MK: Tensor, teacher_MK: Tensor) -> None:
        """Some tokens more."""
        self.gram += student_MK.mT @ student_MK
        self.cross += teacher_MK.mT @ student_MK
        self.teacher += teacher_MK.mT @ teacher_MK
        self.tokens += student_MK.shape[0]

    def output_error(self, weight: Tensor, rounded: Rounded) -> float:
        """``|X Q^T - Y W^T| / |Y W^T|``: how far the outputs of rounded weights are from the teacher's."""
        w, q = weight.to(torch.float64), rounded.dense().to(torch.float64)
        outputs = float(((w @ self.teacher) * w).sum())
        error = outputs - 2 * float(((w @ self.cross) * q).sum()) + float(((q @ self.gram) * q).sum())
        return _root(error, outputs)

    def rounding_error(self, weight: Tensor, rounded: Rounded) -> float:
        """``|X Q^T - X W^T| / |X W^T|``: what rounding alone does, on the student's inputs."""
        w = weight.to(torch.float64)
        difference = rounded.dense().to(torch.float64) - w
        return _root(float(((difference @ self.gram) * difference).sum()), float(((w @ self.gram) * w).sum()))


def _root(error: float, outputs: float) -> float:
    return math.sqrt(max(error, 0.0) / outputs) if outputs > 0 else 0.0
