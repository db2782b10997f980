"""The loss scale of a ``torch.amp.GradScaler``, as the optimizer of votes needs it.

A scaler multiplies the loss, so that float16 gradients do not vanish. It then divides the float
gradients in ``param_groups``, or tells the optimizer the scale, and looks for gradients that are
not finite. Votes are cast in backward, from scaled gradients. :class:`ScaleProbe` stands among the
float gradients to learn the scale and to report gradients of ternary weights that are not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class ScaleProbe(Tensor):
    """A gradient of 0 that notes what a scaler multiplies it by.

    A gradient of 0 is in no norm, and clipping leaves it.

    Attributes:
        finite: returns whether the gradients of all ternary weights are finite.
        factor: what the last call of a scaler multiplied by; None if there was none.
    """

    finite: Callable[[], bool]
    factor: float | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call ``func`` on plain tensors; note what the op of a scaler is given."""
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch._amp_foreach_non_finite_check_and_unscale_:
                gradients, found_inf, factor = args
                for gradient in gradients:
                    if isinstance(gradient, ScaleProbe):
                        gradient.factor = float(factor)
                        if not gradient.finite():
                            found_inf.fill_(1.0)
            return func(*args, **(kwargs or {}))


def new_probe(device: torch.device, finite: Callable[[], bool]) -> nn.Parameter:
    """Return a parameter whose gradient is a :class:`ScaleProbe`."""
    parameter = nn.Parameter(torch.zeros((), device=device))
    probe = torch.zeros((), device=device).as_subclass(ScaleProbe)
    probe.finite = finite
    probe.factor = None
    parameter.grad = probe
    return parameter


def unscale(parameters: Sequence[Tensor], scale: float) -> None:
    """Divide the gradients of ``parameters`` by ``scale``.

    Raises:
        ValueError: one is float16, as a scaler says.
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    if any(gradient.dtype == torch.float16 for gradient in gradients):
        raise ValueError(
            "GradScaler: gradients of float16 parameters cannot be unscaled; keep parameters in "
            "float32 and compute under torch.autocast"
        )
    if gradients:
        torch._foreach_mul_(gradients, 1.0 / scale)
