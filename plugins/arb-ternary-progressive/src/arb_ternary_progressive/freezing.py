"""What learns and what does not, for float parameters, ternary modules and modules of other integer formats alike."""

from __future__ import annotations

from torch import nn

from arb_ternary.ternary.module import TernaryModule
from arb_ternary.ternary.stored import stored_modules

__all__ = ["set_learning"]


def set_learning(module: nn.Module, learns: bool) -> None:
    """Let everything in ``module`` learn, or nothing: no gradient for a float parameter, no vote for a trit.

    What a frozen module holds stays the same bit for bit. Gradients that it had are dropped, for an optimizer that was
    built before would still act on them.
    """
    for parameter in module.parameters():
        parameter.requires_grad_(learns)
        if not learns:
            parameter.grad = None
    for part in module.modules():
        if isinstance(part, TernaryModule):
            part.frozen = not learns
    for _, stored in stored_modules(module):
        stored.frozen = not learns
