"""Hook implementations of the gradient quality control plugin."""

from __future__ import annotations

from collections.abc import Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import OptimizerSpec

ARB_API_VERSION = (1, 0)

_SUMMARIES = {
    "gnts": "wrapper: draws micro-batches until the norm of the mean gradient is below a threshold",
    "gnr": "wrapper: scales every gradient to a target norm",
    "sbc": "wrapper: draws micro-batches up to a scheduled batch size",
    "mht": "wrapper: draws micro-batches until a t-test finds the mean loss precise enough",
    "gns": "wrapper: draws micro-batches until the gradient noise scale is small enough",
}


@hookimpl
def arb_register_optimizers() -> Sequence[OptimizerSpec]:
    return tuple(
        OptimizerSpec(
            name=f"gqc.{name}",
            target="arb_ternary_gqc.build:build",
            config=f"arb_ternary_gqc.config:{name.upper()}Config",
            summary=summary,
            accepts=frozenset({"ternary", "float"}),
        )
        for name, summary in _SUMMARIES.items()
    )
