"""Puts another kind of linear where core's decoder made a float one."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from arb_ternary_text.models.parts import FloatLinear


def replace_linears(root: nn.Module, make: Callable[[FloatLinear], nn.Module]) -> None:
    """Put ``make(linear)`` in the place of every float linear in ``root``."""
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, FloatLinear):
                setattr(parent, name, make(child))
