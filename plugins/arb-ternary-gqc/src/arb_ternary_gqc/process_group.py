"""Communication between the ranks of a process group, so that all of them decide alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.errors import ConfigError
from arb_ternary_gqc.gradients import Gradients


@frozen(eq=False)
class ProcessGroup:
    """A process group, or a single process if ``group`` is None.

    Attributes:
        group: of ``torch.distributed``.
        device: device of the messages, that of the model.
        local_gradients: each rank has its own gradient after backward (``no_sync``), and the
            wrapper averages them.
    """

    group: Any = None
    device: str | torch.device = "cpu"
    local_gradients: bool = False

    @classmethod
    def join(
        cls, group: Any, local_gradients: bool, parameters: Sequence[Tensor], modules: Sequence[Any]
    ) -> ProcessGroup:
        """Return the process group for a wrapper of these parameters and ternary modules.

        Raises:
            ConfigError: the combination cannot work.
        """
        if group is None:
            if local_gradients:
                raise ConfigError("gqc: local_gradients needs the process_group to average over")
            return cls()
        if modules:
            raise ConfigError(
                "gqc: process_group: ternary modules vote on the gradient of their own rank, but "
                "votes are not reduced over ranks",
                "Train ternary modules in one process.",
            )
        return cls(group, parameters[0].device if parameters else "cpu", local_gradients)

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on some rank."""
        if self.group is None:
            return flag
        return bool(self._reduced(torch.tensor(int(flag), device=self.device), "MAX"))

    def all(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on every rank."""
        return not self.any(not flag)

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return the mean over ranks of each number."""
        if self.group is None or not values:
            return list(values)
        total = self._reduced(torch.tensor(values, dtype=torch.float64, device=self.device), "SUM")
        return [float(value) for value in total / self._size()]

    def average(self, gradients: Gradients, parameters: Sequence[Tensor]) -> None:
        """Replace every gradient of a float parameter by its mean over ranks.

        A parameter without a gradient on this rank counts as zero if another rank has one.
        """
        present = torch.tensor(
            [parameter in gradients.floats for parameter in parameters], dtype=torch.int32
        )
        somewhere = self._reduced(present.to(self.device), "MAX").tolist()
        for parameter, found in zip(parameters, somewhere, strict=True):
            if not found:
                continue
            gradient = gradients.floats.get(parameter)
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            dense = gradient.to_dense() if gradient.is_sparse else gradient.contiguous()
            gradients.floats[parameter] = self._reduced(dense, "SUM").div_(self._size())

    def _size(self) -> int:
        return int(torch.distributed.get_world_size(self.group))

    def _reduced(self, value: Tensor, operation: str) -> Tensor:
        op = getattr(torch.distributed.ReduceOp, operation)
        torch.distributed.all_reduce(value, op=op, group=self.group)
        return value
