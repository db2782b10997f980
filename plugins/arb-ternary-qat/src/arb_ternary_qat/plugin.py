"""Hook implementations of the plugin of baselines."""

from __future__ import annotations

from collections.abc import Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import ModelSpec, OptimizerSpec

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_register_models() -> Sequence[ModelSpec]:
    return (
        ModelSpec(
            name="bitnet",
            target="arb_ternary_qat.bitnet:build",
            config="arb_ternary_qat.config:BitnetConfig",
            summary="the decoder with BitNet b1.58 linears: float master weights, ternary in the "
            "forward pass",
        ),
        ModelSpec(
            name="bitnet_of",
            target="arb_ternary_qat.bitnet:build_of",
            config="arb_ternary_qat.config:BitnetOfConfig",
            summary="another model, such as vit, with BitNet b1.58 linears outside its head",
        ),
    )


@hookimpl
def arb_register_optimizers() -> Sequence[OptimizerSpec]:
    return (
        OptimizerSpec(
            name="bitnet_adamw",
            target="arb_ternary_qat.bitnet_adamw:build",
            config="arb_ternary_qat.config:BitnetAdamWConfig",
            summary="AdamW whose weight decay stops after a number of steps, as in the BitNet "
            "recipe",
            accepts=frozenset({"float"}),
        ),
    )
