"""Training state of the linear weights alone.

Embeddings, heads and norms would hide how training rules differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import asdict, frozen
from torch import Tensor, nn
from torch.optim import Optimizer

from arb_ternary.optim.protocol import inner_optimizers
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_train.audit import audit, optimizer_state_bytes


@frozen
class LinearState:
    """Training state of the linear weights of a model's blocks.

    Attributes:
        weights: number of these weights.
        state_bytes: what persists from step to step: weights, exponents, votes, moments.
        gradient_bytes: gradients between backward and step; votes need none.
    """

    weights: int
    state_bytes: int
    gradient_bytes: int

    @property
    def state_bits_per_weight(self) -> float:
        """Persistent training state in bits per weight; 0 if there is no weight."""
        return 8.0 * self.state_bytes / self.weights if self.weights else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers."""
        return {**asdict(self), "state_bits_per_weight": self.state_bits_per_weight}


def linear_state(model: nn.Module, optimizer: Optimizer | None = None) -> LinearState:
    """Count the state of the linear weights in ``model.blocks``, or in the whole model without it.

    A linear is a module that itself owns a matrix: a ternary module of more than one row, or a
    parameter of two or more dimensions. State of the optimizer counts as theirs unless the
    optimizer holds it for a parameter outside these modules.
    """
    blocks = getattr(model, "blocks", model)
    linears = [module for module in blocks.modules() if _weights(module)]
    owned = {id(tensor) for module in linears for tensor in _own_tensors(module)}

    # Modules in a list of their own are audited like a model; tied modules count once.
    alone = audit(nn.ModuleList(linears))
    optimizer_bytes = optimizer_state_bytes(optimizer) - _bytes_elsewhere(optimizer, owned)

    parameters = {}
    for module in linears:
        for parameter in module.parameters(recurse=False):
            parameters[id(parameter)] = parameter
    gradient_bytes = sum(each.nbytes for each in parameters.values() if each.requires_grad)

    return LinearState(
        weights=sum(_weights(module) for module in linears),
        state_bytes=sum(row.nbytes for row in alone.rows) + optimizer_bytes,
        gradient_bytes=gradient_bytes,
    )


def _bytes_elsewhere(optimizer: Optimizer | None, owned: set[int]) -> int:
    """Return the bytes that ``optimizer`` keeps for parameters other than those ``owned``."""
    if optimizer is None:
        return 0
    elsewhere: dict[int, Tensor] = {}
    for part in inner_optimizers(optimizer):
        for key, state in part.state.items():
            if not isinstance(key, Tensor) or id(key) in owned:
                continue
            for value in state.values():
                if isinstance(value, Tensor):
                    elsewhere[id(value)] = value
    return sum(value.nbytes for value in elsewhere.values())


def _own_tensors(module: nn.Module) -> Iterable[Tensor]:
    """Yield the tensors that a module itself owns."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _weights(module: nn.Module) -> int:
    """Return how many matrix elements a module itself owns."""
    if isinstance(module, TernaryModule):
        shape = module.shape
        return shape.out_features * shape.in_features if shape.out_features > 1 else 0
    return sum(p.numel() for p in module.parameters(recurse=False) if p.dim() >= 2)
