"""Nowcasting: prediction of the weights some steps ahead from those of the last steps.

It follows Jang, Lee and Park, "Learning to Boost Training by Periodic Nowcasting Near Future
Weights", 2023, where a trained network predicts. Here the prediction is a line, which needs no
training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import Trainable
from arb_ternary_orchestrator.optim.base import wide
from arb_ternary_orchestrator.optim.config import NOT_TRITS, WrapperConfig, window_fault
from arb_ternary_orchestrator.optim.wrapper import FloatWrapper


class Nowcasting(FloatWrapper):
    """Every ``every`` steps moves each parameter to its predicted value ``horizon`` steps ahead.

    The prediction is made from the last ``window`` snapshots, ``spacing`` steps apart; the last one
    is taken at the step itself. Afterwards they are dropped, because a jump is no step of the
    trajectory. There is no jump before there are ``window`` snapshots, for example after loading
    the state of an optimizer with other settings.

    Args:
        inner: the optimizer that steps.
        every: steps between jumps.
        window: number of snapshots.
        spacing: steps between snapshots.
        horizon: steps that a jump predicts.
        trust_ratio: longest jump of a parameter, as a multiple of the distance between its first
            and its last snapshot; None = any.

    Attributes:
        steps: number of steps of the wrapped optimizer.
        jumps: number of jumps so far.

    Raises:
        ConfigError: ``inner`` trains integer weights, or the snapshots do not fit between two
            jumps.
    """

    only_floats: ClassVar[str] = NOT_TRITS

    def __init__(
        self,
        inner: Optimizer,
        *,
        every: int = 100,
        window: int = 5,
        spacing: int = 4,
        horizon: int = 10,
        trust_ratio: float | None = 1.0,
    ) -> None:
        super().__init__(inner)
        fault = window_fault(every, window, spacing)
        if fault is not None:
            raise ConfigError(f"Nowcasting: {fault}")
        self.every = every
        self.window = window
        self.spacing = spacing
        self.horizon = horizon
        self.trust_ratio = trust_ratio
        self.steps = 0
        self.jumps = 0

    @classmethod
    def build(cls, config: WrapperConfig, trainable: Trainable) -> Self:
        """Build the wrapper and the optimizer that it wraps.

        Raises:
            ConfigError: it would have to train integer weights.
        """
        for name in trainable.ternary:
            raise ConfigError(
                f"optimizer: nowcasting cannot train {name!r}: {NOT_TRITS}",
                "Use `optimizer: {name: split, ternary: ..., float: {name: nowcasting}}`.",
            )
        return super().build(config, trainable)

    def _after(self) -> None:
        self.steps += 1
        left = -self.steps % self.every
        if left % self.spacing == 0 and left // self.spacing < self.window:
            for parameter in self.parameters:
                self.state[parameter].setdefault("snapshots", []).append(parameter.detach().clone())
        if left > 0:
            return
        counts = [len(self.state[parameter]["snapshots"]) for parameter in self.parameters]
        if all(count == self.window for count in counts):
            for parameter in self.parameters:
                self._jump(parameter)
            self.jumps += 1
        self.state.clear()

    def _jump(self, parameter: Tensor) -> None:
        last = parameter.to(wide(parameter))
        # Elements that have not moved are exactly zero everywhere, so they keep their bits.
        snapshots = self.state[parameter]["snapshots"]
        behind = [snapshot.to(last.dtype) - last for snapshot in snapshots]
        jump = linear_jump(behind, self.horizon / self.spacing)
        if self.trust_ratio is not None:
            longest = behind[0].norm() * self.trust_ratio
            length = jump.norm()
            jump = torch.where(length > longest, jump * (longest / length), jump)
        parameter.copy_(last + jump)

    def _statistics(self) -> dict[str, float]:
        return {"jumps": float(self.jumps)}

    def _own_state(self) -> dict[str, Any]:
        return {"steps": self.steps, "jumps": self.jumps, "plan": self._plan}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        self.jumps = state["jumps"]
        if state["plan"] != self._plan:  # the snapshots have other distances than the next ones
            self.state.clear()

    @property
    def _plan(self) -> list[int]:
        return [self.every, self.window, self.spacing]

    def planned_state_bytes(self) -> int:
        """Return the bytes of the snapshots before a jump; the jump drops them."""
        return (self.window - 1) * sum(parameter.nbytes for parameter in self.parameters)


def linear_jump(behind: list[Tensor], ahead: float) -> Tensor:
    """Return the jump from the last of several equally spaced points along their least-squares
    line.

    Args:
        behind: the points relative to the last one, which is zero; oldest first.
        ahead: length of the jump in spacings.
    """
    count = len(behind)
    middle = (count - 1) / 2
    spread = sum((index - middle) ** 2 for index in range(count))
    jump = torch.zeros_like(behind[0])
    for index, point in enumerate(behind):
        jump.add_(point, alpha=1 / count + (index - middle) / spread * (count - 1 + ahead - middle))
    return jump
