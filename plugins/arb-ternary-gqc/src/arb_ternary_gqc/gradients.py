"""The gradient of one micro-batch, taken out of a model, and the sum of several.

A wrapper takes the gradient of each micro-batch away from the parameters before the next one is
drawn. So each can be looked at alone (its norm, whether it is finite, its loss scale) and dropped
alone. Sums are made by the operation that autograd uses, in its order: they have the bits that
``parameter.grad`` would have.

A ternary module has no gradient to take. It casts votes, which stay in its accumulators, and has
statistics of the gradient that never was a tensor: counts of NaN, sums of squares and, under scaled
votes, sums of magnitudes.
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
    """The parameters of a group that autograd gives gradients to; packed ternary weights are not
    among them.
    """
    return [
        parameter
        for parameter in group["params"]
        if parameter.is_floating_point() or parameter.is_complex()
    ]


def ternary_modules_of(optimizer: Optimizer, group: Mapping[str, Any]) -> list[TernaryModule]:
    """The ternary modules of a param group of ``optimizer``, which may belong to an optimizer
    inside it.
    """
    for part in inner_optimizers(optimizer):
        if isinstance(part, TernaryOptimizer):
            for index, own in enumerate(part.param_groups):
                if own is group:
                    return part.modules_of(index)
    return []


def on_host(scalars: Sequence[Tensor]) -> list[Tensor]:
    """The same numbers in tensors of the host, each of its own dtype, in one transfer a device.

    What decides on them may then read them as often as it likes, and computes with them in the
    gradients' precision.
    """
    # Doubles hold the numbers of every narrower dtype exactly.
    numbers = to_host([scalar.detach().double().reshape(()) for scalar in scalars])
    return [
        torch.tensor(number, dtype=scalar.dtype)
        for number, scalar in zip(numbers, scalars, strict=True)
    ]


def as_number(scalar: Tensor) -> float:
    """The number in a scalar tensor of the host."""
    (found,) = scalar.reshape(1).tolist()
    return float(found)


@define(eq=False)
class _Statistics:
    """Working memory of a ternary module: ``stats`` and, under scaled votes, ``magnitudes``."""

    stats: Tensor
    magnitudes: Tensor | None

    def squares(self, module: TernaryModule) -> Tensor:
        return self.stats[1 : 1 + module.shape.out_features].sum().double()

    def tensors(self) -> list[Tensor]:
        return [self.stats] if self.magnitudes is None else [self.stats, self.magnitudes]


@define(eq=False)
class Gradients:
    """Gradients by parameter, and statistics by ternary module; of one micro-batch, or a sum."""

    floats: dict[Tensor, Tensor] = field(factory=dict)
    statistics: dict[TernaryModule, _Statistics] = field(factory=dict)

    @classmethod
    def take(cls, parameters: Sequence[Tensor], modules: Sequence[TernaryModule]) -> Gradients:
        """Move what the last backward left into a new object; the model is left without
        gradients.
        """
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
                # Part of a larger buffer: DistributedDataParallel may have buckets that it writes
                # again.
                gradient = gradient.clone()
            taken.floats[parameter] = gradient
        for module in modules:
            magnitudes = None if module.magnitudes is None else module.magnitudes.clone()
            taken.statistics[module] = _Statistics(module.stats.clone(), magnitudes)
            module.clear_stats()
        return taken

    def add(self, other: Gradients) -> None:
        """Add ``other``, whose tensors may become part of this sum."""
        for parameter, gradient in other.floats.items():
            total = self.floats.get(parameter)
            if total is None:
                self.floats[parameter] = gradient
            elif total.is_sparse:
                self.floats[parameter] = (
                    (total + gradient).coalesce() if gradient.is_sparse else gradient + total
                )
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
        """Norm over the given parameters and modules together, a scalar tensor.

        The sum of several micro-batches is known of float parameters. Of ternary modules the
        squared norms of the micro-batches are, and their sum stands for the squared norm of the
        sum, as it is for independent noise.
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
        of_modules = torch.stack(squares).sum()
        return (norm.to(of_modules.device, torch.float64).square() + of_modules).sqrt()

    def first_fault(
        self, parameters: Sequence[Tensor], modules: Sequence[TernaryModule]
    ) -> str | None:
        """What is not finite in it, in words; None where everything is."""
        for index, parameter in enumerate(parameters):
            gradient = self.floats.get(parameter)
            if gradient is not None and not bool(_values(gradient).isfinite().all()):
                return f"the gradient of parameter {index}, shape {tuple(parameter.shape)}"
        for index, module in enumerate(modules):
            own = self.statistics.get(module)
            if own is not None and (
                bool(own.stats[0] > 0) or not bool(own.squares(module).isfinite())
            ):
                return (
                    f"the gradient of ternary module {index}, {module.shape.out_features} x "
                    f"{module.shape.in_features}"
                )
        return None

    def counted_nan(self) -> Tensor:
        """Whether a ternary module saw NaN, which its norm does not show; a scalar tensor, not zero
        where one did.
        """
        seen = [own.stats[0] for own in self.statistics.values()]
        return torch.stack(seen).amax() if seen else torch.zeros(())

    def multiply(self, factor: Tensor) -> None:
        """Multiply the gradients of float parameters by a scalar, float32, on any device."""
        for gradient in self.floats.values():
            _values(gradient).mul_(factor.to(gradient.device))

    def divide(self, draws: int) -> None:
        """Turn the sum of ``draws`` gradients of float parameters into their mean."""
        for gradient in self.floats.values():
            _values(gradient).div_(draws)

    def put_back(self) -> None:
        """Give the model these gradients, as if one backward had made them."""
        for parameter, gradient in self.floats.items():
            parameter.grad = gradient
        for module, own in self.statistics.items():
            module.stats.copy_(own.stats)
            if module.magnitudes is not None and own.magnitudes is not None:
                module.magnitudes.copy_(own.magnitudes)

    def state_dict(
        self, parameters: Sequence[Tensor], modules: Sequence[TernaryModule]
    ) -> dict[str, Any]:
        """The tensors, by position of the parameter or module."""
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
        """Copies of what :meth:`state_dict` gave, on the devices of the parameters and modules."""
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
    """The numbers of a gradient, dense or sparse."""
    return gradient._values() if gradient.is_sparse else gradient
