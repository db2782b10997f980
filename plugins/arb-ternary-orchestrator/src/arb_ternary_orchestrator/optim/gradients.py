"""Checks and norms of the gradients of float parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from arb_ternary.errors import ConfigError
from arb_ternary.optim.ternary import to_host


def check_float(owner: str, number: int, parameters: Iterable[Tensor], why: str) -> None:
    """Check that all parameters of group ``number`` have float values.

    Raises:
        ConfigError: a parameter has other values; the message says ``why`` that is an error.
    """
    for index, parameter in enumerate(parameters):
        if not parameter.is_floating_point():
            raise ConfigError(
                f"{owner}: param group {number}, parameter {index}: {parameter.dtype}, "
                f"{tuple(parameter.shape)}; {why}",
                "Use `optimizer: {name: split, ternary: ..., float: ...}`.",
            )


def with_gradient(owner: str, groups: Sequence[Mapping[str, Any]]) -> list[list[Tensor]]:
    """Return the parameters of each group that have a gradient.

    Raises:
        ConfigError: a gradient is sparse.
    """
    found = [
        [parameter for parameter in group["params"] if parameter.grad is not None]
        for group in groups
    ]
    for number, parameters in enumerate(found):
        for parameter in parameters:
            assert parameter.grad is not None
            if parameter.grad.is_sparse:
                raise ConfigError(
                    f"{owner}: param group {number}: the gradient of a parameter of shape "
                    f"{tuple(parameter.shape)} is sparse, and averages over it would not be",
                    "Make the embedding with sparse=False.",
                )
    return found


def gradient_norms(parameters: Iterable[Tensor]) -> list[float]:
    """Return the Euclidean norm of each parameter's gradient, computed in float32."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return to_host([torch.linalg.vector_norm(each, dtype=torch.float32) for each in gradients])


def global_norm(norms: Iterable[float]) -> float:
    """Return the norm of all gradients together."""
    return math.hypot(*norms)
