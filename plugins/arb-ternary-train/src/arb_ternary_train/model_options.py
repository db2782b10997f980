"""Applies the options of a loop to its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from arb_ternary.errors import ConfigError
from arb_ternary_train.capabilities import carries_state, checkpoints_activations
from arb_ternary_train.precision import set_compute_dtype

if TYPE_CHECKING:
    from arb_ternary_train.options import LoopOptions


def apply_model_options(model: Any, options: LoopOptions, device: torch.device) -> None:
    """Apply ``options`` to ``model``, and undo what an earlier phase asked for.

    Raises:
        ConfigError: the model does not support an option.
    """
    set_compute_dtype(model, options.dtype, device)

    if checkpoints_activations(model):
        model.set_activation_checkpointing(
            options.activation_checkpointing, options.activation_checkpoint_threshold
        )
    elif options.activation_checkpointing:
        raise _unsupported(model, "activation_checkpointing", "set_activation_checkpointing")

    if carries_state(model):
        model.set_state_preservation(options.preserve_state)
    elif options.preserve_state:
        raise _unsupported(model, "preserve_state", "set_state_preservation")


def _unsupported(model: nn.Module, option: str, method: str) -> ConfigError:
    """Return the error for a model without the method that an option needs."""
    return ConfigError(
        f"{option}: the model {type(model).__name__} has no {method}()", f"Remove {option}."
    )


def to_device(tree: Any, device: torch.device) -> Any:
    """Return a tree of mappings, lists and tuples with its tensors on ``device``."""
    if isinstance(tree, Tensor):
        return tree.to(device)
    if isinstance(tree, Mapping):
        return {key: to_device(item, device) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(to_device(item, device) for item in tree)
    return tree
