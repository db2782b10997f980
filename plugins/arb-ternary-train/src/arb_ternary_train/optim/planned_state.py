"""The memory that an optimizer will need, known before it has stepped."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import Joins, Wraps, inner_optimizers
from arb_ternary.optim.ternary import TernaryOptimizer
from arb_ternary_train.audit import optimizer_state_bytes

#: torch's AdamW keeps the number of steps of each parameter in a float32 tensor.
STEP_BYTES = 4


def planned_state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of tensors that ``optimizer`` will keep, with the optimizers inside it.

    It counts what is there once each parameter has had a gradient; nothing is stepped. AdamW and
    SGD of torch are known. Other optimizers have a method ``planned_state_bytes()``.

    Raises:
        ConfigError: an optimizer does not say it.
    """
    return sum(map(_own_bytes, inner_optimizers(optimizer)))


def _own_bytes(optimizer: Optimizer) -> int:
    """Return the bytes that ``optimizer`` alone will keep."""
    plan = getattr(optimizer, "planned_state_bytes", None)
    if plan is not None:
        return int(plan())
    # What a rule keeps for a module is there from the beginning.
    if isinstance(optimizer, TernaryOptimizer):
        return optimizer_state_bytes(optimizer)
    if isinstance(optimizer, torch.optim.AdamW):
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        return sum(2 * parameter.nbytes + STEP_BYTES for parameter in parameters)
    if isinstance(optimizer, torch.optim.SGD):
        groups = [group["params"] for group in optimizer.param_groups if group["momentum"]]
        return sum(parameter.nbytes for parameters in groups for parameter in parameters)
    if isinstance(optimizer, Joins | Wraps):
        return 0
    raise ConfigError(
        f"optimizer: a {type(optimizer).__name__} does not say what it will keep, so that its "
        f"memory cannot be planned",
        "Give its class a method planned_state_bytes() -> int.",
    )
