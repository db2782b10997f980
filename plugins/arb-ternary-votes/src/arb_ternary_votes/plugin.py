"""Registers the vote rules."""

from __future__ import annotations

from collections.abc import Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import OptimizerSpec

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_register_optimizers() -> Sequence[OptimizerSpec]:
    return (
        OptimizerSpec(
            name="scaled_votes",
            target="arb_ternary_votes.scaled_votes:build",
            config="arb_ternary_votes.config:ScaledVotesConfig",
            accepts=frozenset({"ternary"}),
            auto_rate="arb_ternary_votes.rate:rate_of",
            summary="votes as large as the gradient, rounded stochastically; the default",
        ),
        OptimizerSpec(
            name="sign_votes",
            target="arb_ternary_votes.sign_votes:build",
            config="arb_ternary_votes.config:SignVotesConfig",
            accepts=frozenset({"ternary"}),
            summary="votes in 8-bit accumulators; a full accumulator flips a trit",
        ),
        OptimizerSpec(
            name="momentum_votes",
            target="arb_ternary_votes.momentum_votes:build",
            config="arb_ternary_votes.config:MomentumVotesConfig",
            summary="the accumulator is the momentum: flips past a threshold that keeps their "
            "number on a schedule",
            accepts=frozenset({"ternary"}),
        ),
    )
