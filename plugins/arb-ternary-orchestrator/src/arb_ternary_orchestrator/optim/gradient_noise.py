"""Noise on gradients: Neelakantan et al., "Adding Gradient Noise Improves Learning for Very Deep
Networks", 2015.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from arb_ternary_orchestrator.optim.wrapper import FloatWrapper


class GradientNoise(FloatWrapper):
    """Adds Gaussian noise of variance ``eta / (1 + t)**gamma`` to every gradient before step ``t``
    (from 0).

    An update with a gradient that is not finite is dropped whole, and no noise is drawn for it.

    Args:
        inner: the optimizer that steps.
        eta: variance at the first step.
        gamma: exponent of its decay.
        seed: seed of the noise. Each device has a generator of its own with this seed.

    Attributes:
        steps: number of steps so far.
    """

    refuses: ClassVar[bool] = True

    def __init__(
        self, inner: Optimizer, *, eta: float = 0.01, gamma: float = 0.55, seed: int = 0
    ) -> None:
        super().__init__(inner)
        self.eta = eta
        self.gamma = gamma
        self.seed = seed
        self.steps = 0
        self._generators: dict[str, torch.Generator] = {}

    def deviation(self, step: int) -> float:
        """Return the standard deviation of the noise of a step, counted from 0."""
        return float((self.eta / (1 + step) ** self.gamma) ** 0.5)

    def _generator(self, device: str) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]

    def _before(self, parameters: list[Tensor], norms: list[float]) -> None:
        for parameter in parameters:
            gradient = parameter.grad
            assert gradient is not None
            noise = torch.randn(
                gradient.shape,
                generator=self._generator(str(gradient.device)),
                device=gradient.device,
                dtype=torch.float32,
            )
            gradient.copy_(gradient + noise.mul_(self.deviation(self.steps)))
        self.steps += 1

    def _statistics(self) -> dict[str, float]:
        return {"noise": self.deviation(max(0, self.steps - 1))}

    def _own_state(self) -> dict[str, Any]:
        generators = {
            device: generator.get_state() for device, generator in self._generators.items()
        }
        return {"steps": self.steps, "generators": generators}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        self._generators = {}
        for device, saved in state["generators"].items():
            self._generator(device).set_state(saved.cpu())

    def planned_state_bytes(self) -> int:
        """Return the bytes of the generators' states."""
        devices = {str(parameter.device) for parameter in self.parameters}
        return sum(self._generator(device).get_state().nbytes for device in devices)
