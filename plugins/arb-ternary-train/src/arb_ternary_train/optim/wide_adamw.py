"""AdamW for models with float16 parameters, whose squared gradients float16 cannot hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from arb_ternary_train.optim.planned_state import STEP_BYTES

#: State of a float16 parameter that is float32 whatever the parameter is.
_WIDE: Final = ("exp_avg", "exp_avg_sq", "master")


def _step(optimizer: torch.optim.AdamW) -> None:
    """torch's step, without the hooks, which the step around it calls."""
    step = torch.optim.AdamW.step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)  # type: ignore[attr-defined]


class WideAdamW(torch.optim.AdamW):
    """torch's AdamW, which for a float16 parameter keeps moments and a copy of the weights in
    float32.

    The copy is what learns; the parameter is its rounding. A squared gradient below 6e-8 is 0 in
    float16, so that torch would divide by ``eps``, and an update of less than a thousandth of a
    weight would be lost. A parameter that somebody else has changed since the last step is copied
    anew. Parameters of other dtypes are torch's affair.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; see ``torch.optim.AdamW``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        narrow = [
            (group, index, parameter)
            for group in self.param_groups
            for index, parameter in enumerate(group["params"])
            if parameter.dtype == torch.float16 and parameter.grad is not None
        ]
        # torch steps on the copies: they stand in the groups and in the state while it does.
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
        """What it will keep: see
        :func:`arb_ternary_train.optim.planned_state.planned_state_bytes`.
        """
        parameters: list[Tensor] = [
            parameter for group in self.param_groups for parameter in group["params"]
        ]
        return sum(
            STEP_BYTES
            + (4 * len(_WIDE) * each.numel() if each.dtype == torch.float16 else 2 * each.nbytes)
            for each in parameters
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which alone would round the state of a float16 parameter to float16."""
        super().load_state_dict(state_dict)
        saved = (number for group in state_dict["param_groups"] for number in group["params"])
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for number, parameter in zip(saved, parameters, strict=True):
            state = state_dict["state"].get(number, {})
            for name in _WIDE:
                if parameter.dtype == torch.float16 and isinstance(
                    value := state.get(name), Tensor
                ):
                    self.state[parameter][name] = value.to(
                        parameter.device, torch.float32, copy=True
                    )
