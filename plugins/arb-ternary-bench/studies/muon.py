"""Muon for float weights, beside which votes of orthogonalised gradients stand: a plugin file for
the bench alone.

    arb bench quality --plugin plugins/arb-ternary-bench/studies/muon.py --rules
    bitnet_muon,float32_muon --jobs 2

torch's own Muon (Jordan et al., 2024) trains the matrices of the blocks, with a momentum in float32
and five rounds of orthogonalisation; AdamW trains embedding, head and vectors, as its authors have
it. Two rates, and four settings of them a recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import frozen
from attrs.validators import gt

from arb_ternary import hookimpl
from arb_ternary.config.options import option
from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import Trainable
from arb_ternary.specs import OptimizerSpec
from arb_ternary_bench.quality.protocol import Recipe, rate_for
from arb_ternary_bench.specs import RecipeSpec

ARB_API_VERSION = (1, 0)

#: Rates of Muon and of AdamW for 2,560 steps. Muon's steps are as large as AdamW's usually are.
RATES = ((2e-3, 4e-3), (4e-3, 4e-3), (8e-3, 4e-3), (16e-3, 4e-3))


@frozen(kw_only=True)
class MuonConfig:
    """Options of Muon beside AdamW."""

    lr: float = option(4e-3, "Learning rate of AdamW, at the start.", validator=gt(0.0))
    muon_lr: float = option(4e-3, "That of the matrices of the blocks.", validator=gt(0.0))
    weight_decay: float = option(0.01, "Of all matrices.")


class MuonAdamW(torch.optim.Optimizer):
    """Two optimizers of torch behind one: groups whose ``rule`` is ``muon``, and the others by
    AdamW.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        # They write their defaults into the groups, which become this object's.
        self._rules = {
            name: kind([group for group in groups if group["rule"] == name])
            for name, kind in (("muon", _muon), ("adamw", torch.optim.AdamW))
        }
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, rule in self._rules.items():
            # Groups and state are this object's own, which a scheduler and a checkpoint know.
            rule.param_groups = [group for group in self.param_groups if group["rule"] == name]
            rule.state = self.state
            rule.step()
        return loss


def _muon(groups: list[dict[str, Any]]) -> torch.optim.Muon:
    return torch.optim.Muon(groups, adjust_lr_fn="match_rms_adamw")


def build(config: MuonConfig, trainable: Trainable) -> MuonAdamW:
    """Factory of the optimizer ``muon``: matrices of blocks by Muon, all other float parameters by
    AdamW.

    Raises:
        ConfigError: there are no matrices in blocks.
    """
    named = trainable.floats
    hidden = {
        name for name, each in named.items() if each.dim() == 2 and name.startswith("blocks.")
    }
    if not hidden:
        raise ConfigError(
            "optimizer: muon trains the matrices of a decoder's blocks, and there are none",
            "use adamw",
        )
    others = [(name, each) for name, each in named.items() if name not in hidden]
    parts = (
        (
            "muon",
            config.muon_lr,
            config.weight_decay,
            [named[name] for name in named if name in hidden],
        ),
        ("adamw", config.lr, config.weight_decay, [each for _, each in others if each.dim() >= 2]),
        ("adamw", config.lr, 0.0, [each for _, each in others if each.dim() < 2]),
    )
    return MuonAdamW(
        [
            {"params": params, "lr": lr, "weight_decay": decay, "rule": rule, "kind": "float"}
            for rule, lr, decay, params in parts
            if params
        ]
    )


def _recipe(steps: int, model: dict[str, Any]) -> Recipe:
    return Recipe(
        overrides={
            "model": model,
            "optimizer": {"name": "muon"},
            "phase": {"lr_schedule": "linear"},
        },
        trials=tuple(
            {"optimizer": {"muon_lr": rate_for(steps, muon), "lr": rate_for(steps, adamw)}}
            for muon, adamw in RATES
        ),
        without=("model.group_size", "model.scale_rule"),
    )


def bitnet_muon(steps: int) -> Recipe:
    """Quantisation-aware training by Muon."""
    return _recipe(steps, {"name": "bitnet", "float_parts": ["embedding", "head", "linears"]})


def float32_muon(steps: int) -> Recipe:
    """Every part in float32, by Muon."""
    return _recipe(
        steps, {"float_parts": ["embedding", "head", "norms", "linears"], "activations": "float"}
    )


@hookimpl
def arb_register_optimizers() -> Sequence[OptimizerSpec]:
    return (
        OptimizerSpec(
            name="muon",
            target="muon:build",
            config="muon:MuonConfig",
            accepts=frozenset({"float"}),
            summary="Muon for the matrices of blocks, AdamW for the rest",
        ),
    )


@hookimpl
def arb_register_recipes() -> Sequence[RecipeSpec]:
    return (
        RecipeSpec(
            name="bitnet_muon",
            target="muon:bitnet_muon",
            summary="quantisation-aware training by Muon",
        ),
        RecipeSpec(
            name="float32_muon",
            target="muon:float32_muon",
            summary="every part in float32, by Muon",
        ),
    )
