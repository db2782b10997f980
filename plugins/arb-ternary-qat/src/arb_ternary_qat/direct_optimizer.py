"""The common part of optimizers that change the codes of :class:`DirectLinear` modules."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from arb_ternary.counters.hashing import STEP
from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import StepOutcome, Trainable
from arb_ternary.optim.ternary import to_host
from arb_ternary_qat.direct import DirectLinear


class DirectOptimizer(Optimizer):
    """Reads the gradients of modules and writes their codes; ``params`` are the stored weights.

    Modules without a gradient do not change. A step with a gradient that is not finite is dropped
    as a whole. The training loop's ``grad_clip`` applies to float parameters only.

    Args:
        modules: the modules by qualified name.
        defaults: entries of the only param group; ``kind`` "ternary" is added.
    """

    #: A step may be skipped because of a gradient that is not finite.
    refuses: ClassVar[bool] = True

    def __init__(self, modules: Mapping[str, DirectLinear], defaults: Mapping[str, Any]) -> None:
        if not modules:
            raise ValueError("there are no modules to train")
        self._modules = dict(modules)
        super().__init__(
            [{"params": [module.weight for module in modules.values()]}],
            {"kind": "ternary", **defaults},
        )

    @abstractmethod
    def _update(self, group: dict[str, Any], module: DirectLinear, gradient_NK: Tensor) -> Tensor:
        """Return new codes, int8 ``[N, K]``; moments are in ``self.state[module.weight]``."""

    def _gradient_norm(self) -> float:
        norms = [m.gradient.norm() for m in self._modules.values() if m.gradient is not None]
        if not norms:
            return 0.0
        (norm,) = to_host([torch.stack(norms).norm()])
        return float(norm)

    def may_step(self) -> bool:
        """Return whether the gradients are finite."""
        return math.isfinite(self._gradient_norm())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> StepOutcome:  # type: ignore[override]
        """Change the codes of every module that has a gradient."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        (group,) = self.param_groups
        waiting = [(m, m.gradient) for m in self._modules.values() if m.gradient is not None]
        norm = self._gradient_norm()
        if not math.isfinite(norm):
            self.zero_grad()
            return StepOutcome(stepped=False, skipped=True, grad_norm=norm)
        flips = []
        for module, gradient_NK in waiting:
            before_NK = module.codes()
            after_NK = self._update(group, module, gradient_NK)
            flips.append(torch.count_nonzero(after_NK != before_NK))
            module.set_codes(after_NK)
            module.control[STEP] += 1
            # ``model.zero_grad()``, by which many trainers clear, does not reach it.
            module.gradient = None
        return StepOutcome(grad_norm=norm, flips=sum(to_host(flips)))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all modules."""
        for module in self._modules.values():
            module.gradient = None

    def state_dict(self) -> dict[str, Any]:
        """Return moments, settings and pending gradients (none between steps)."""
        pending = {name: m.gradient for name, m in self._modules.items() if m.gradient is not None}
        return {**super().state_dict(), "gradients": pending}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        for name, module in self._modules.items():
            gradient = state_dict["gradients"].get(name)
            if gradient is not None:
                gradient = gradient.to(module.weight.device, copy=True)
            module.gradient = gradient


def direct_modules(optimizer: str, trainable: Trainable) -> dict[str, DirectLinear]:
    """Return the modules of the model ``direct`` in ``trainable``.

    Raises:
        ConfigError: there are none, or there are parts that this optimizer cannot train.
    """
    modules: dict[str, DirectLinear] = {
        name: module
        for name, module in trainable.stored.items()
        if isinstance(module, DirectLinear)
    }
    others = [*trainable.ternary, *trainable.floats]
    others += [name for name in trainable.stored if name not in modules]
    if others or not modules:
        found = f"not {others[0]!r}" if others else "and this model has none"
        raise ConfigError(
            f"optimizer: {optimizer} trains the linears of model direct, {found}",
            "Use `model: {name: direct}` with `optimizer: {name: split, ternary: "
            f"{optimizer}, float: adamw}}` and all four float_parts.",
        )
    return modules
