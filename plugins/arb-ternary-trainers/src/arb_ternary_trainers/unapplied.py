"""Warn when an optimizer steps and leaves the votes of ternary weights where they are.

A trainer that makes an optimizer of its own, from ``model.parameters()``, trains the float
parameters only: the votes pile up, and the ternary weights never change.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.module import OPTIMIZERS, TernaryModule

_WATCHED: Final[WeakKeyDictionary[nn.Module, list[TernaryModule]]] = WeakKeyDictionary()


def watch(model: nn.Module) -> None:
    """Warn whenever an optimizer of float parameters of ``model`` leaves votes of ``model``."""
    _register()
    _WATCHED[model] = [module for _, module in ternary_modules(model)]


@cache
def _register() -> None:
    register_optimizer_step_post_hook(_warn)


def _warn(optimizer: Optimizer, *_: Any) -> None:
    """Warn if ternary weights of the model of ``optimizer`` have votes and no optimizer."""
    for model, modules in list(_WATCHED.items()):
        unapplied = [module for module in modules if _is_unapplied(module)]
        if not unapplied:
            continue
        own = {id(parameter) for parameter in model.parameters()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            continue
        warnings.warn(
            f"{len(unapplied)} ternary weights have cast votes that no optimizer applies: "
            f"{type(optimizer).__name__} trains float parameters only. Train them with "
            f"arb_ternary.make_optimizer(model), or freeze them: layer.ternary.frozen = True",
            stacklevel=3,
        )


def _is_unapplied(module: TernaryModule) -> bool:
    optimizer = OPTIMIZERS.get(module)
    has_optimizer = optimizer is not None and optimizer() is not None
    return not has_optimizer and not module.frozen and module.casts > 0
