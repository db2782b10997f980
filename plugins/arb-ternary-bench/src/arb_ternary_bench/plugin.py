"""What the bench registers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import CommandSpec, Spec
from arb_ternary_bench.specs import RecipeSpec

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "measurements of kernels, steps and rules, side by side"}


@hookimpl
def arb_register_kinds() -> Sequence[type[Spec]]:
    return (RecipeSpec,)


@hookimpl
def arb_register_recipes() -> Sequence[RecipeSpec]:
    return (
        RecipeSpec(
            name="momentum_votes",
            target="arb_ternary_bench.quality.recipes:momentum_votes",
            summary="accumulators as momentum, flips on a schedule",
        ),
        RecipeSpec(
            name="float32",
            target="arb_ternary_bench.quality.recipes:float32",
            summary="every part in float32, trained by AdamW",
        ),
        RecipeSpec(
            name="scaled_votes",
            target="arb_ternary_bench.quality.recipes:scaled_votes",
            summary="the default rule: votes as large as the gradient, rounded stochastically",
        ),
        RecipeSpec(
            name="scaled_votes_reset",
            target="arb_ternary_bench.quality.recipes:scaled_votes_reset",
            summary="the default rule without the carry: an accumulator starts again after a flip",
        ),
        RecipeSpec(
            name="scaled_votes_exact",
            target="arb_ternary_bench.quality.recipes:scaled_votes_exact",
            summary="the default rule in integers alone: int8 gradients, votes by shifts",
        ),
        RecipeSpec(
            name="scaled_votes_4bit_clipped",
            target="arb_ternary_bench.quality.recipes:scaled_votes_4bit_clipped",
            summary="4-bit accumulators, clipped gradients, a batch that doubles: 6 bits a weight",
        ),
        RecipeSpec(
            name="scaled_votes_4bit_gains",
            target="arb_ternary_bench.quality.recipes:scaled_votes_4bit_gains",
            summary="4-bit accumulators with that, gains of all norms and float factors of rows",
        ),
        RecipeSpec(
            name="scaled_votes_gains",
            target="arb_ternary_bench.quality.recipes:scaled_votes_gains",
            summary="orthogonalised gradients, gains of all norms and float factors of rows",
        ),
        RecipeSpec(
            name="scaled_votes_orthogonal",
            target="arb_ternary_bench.quality.recipes:scaled_votes_orthogonal",
            summary="the default rule, its gradients orthogonalised by half",
        ),
        RecipeSpec(
            name="scaled_votes_4bit",
            target="arb_ternary_bench.quality.recipes:scaled_votes_4bit",
            summary="the default rule with 4-bit accumulators",
        ),
        RecipeSpec(
            name="scaled_votes_2bit",
            target="arb_ternary_bench.quality.recipes:scaled_votes_2bit",
            summary="the default rule with no accumulator",
        ),
        RecipeSpec(
            name="scaled_votes_pure",
            target="arb_ternary_bench.quality.recipes:scaled_votes_pure",
            summary="the default rule for embedding and head too, with no float parameter",
        ),
        RecipeSpec(
            name="scaled_votes_pure_trits",
            target="arb_ternary_bench.quality.recipes:scaled_votes_pure_trits",
            summary="orthogonalised gradients for everything, gains and factors of rows of trits: "
            "no float parameter",
        ),
        RecipeSpec(
            name="sign_votes_3",
            target="arb_ternary_bench.quality.recipes:sign_votes_3",
            summary="sign votes, three of them to a flip at full rate",
        ),
        RecipeSpec(
            name="sign_votes_8",
            target="arb_ternary_bench.quality.recipes:sign_votes_8",
            summary="sign votes, eight of them to a flip at full rate",
        ),
        RecipeSpec(
            name="sign_votes_32",
            target="arb_ternary_bench.quality.recipes:sign_votes_32",
            summary="sign votes, thirty-two of them to a flip at full rate",
        ),
    )


@hookimpl
def arb_register_commands() -> Sequence[CommandSpec]:
    return (
        CommandSpec(
            name="bench",
            target="arb_ternary_bench.cli.bench:bench",
            summary="Measure configs and rules.",
        ),
        CommandSpec(
            name="backends.roofline",
            target="arb_ternary_bench.cli.roofline:roofline",
            summary="Say whose kernel an op is, and the least time it takes.",
        ),
    )
