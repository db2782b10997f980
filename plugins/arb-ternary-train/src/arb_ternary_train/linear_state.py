"""What training keeps for the linear weights alone: embeddings, heads and norms would hide how the
rules differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import asdict, frozen
from torch import Tensor, nn
from torch.optim import Optimizer

from arb_ternary.optim.protocol import inner_optimizers
from arb_ternary.ternary.models import stored_modules
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_train.audit import audit, optimizer_state_bytes


@frozen
class LinearState:
    """Training state of the linear weights of a model's blocks.

    Attributes:
        weights: how many there are.
        state_bytes: what persists from step to step for them: weights, exponents, votes, moments.
        gradient_bytes: gradients between backward and step; votes need none.
    """

    weights: int
    state_bytes: int
    gradient_bytes: int

    @property
    def state_bits_per_weight(self) -> float:
        """Persistent training state in bits a weight; 0 where there is none."""
        return 8.0 * self.state_bytes / self.weights if self.weights else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return {**asdict(self), "state_bits_per_weight": self.state_bits_per_weight}


def linear_state(model: nn.Module, optimizer: Optimizer | None = None) -> LinearState:
    """Count the state of the linear weights in ``model.blocks``, or in all of a model that has no
    such attribute.

    A linear is a module that itself owns a matrix: a ternary module of more than one row, one with
    integer weights of another format, or a parameter of two or more dimensions. State of the
    optimizer that it does not hold for a parameter outside those modules counts as theirs, so that
    nothing is left out.
    """
    blocks = getattr(model, "blocks", model)
    linears = [module for module in blocks.modules() if _weights(module)]
    owned = {id(tensor) for module in linears for tensor in _own(module)}
    elsewhere: dict[int, Tensor] = {}
    for part in [] if optimizer is None else inner_optimizers(optimizer):
        for key, state in part.state.items():
            if isinstance(key, Tensor) and id(key) not in owned:
                elsewhere.update(
                    (id(value), value) for value in state.values() if isinstance(value, Tensor)
                )
    optimizer_bytes = optimizer_state_bytes(optimizer) - sum(
        value.nbytes for value in elsewhere.values()
    )
    # Modules in a list of their own are audited like a model; tied ones count once.
    alone = audit(nn.ModuleList(linears))
    return LinearState(
        weights=sum(_weights(module) for module in linears),
        state_bytes=sum(row.nbytes for row in alone.rows) + optimizer_bytes,
        gradient_bytes=sum(
            parameter.nbytes
            for parameter in {
                id(p): p for module in linears for p in module.parameters(recurse=False)
            }.values()
            if parameter.requires_grad
        )
        + sum(module.gradient_bytes for _, module in stored_modules(blocks)),
    )


def _own(module: nn.Module) -> Iterable[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _weights(module: nn.Module) -> int:
    """The matrix elements that a module itself owns."""
    stored = getattr(module, "stored_weights", None)
    if isinstance(stored, int):
        return stored
    if isinstance(module, TernaryModule):
        shape = module.shape
        return shape.out_features * shape.in_features if shape.out_features > 1 else 0
    return sum(p.numel() for p in module.parameters(recurse=False) if p.dim() >= 2)
