"""Options of wrappers, checks of their arguments, and records that decisions are made on."""

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
        norm: the norm of the gradient, a scalar tensor on the host.
        metric: the metric given to ``step``; None without one.
    """

    gradients: Gradients
    norm: Tensor
    metric: float | None


@frozen(eq=False)
class Portion:
    """The parameters and modules of one of the wrapper's own groups."""

    group: Mapping[str, Any]
    parameters: list[Tensor]
    modules: list[TernaryModule]


def check_arguments(optimizer: Any, max_batch_draws: int, non_finite: str) -> None:
    """Check that ``optimizer`` can be wrapped with these options.

    Raises:
        ConfigError: it cannot.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"gqc: a wrapper wraps a torch.optim.Optimizer, not a {type(optimizer).__name__}"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"gqc: {type(optimizer).__name__} evaluates a closure several times per step, but the "
            "micro-batches that a wrapper has drawn cannot be evaluated again",
            "Wrap an optimizer whose step() works without a closure.",
        )
    if max_batch_draws < 1:
        raise WrapperOptionError(f"gqc: max_batch_draws must be at least 1, not {max_batch_draws}")
    if non_finite not in ("skip", "raise"):
        raise WrapperOptionError(f"gqc: non_finite must be 'skip' or 'raise', not {non_finite!r}")


def numbers_given(loss: Any, signal: Any, metric: Any) -> dict[str, Tensor]:
    """Return the scalars of a micro-batch, ``signal`` and ``metric``, as tensors.

    The loss of a closure takes the place of one that is not given.
    """
    found = {}
    for name, given in (("signal", signal), ("metric", metric)):
        value = loss if given is None else given
        if isinstance(value, Tensor):
            found[name] = value.detach().reshape(())
        elif value is not None:
            found[name] = torch.tensor(float(value), dtype=torch.float64)
    return found
