"""Freeze a model but for one part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from arb_ternary.ternary.models import StoredWeights, stored_modules, ternary_modules
from arb_ternary.ternary.module import TernaryModule

__all__ = ["only_learning"]


@contextmanager
def only_learning(model: nn.Module, part: nn.Module) -> Iterator[None]:
    """Within the block nothing of ``model`` learns but what learns in ``part``; afterwards everything is as before."""
    inside = set(part.modules())
    own = set(part.parameters())
    there: list[TernaryModule | StoredWeights] = [module for _, module in ternary_modules(model)]
    there += [module for _, module in stored_modules(model)]
    modules = [module for module in there if not module.frozen and module not in inside]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter not in own]
    for module in modules:
        module.frozen = True
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for module in modules:
            module.frozen = False
        for parameter in parameters:
            parameter.requires_grad_(True)
