"""The gradient of one micro-batch, taken out of a model, and the sum of several.

A wrapper takes the gradient of each micro-batch away from the parameters before the next one is
drawn, so that each can be examined (its norm, whether it is finite, its loss scale) and dropped by
itself. Sums are computed by the operation that autograd uses, in its order: they have the bits that
``parameter.grad`` would have.

A ternary module has no gradient tensor. It casts votes, which stay in its accumulators, and keeps
statistics of its gradient: the count of NaN, sums of squares and, with scaled votes, sums of
magnitudes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import define, field
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from arb_ternary.optim.protocol import inner_optimizers
from arb_ternary.optim.ternary import TernaryOptimizer, to_host
from arb_ternary.ternary.module import TernaryModule


def float_parameters(group: Mapping[str, Any]) -> list[Tensor]:
    """Return the parameters of a group that have gradients; packed ternary weights have none."""
    parameters: list[Tensor] = group["params"]
    return [parameter for parameter in parameters if _has_gradient(parameter)]


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def ternary_modules_of(optimizer: Optimizer, group: Mapping[str, Any]) -> list[TernaryModule]:
    """Return the ternary modules of a param group of ``optimizer`` or an optimizer inside it."""
    for part in inner_optimizers(optimizer):
        if isinstance(part, TernaryOptimizer):
            for index, own in enumerate(part.param_groups):
                if own is group:
                    return part.modules_of(index)
    return []


def on_host(scalars: Sequence[Tensor]) -> list[Tensor]:
    """Copy scalars to the host in one transfer per device; each keeps its dtype.

    Decisions can then read them at no cost, and compute with them in the gradients' precision.
    """
    # Doubles hold the numbers of every narrower dtype exactly.
    numbers = to_host([scalar.detach().double().reshape(()) for scalar in scalars])
    return [
        torch.tensor(number, dtype=scalar.dtype)
        for number, scalar in zip(numbers, scalars, strict=True)
    ]


def as_number(scalar: Tensor) -> float:
    """Return the number in a scalar tensor on the host."""
    (found,) = scalar.reshape(1).tolist()
    return float(found)


@define(eq=False)
class _Statistics:
    """``stats`` of a ternary module and, with scaled votes, its ``magnitudes``."""

    stats: Tensor
    magnitudes: Tensor | None

    def squares(self, module: TernaryModule) -> Tensor:
        return self.stats[1 : 1 + module.shape.out_features].sum().double()

    def tensors(self) -> list[Tensor]:
        return [self.stats] if self.magnitudes is None else [self.stats, self.magnitudes]


@define(eq=False)
class Gradients:
    """Gradients by parameter and statistics by ternary module, of one micro-batch or a sum."""

    floats: dict[Tensor, Tensor] = field(factory=dict)
    statistics: dict[TernaryModule, _Statistics] = field(factory=dict)

    @classmethod
    def take(cls, parameters: Sequence[Tensor], modules: Sequence[TernaryModule]) -> Gradients:
        """Move the gradients out of the model into a new object."""
        taken = cls()
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            parameter.grad = None
            gradient = gradient.detach()
            if gradient.is_sparse:
                gradient = gradient.coalesce()
            elif gradient.untyped_storage().nbytes() > gradient.numel() * gradient.element_size():
                # Part of a larger buffer: DistributedDataParallel writes to its buckets again.
                gradient = gradient.clone()
            taken.floats[parameter] = gradient
        for module in modules:
            magnitudes = None if module.magnitudes is None else module.magnitudes.clone()
            taken.statistics[module] = _Statistics(module.stats.clone(), magnitudes)
            module.clear_stats()
        return taken

    def add(self, other: Gradients) -> None:
        """Add ``other``; its tensors may become part of this sum."""
        for parameter, gradient in other.floats.items():
            total = self.floats.get(parameter)
            if total is None:
                self.floats[parameter] = gradient
            elif total.is_sparse and gradient.is_sparse:
                self.floats[parameter] = (total + gradient).coalesce()
            elif total.is_sparse:
                self.floats[parameter] = gradient + total
            else:
                total.add_(gradient)
        for module, statistics in other.statistics.items():
            own = self.statistics.get(module)
            if own is None:
                self.statistics[module] = statistics
            else:
                for total, part in zip(own.tensors(), statistics.tensors(), strict=True):
                    total.add_(part)

    def norm(self, parameters: Sequence[Tensor], modules: Sequence[TernaryModule]) -> Tensor:
        """Return the norm over parameters and modules together, a scalar tensor.

        For ternary modules only the squared norms of the micro-batches are known. Their sum takes
        the place of the squared norm of the sum, to which it is equal for independent noise.
        """
        norm: Tensor = get_total_norm(
            [_values(self.floats[p]) for p in parameters if p in self.floats]
        )
        squares = [
            self.statistics[module].squares(module)
            for module in modules
            if module in self.statistics
        ]
        if not squares:
            return norm
        total = torch.stack(squares).sum()
        return (norm.to(total.device, torch.float64).square() + total).sqrt()

    def first_fault(
        self, parameters: Sequence[Tensor], modules: Sequence[TernaryModule]
    ) -> str | None:
        """Describe the first gradient that is not finite; None if all are."""
        for index, parameter in enumerate(parameters):
            gradient = self.floats.get(parameter)
            if gradient is not None and not bool(_values(gradient).isfinite().all()):
                return f"the gradient of parameter {index}, shape {tuple(parameter.shape)}"
        for index, module in enumerate(modules):
            own = self.statistics.get(module)
            if own is None:
                continue
            if bool(own.stats[0] > 0) or not bool(own.squares(module).isfinite()):
                return (
                    f"the gradient of ternary module {index}, {module.shape.out_features} x "
                    f"{module.shape.in_features}"
                )
        return None

    def counted_nan(self) -> Tensor:
        """Return a scalar tensor that is not zero if a ternary module saw NaN.

        Norms of ternary modules do not show NaN.
        """
        seen = [own.stats[0] for own in self.statistics.values()]
        return torch.stack(seen).amax() if seen else torch.zeros(())

    def multiply(self, factor: Tensor) -> None:
        """Multiply the gradients of float parameters by a float32 scalar on any device."""
        for gradient in self.floats.values():
            _values(gradient).mul_(factor.to(gradient.device))

    def divide(self, draws: int) -> None:
        """Turn the sum of ``draws`` gradients of float parameters into their mean."""
        for gradient in self.floats.values():
            _values(gradient).div_(draws)

    def put_back(self) -> None:
        """Set these gradients in the model, as if one backward had computed them."""
        for parameter, gradient in self.floats.items():
            parameter.grad = gradient
        for module, own in self.statistics.items():
            module.stats.copy_(own.stats)
            if module.magnitudes is not None and own.magnitudes is not None:
                module.magnitudes.copy_(own.magnitudes)

    def state_dict(
        self, parameters: Sequence[Tensor], modules: Sequence[TernaryModule]
    ) -> dict[str, Any]:
        """Return the tensors by the position of their parameter or module."""
        return {
            "floats": {
                index: self.floats[p] for index, p in enumerate(parameters) if p in self.floats
            },
            "statistics": {
                index: self.statistics[module].tensors()
                for index, module in enumerate(modules)
                if module in self.statistics
            },
        }

    @classmethod
    def from_state(
        cls,
        state: Mapping[str, Any],
        parameters: Sequence[Tensor],
        modules: Sequence[TernaryModule],
    ) -> Gradients:
        """Copy what :meth:`state_dict` returned to the devices of parameters and modules."""
        loaded = cls()
        for index, gradient in state["floats"].items():
            parameter = parameters[int(index)]
            loaded.floats[parameter] = gradient.to(parameter.device, copy=True)
        for index, tensors in state["statistics"].items():
            module = modules[int(index)]
            stats, *rest = (tensor.to(module.stats.device, copy=True) for tensor in tensors)
            loaded.statistics[module] = _Statistics(stats, rest[0] if rest else None)
        return loaded


def _values(gradient: Tensor) -> Tensor:
    """Return the values of a dense or sparse gradient."""
    return gradient._values() if gradient.is_sparse else gradient
