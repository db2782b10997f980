"""Gradient norm rescaler: scale every gradient to the same norm."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, Final, Literal, Unpack

from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from arb_ternary_gqc.errors import WrapperOptionError
from arb_ternary_gqc.parts import CommonOptions, Draw
from arb_ternary_gqc.wrapper import OptimizerWrapper

#: Added to a norm that is divided by.
_EPSILON: Final = 1e-12


class GradientNormRescaler(OptimizerWrapper):
    """GNR: steps at every micro-batch, with gradients scaled to the target norm.

    Schedulers on the wrapper drive the target norm, initially 1.0. Only gradients of float
    parameters are scaled: votes are cast in backward and do not depend on a gradient's norm.

    Args:
        optimizer: the optimizer that steps.
        mode: ``"global"`` scales all gradients by one factor, ``"independent"`` scales the gradient
            of each parameter to the target.
        target_norm: initial target.
        per_group: give each param group of the inner optimizer a target of its own.
        options: see :class:`OptimizerWrapper`.
    """

    defers: ClassVar[bool] = False

    def __init__(
        self,
        optimizer: Optimizer,
        mode: Literal["global", "independent"] = "global",
        *,
        target_norm: float = 1.0,
        per_group: bool = False,
        **options: Unpack[CommonOptions],
    ) -> None:
        if mode not in ("global", "independent"):
            raise WrapperOptionError(f"gqc: mode must be 'global' or 'independent', not {mode!r}")
        super().__init__(
            optimizer, initial=target_norm, max_batch_draws=1, per_group=per_group, **options
        )
        self.mode = mode
        if self._modules and not self._parameters:
            warnings.warn(
                "GradientNormRescaler: all parameters are ternary, and rescaling a gradient does "
                "not change the votes that it casts: the wrapper has no effect",
                stacklevel=2,
            )

    @property
    def target_norm(self) -> float:
        """The current target of the first group."""
        return float(self.param_groups[0]["lr"])

    def _wants_step(self, draw: Draw) -> bool:
        self._measure(draw.norm)
        return True

    def _before_step(self) -> None:
        for portion in self._portions():
            gradients = [self._sum.floats[p] for p in portion.parameters if p in self._sum.floats]
            if self.mode == "global":
                _rescale(gradients, portion.group["lr"])
            else:
                for gradient in gradients:
                    _rescale([gradient], portion.group["lr"])

    def _own_statistics(self) -> dict[str, Any]:
        return {"target_norm": self.target_norm, "mode": self.mode}


def _rescale(gradients: list[Tensor], target: float) -> None:
    values = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
    factor = target / (get_total_norm(values) + _EPSILON)
    for value in values:
        value.mul_(factor.to(value.device))
