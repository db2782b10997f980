"""What training asks of a model beyond ``forward``, all of it optional.

``set_activation_checkpointing(enabled, threshold)``, ``set_state_preservation(enabled)``, and, for a model that carries
state from one batch to the next, ``runtime_state()`` and ``load_runtime_state(state)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from arb_ternary.errors import ConfigError

__all__ = ["call_if_wanted", "load_runtime_state", "runtime_state"]


def call_if_wanted(model: nn.Module, method: str, wanted: bool, option: str, arguments: tuple[Any, ...]) -> None:
    """Call ``model.method(*arguments)``, also to switch off what an earlier phase has switched on.

    Raises:
        ConfigError: the option is wanted and the model does not have the method.
    """
    found = getattr(model, method, None)
    if found is not None:
        found(*arguments)
    elif wanted:
        raise ConfigError(f"{option}: the model {type(model).__name__} has no {method}()", f"Remove {option}.")


def runtime_state(model: nn.Module) -> Any:
    """What the next batch continues; None when nothing."""
    found = getattr(model, "runtime_state", None)
    return None if found is None else found()


def load_runtime_state(model: nn.Module, state: Any, device: torch.device) -> None:
    """Continue from :func:`runtime_state`, with its tensors on ``device``."""
    if state is not None:
        model.load_runtime_state(_to_device(state, device))  # type: ignore[operator]


def _to_device(tree: Any, device: torch.device) -> Any:
    if isinstance(tree, Tensor):
        return tree.to(device)
    if isinstance(tree, Mapping):
        return {key: _to_device(item, device) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_to_device(item, device) for item in tree)
    return tree
