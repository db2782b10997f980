"""What the options of a loop ask of a model, beyond ``forward``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from arb_ternary.errors import ConfigError
from arb_ternary_train.precision import set_compute_dtype
from arb_ternary_train.protocols import ActivationCheckpointing, CarriesState

if TYPE_CHECKING:
    from arb_ternary_train.options import LoopOptions


def apply_model_options(model: nn.Module, options: LoopOptions, device: torch.device) -> None:
    """Have ``model`` do what ``options`` say, and no longer what an earlier phase asked for.

    Raises:
        ConfigError: it cannot do it.
    """
    set_compute_dtype(model, options.dtype, device)
    if isinstance(model, ActivationCheckpointing):
        model.set_activation_checkpointing(
            options.activation_checkpointing, options.activation_checkpoint_threshold
        )
    elif options.activation_checkpointing:
        raise _lacks(model, "activation_checkpointing", "set_activation_checkpointing")
    if isinstance(model, CarriesState):
        model.set_state_preservation(options.preserve_state)
    elif options.preserve_state:
        raise _lacks(model, "preserve_state", "set_state_preservation")


def _lacks(model: nn.Module, option: str, method: str) -> ConfigError:
    return ConfigError(
        f"{option}: the model {type(model).__name__} has no {method}()", f"Remove {option}."
    )


def to_device(tree: Any, device: torch.device) -> Any:
    """A tree of dicts, lists and tuples with its tensors on ``device``."""
    if isinstance(tree, Tensor):
        return tree.to(device)
    if isinstance(tree, Mapping):
        return {key: to_device(item, device) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(to_device(item, device) for item in tree)
    return tree
