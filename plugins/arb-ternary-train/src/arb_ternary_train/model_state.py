"""A model's state dict, made and loaded one module at a time.

``state_dict()`` of a model encodes all its ternary weights before the first can be written: a
second copy of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from arb_ternary.ternary.encoding import bytes_per_row
from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.module import TernaryModule


@frozen(eq=False)
class ModelState:
    """The state dict of ``model``, its names and tensors in the order of ``model.state_dict()``."""

    model: nn.Module

    def outlines(self) -> Iterator[tuple[str, Tensor]]:
        """Name and a tensor of the kind and shape of each; nothing is encoded."""
        for unit in state_units(self.model):
            yield from unit_outline(*unit).items()

    def parts(self) -> Iterator[Mapping[str, Tensor]]:
        """The tensors of one module after another."""
        for unit in state_units(self.model):
            yield unit_state(*unit)


def load_parts(
    model: nn.Module, tensors: Mapping[str, Tensor], kept: frozenset[str] = frozenset()
) -> None:
    """``model.load_state_dict(tensors)`` for the names, shapes and kinds of its own, each tensor
    asked for once.

    Those of the names ``kept`` are not asked for, and stay as they are.
    """
    for module, prefix, whole in state_units(model):
        names = [*unit_outline(module, prefix, whole)]
        if names and kept.issuperset(names):
            continue
        own = {} if kept.isdisjoint(names) else unit_state(module, prefix, whole)
        part = {name: own[name] if name in kept else tensors[name] for name in names}
        if whole:
            module.load_state_dict(
                {name.removeprefix(prefix): tensor for name, tensor in part.items()}
            )
            continue
        faults: list[str] = []
        module._load_from_state_dict(part, prefix, {}, True, [], [], faults)
        if faults:
            raise RuntimeError("\n".join(faults))


def names_left_out(model: nn.Module) -> frozenset[str]:
    """What a state dict of ``model`` lacks: the accumulators of modules that were made without
    them.
    """
    modules = ternary_modules(model)
    return frozenset(
        f"{name}.votes" if name else "votes" for name, module in modules if not module.accumulates
    )


def state_units(module: nn.Module, prefix: str = "") -> Iterator[tuple[nn.Module, str, bool]]:
    """Yield the modules in their order: module, prefix of its names, and whether it is whole.

    A whole module is saved together with its children, because it customises its state dict.
    """
    kind = type(module)
    saving = module._state_dict_pre_hooks or module._state_dict_hooks
    loading = module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks
    whole = bool(saving or loading) or kind.state_dict is not nn.Module.state_dict
    whole = whole or kind.load_state_dict is not nn.Module.load_state_dict
    yield module, prefix, whole
    for name, child in () if whole else module._modules.items():
        if child is not None:
            yield from state_units(child, f"{prefix}{name}.")


def unit_state(module: nn.Module, prefix: str, whole: bool) -> dict[str, Any]:
    """Return what a unit adds to the state dict."""
    if whole:
        return module.state_dict(prefix=prefix)
    found: dict[str, Any] = {}
    module._save_to_state_dict(found, prefix, False)
    return found


def unit_outline(module: nn.Module, prefix: str, whole: bool) -> dict[str, Any]:
    """Return :func:`unit_state` with tensors on the device "meta" where encoding takes time."""
    if whole or type(module)._save_to_state_dict is not TernaryModule._save_to_state_dict:
        return unit_state(module, prefix, whole)
    assert isinstance(module, TernaryModule)
    found: dict[str, Any] = {}
    nn.Module._save_to_state_dict(module, found, prefix, False)
    rows = module.shape.out_features
    columns = module.shape.in_features
    packed = torch.empty(rows, bytes_per_row(columns), dtype=torch.uint8, device="meta")
    votes = torch.empty(rows, columns, dtype=torch.int8, device="meta")
    found[prefix + "weight"] = packed
    if module.accumulates:
        found[prefix + "votes"] = packed if module.shape.vote_bits == 2 else votes
    return found
