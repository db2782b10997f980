"""The loss scale of a ``torch.amp.GradScaler``, as the optimizer of votes needs it.

A scaler multiplies the loss, so that float16 gradients do not vanish. It then divides the float
gradients in ``param_groups`` and looks for gradients that are not finite; if there are any, it does
not call ``step``. Votes are cast in backward, from scaled gradients. :class:`ScaleProbe` stands
among the float gradients to learn the scale, to report gradients of ternary weights that are not
finite, and to drop the votes of a step that will be skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn


class ScaleProbe(Tensor):
    """A gradient of 0 that notes what a scaler multiplies it by.

    A gradient of 0 is in no norm, and clipping leaves it.

    Attributes:
        finite: returns whether the gradients of all ternary weights are finite. The probe is a
            gradient, through which garbage collection does not see: its references are weak.
        skip: drops the votes of the step.
        factor: what the last call of a scaler multiplied by; None if there was none.
    """

    finite: WeakMethod[Callable[[], bool]]
    skip: WeakMethod[Callable[[], None]]
    factor: float | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call ``func`` on plain tensors; note what the op of a scaler is given."""
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            if func is torch._amp_foreach_non_finite_check_and_unscale_:
                gradients, found_inf, factor = args
                for gradient in gradients:
                    if isinstance(gradient, ScaleProbe):
                        gradient.note(found_inf, float(factor))
            return found

    def note(self, found_inf: Tensor, factor: float) -> None:
        """Note the factor, and complete ``found_inf``: 1 if a gradient is not finite, else 0."""
        self.factor = factor
        finite = self.finite()
        skip = self.skip()
        assert finite is not None
        assert skip is not None
        if not finite():
            found_inf.fill_(1.0)
        if bool(found_inf):
            skip()


def new_probe(
    device: torch.device, finite: Callable[[], bool], skip: Callable[[], None]
) -> nn.Parameter:
    """Return a parameter whose gradient is a :class:`ScaleProbe`; both callables are methods."""
    parameter = nn.Parameter(torch.zeros((), device=device))
    probe = torch.zeros((), device=device).as_subclass(ScaleProbe)
    probe.finite = WeakMethod(finite)
    probe.skip = WeakMethod(skip)
    probe.factor = None
    parameter.grad = probe
    return parameter
