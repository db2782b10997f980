"""What a projection knows of a linear's inputs: products of them over calibration tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from arb_ternary_upcycle.projection.rounded import Rounded


class InputStatistics:
    """``X^T X``, ``Y^T X`` and ``Y^T Y`` over tokens, ``X`` the student's inputs and ``Y`` the
    teacher's.

    Products of some tokens at a time are float32, their sums float64.

    Attributes:
        gram: ``X^T X``, float64 ``[K, K]``.
        cross: ``Y^T X``.
        teacher: ``Y^T Y``.
        tokens: how many.
    """

    def __init__(self, columns: int) -> None:
        self.gram, self.cross, self.teacher = (
            torch.zeros(columns, columns, dtype=torch.float64) for _ in range(3)
        )
        self.tokens = 0

    def add(self, student_MK: Tensor, teacher_MK: Tensor) -> None:
        """Some tokens more."""
        self.gram += student_MK.mT @ student_MK
        self.cross += teacher_MK.mT @ student_MK
        self.teacher += teacher_MK.mT @ teacher_MK
        self.tokens += student_MK.shape[0]

    def output_error(self, weight: Tensor, rounded: Rounded) -> float:
        """``|X Q^T - Y W^T| / |Y W^T|``: how far the outputs of rounded weights are from the
        teacher's.
        """
        w = weight.to(torch.float32)
        q = rounded.dense()
        outputs = _product(w, self.teacher, w)
        return _root(outputs - 2 * _product(w, self.cross, q) + _product(q, self.gram, q), outputs)

    def rounding_error(self, weight: Tensor, rounded: Rounded) -> float:
        """``|X Q^T - X W^T| / |X W^T|``: what rounding alone does, on the student's inputs."""
        w = weight.to(torch.float32)
        difference = rounded.dense() - w
        return _root(_product(difference, self.gram, difference), _product(w, self.gram, w))


def _product(left_NK: Tensor, middle_KK: Tensor, right_NK: Tensor) -> float:
    """``trace(left middle right^T)``."""
    return float((left_NK @ middle_KK.to(torch.float32)).mul_(right_NK).sum(dtype=torch.float64))


def _root(error: float, outputs: float) -> float:
    return math.sqrt(max(error, 0.0) / outputs) if outputs > 0 else 0.0
