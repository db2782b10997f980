"""Sums over calibration tokens of products of a linear's inputs, and output errors from them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from arb_ternary_upcycle.projection.rounded import Rounded


class InputStatistics:
    """``X^T X``, ``Y^T X`` and ``Y^T Y``: ``X`` are the student's inputs and ``Y`` the teacher's.

    Products are float32, their sums float64.

    Attributes:
        gram: ``X^T X``, float64 ``[K, K]``.
        cross: ``Y^T X``.
        teacher: ``Y^T Y``.
    """

    def __init__(self, columns: int) -> None:
        self.gram = torch.zeros(columns, columns, dtype=torch.float64)
        self.cross = torch.zeros_like(self.gram)
        self.teacher = torch.zeros_like(self.gram)

    def add(self, student_MK: Tensor, teacher_MK: Tensor) -> None:
        """Add the inputs of some tokens."""
        self.gram += student_MK.mT @ student_MK
        self.cross += teacher_MK.mT @ student_MK
        self.teacher += teacher_MK.mT @ teacher_MK

    def output_error(self, weight: Tensor, rounded: Rounded) -> float:
        """Return ``|X Q^T - Y W^T| / |Y W^T|``: the rounded linear's error with its own inputs."""
        w = weight.to(torch.float32)
        q = rounded.dense()
        outputs = _product(w, self.teacher, w)
        return _root(outputs - 2 * _product(w, self.cross, q) + _product(q, self.gram, q), outputs)

    def rounding_error(self, weight: Tensor, rounded: Rounded) -> float:
        """Return ``|X Q^T - X W^T| / |X W^T|``: the error of rounding alone."""
        w = weight.to(torch.float32)
        difference = rounded.dense() - w
        return _root(_product(difference, self.gram, difference), _product(w, self.gram, w))


def _product(left_NK: Tensor, middle_KK: Tensor, right_NK: Tensor) -> float:
    """Return ``trace(left middle right^T)``."""
    return float((left_NK @ middle_KK.to(torch.float32)).mul_(right_NK).sum(dtype=torch.float64))


def _root(error: float, outputs: float) -> float:
    return math.sqrt(max(error, 0.0) / outputs) if outputs > 0 else 0.0
