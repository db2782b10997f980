"""Hook implementations of the plugin of vote rules."""

from __future__ import annotations

from collections.abc import Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import OptimizerSpec, RecipeSpec

ARB_API_VERSION = (1, 1)


@hookimpl
def arb_register_optimizers() -> Sequence[OptimizerSpec]:
    return (
        OptimizerSpec(
            name="momentum_votes",
            target="arb_ternary_votes.momentum_votes:build",
            config="arb_ternary_votes.config:MomentumVotesConfig",
            summary="the accumulator is the momentum: flips past a threshold that keeps their number on a schedule",
            accepts=frozenset({"ternary"}),
        ),
    )


@hookimpl
def arb_register_recipes() -> Sequence[RecipeSpec]:
    return (
        RecipeSpec(
            name="momentum_votes",
            target="arb_ternary_votes.recipes:momentum_votes",
            summary="accumulators as momentum, flips on a schedule",
        ),
    )
