"""The base class of optimizers of float parameters: checks, and state that a resume restores
exactly.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import StepOutcome
from arb_ternary_orchestrator.optim.gradients import check_float, with_gradient

_WHY: Final = "it trains real floating-point parameters, and ternary modules learn by votes"


def wide(tensor: Tensor) -> torch.dtype:
    """Return the number format of a parameter's state: its own, but float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


class FloatOptimizer(Optimizer):
    """Base of optimizers: groups of the kind ``float``, checks of parameters, exact state.

    State is float32 at least, whatever the parameter is: an average with a decay of 0.999 would
    stand still in bfloat16.
    """

    #: Largest number of state tensors per parameter that are as large as it.
    buffers: ClassVar[int]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; ConfigError for parameters that have no float values."""
        super().add_param_group({"kind": "float", **param_group})
        try:
            check_float(
                type(self).__name__,
                len(self.param_groups) - 1,
                self.param_groups[-1]["params"],
                _WHY,
            )
        except ConfigError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the existing gradients.

        Returns:
            What ``closure`` returned; without one a ``StepOutcome``.

        Raises:
            ConfigError: a gradient is sparse; no parameter has been changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = with_gradient(type(self).__name__, self.param_groups)
        for group, parameters in zip(self.param_groups, found, strict=True):
            if parameters:
                self._step_group(group, parameters)
        return StepOutcome(statistics=self._statistics()) if loss is None else loss

    @abstractmethod
    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update ``parameters``, those of ``group`` that have a gradient."""

    def _statistics(self) -> dict[str, float]:
        """Return numbers for the metrics file."""
        return {}

    def planned_state_bytes(self) -> int:
        """Return the most bytes of tensors that it will keep; see
        ``arb_ternary_train.optim.planned_state.planned_state_bytes``.
        """
        parameters: list[Tensor] = [
            parameter for group in self.param_groups for parameter in group["params"]
        ]
        return sum(self.buffers * each.numel() * wide(each).itemsize for each in parameters)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned in its own number format; torch would round it to
        the parameter's.
        """
        super().load_state_dict(state_dict)
        saved = (number for group in state_dict["param_groups"] for number in group["params"])
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for number, parameter in zip(saved, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.to(parameter.device, copy=True)
