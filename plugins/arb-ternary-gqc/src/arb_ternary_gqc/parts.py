"""What goes into a wrapper and its decisions: options, micro-batches, and what a quantity is
for.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

import torch
from attrs import frozen
from torch import Tensor
from torch.optim import Optimizer

from arb_ternary.errors import ConfigError
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_gqc.errors import WrapperOptionError
from arb_ternary_gqc.gradients import Gradients
from arb_ternary_gqc.schedule import QuantitySchedule


class CommonOptions(TypedDict, total=False):
    """Keyword arguments of every wrapper; see :class:`OptimizerWrapper`."""

    non_finite: Literal["skip", "raise"]
    schedule: QuantitySchedule | None
    process_group: Any
    local_gradients: bool
    count_from: Literal[0, 1]


@frozen(eq=False)
class Draw:
    """A micro-batch that has just been added to the sum.

    Attributes:
        gradients: its gradient.
        norm: the norm of that, a scalar tensor of the host.
        metric: what ``step`` was given as the metric; None without one.
    """

    gradients: Gradients
    norm: Tensor
    metric: float | None


@frozen(eq=False)
class Portion:
    """What one entry of the wrapper's own groups decides on: everything, or one group of the inner
    optimizer.
    """

    group: Mapping[str, Any]
    parameters: list[Tensor]
    modules: list[TernaryModule]


def check_arguments(optimizer: Any, max_batch_draws: int, non_finite: str) -> None:
    """See that ``optimizer`` can be wrapped, with these options; raises ConfigError."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"gqc: a wrapper wraps a torch.optim.Optimizer, not a {type(optimizer).__name__}"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"gqc: {type(optimizer).__name__} evaluates a closure several times a step, and the "
            "micro-batches that a wrapper has drawn cannot be evaluated again",
            "Wrap an optimizer whose step() works without a closure.",
        )
    if max_batch_draws < 1:
        raise WrapperOptionError(f"gqc: max_batch_draws must be at least 1, not {max_batch_draws}")
    if non_finite not in ("skip", "raise"):
        raise WrapperOptionError(f"gqc: non_finite must be 'skip' or 'raise', not {non_finite!r}")


def numbers_given(loss: Any, signal: Any, metric: Any) -> dict[str, Tensor]:
    """Scalars that came with a micro-batch, by name; the loss of a closure stands in for those not
    given.
    """
    found = {
        "signal": loss if signal is None else signal,
        "metric": loss if metric is None else metric,
    }
    return {
        name: value.detach().reshape(())
        if isinstance(value, Tensor)
        else torch.tensor(float(value), dtype=torch.float64)
        for name, value in found.items()
        if value is not None
    }
