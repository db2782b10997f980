"""Replaces the float linears of a model."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from arb_ternary_text.models.parts import FloatLinear


def replace_linears(root: nn.Module, make: Callable[[FloatLinear], nn.Module]) -> None:
    """Replace every float linear in ``root`` by ``make(linear)``."""
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, FloatLinear):
                setattr(parent, name, make(child))
