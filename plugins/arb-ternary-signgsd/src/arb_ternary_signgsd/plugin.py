"""Hook implementations of the SignGSD plugin."""

from __future__ import annotations

from collections.abc import Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import OptimizerSpec

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_register_optimizers() -> Sequence[OptimizerSpec]:
    return (
        OptimizerSpec(
            name="signgsd",
            target="arb_ternary_signgsd.optimizer:build",
            config="arb_ternary_signgsd.config:SignGSDConfig",
            summary="p -= lr * (sign(g) + weight_decay * sign(p)), no optimizer state",
            accepts=frozenset({"ternary", "float"}),
        ),
    )
