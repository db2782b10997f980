"""AdamW for models with float16 parameters, whose squared gradients float16 cannot hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from arb_ternary_train.optim.planned_state import STEP_BYTES

#: State of a float16 parameter that is float32.
_WIDE: Final = ("exp_avg", "exp_avg_sq", "master")


def _step(optimizer: torch.optim.AdamW) -> None:
    """Call torch's step without its hooks, which the step around it calls."""
    step = torch.optim.AdamW.step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)  # type: ignore[attr-defined]


class WideAdamW(torch.optim.AdamW):
    """torch's AdamW with float32 moments and float32 master weights for float16 parameters.

    The master weight learns, and the parameter is its rounding. A squared gradient below 6e-8 is 0
    in float16, so torch would divide by ``eps``, and an update of less than a thousandth of a
    weight would be lost. If a parameter was changed from outside since the last step, its master
    weight is copied again. Parameters of other dtypes are left to torch.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; see ``torch.optim.AdamW``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        narrow = []
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter.dtype == torch.float16 and parameter.grad is not None:
                    narrow.append((group, index, parameter))

        # torch steps on the master weights: they replace the parameters in groups and state.
        for group, index, parameter in narrow:
            state = self.state.pop(parameter, {})
            master = state.pop("master", None)
            if master is None or not torch.equal(master.to(parameter.dtype), parameter):
                master = parameter.detach().to(torch.float32)
            master.grad = parameter.grad.to(torch.float32)
            group["params"][index] = master
            if state:
                self.state[master] = state
        try:
            _step(self)
        finally:
            for group, index, parameter in narrow:
                master = group["params"][index]
                master.grad = None
                group["params"][index] = parameter
                self.state[parameter] = {**self.state.pop(master, {}), "master": master}
                with torch.no_grad():
                    parameter.copy_(master)
        return loss

    def planned_state_bytes(self) -> int:
        """Return the bytes of its state; see ``planned_state.planned_state_bytes``."""
        total = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                total += STEP_BYTES
                if parameter.dtype == torch.float16:
                    total += 4 * len(_WIDE) * parameter.numel()
                else:
                    total += 2 * parameter.nbytes
        return total

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state; torch alone would round that of a float16 parameter to float16."""
        super().load_state_dict(state_dict)
        saved = (number for group in state_dict["param_groups"] for number in group["params"])
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for number, parameter in zip(saved, parameters, strict=True):
            if parameter.dtype != torch.float16:
                continue
            state = state_dict["state"].get(number, {})
            for name in _WIDE:
                value = state.get(name)
                if isinstance(value, Tensor):
                    wide = value.to(parameter.device, torch.float32, copy=True)
                    self.state[parameter][name] = wide
