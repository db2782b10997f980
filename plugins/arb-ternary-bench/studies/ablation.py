"""Recipes that take the default rule apart: where the distance to float32 training comes from.

    arb bench quality --plugin plugins/arb-ternary-bench/studies/ablation.py --rules
    float32,scaled_votes,...

Each differs from ``float32`` or from ``scaled_votes`` in one thing. They are not installed with a
package, because nobody trains with them.
"""

from collections.abc import Sequence
from typing import Any

from attrs import evolve

from arb_ternary import hookimpl
from arb_ternary_bench.quality.protocol import Recipe
from arb_ternary_bench.quality.recipes import float32, scaled_votes, scaled_votes_pure
from arb_ternary_bench.quality.trials import merged
from arb_ternary_bench.specs import RecipeSpec

ARB_API_VERSION = (1, 0)


def _changed(recipe: Recipe, **changes: dict[str, Any]) -> Recipe:
    return evolve(recipe, overrides=merged(recipe.overrides, changes))


def float_weights_int8(steps: int) -> Recipe:
    """Float weights, int8 activations: what the precision of activations costs."""
    return _changed(float32(steps), model={"activations": "int8"})


def votes_float_activations(steps: int) -> Recipe:
    """The default rule with float activations: the same from the other side."""
    return _changed(scaled_votes(steps), model={"activations": "float"})


def votes_learned_exponents(steps: int) -> Recipe:
    """The default rule with exponents that learn by votes."""
    return _changed(scaled_votes(steps), model={"scale_rule": "residual"})


def votes_ternary_embedding(steps: int) -> Recipe:
    """The default rule with a ternary embedding; the head stays float."""
    return _changed(
        scaled_votes(steps), model={"float_parts": ["head"], "embedding_scale_rule": "frozen"}
    )


def votes_ternary_head(steps: int) -> Recipe:
    """The default rule with a ternary head; the embedding stays float."""
    return _changed(scaled_votes(steps), model={"float_parts": ["embedding"], "logit_scale": 1})


def pure_learned_exponents(steps: int) -> Recipe:
    """Pure ternary with exponents that learn, in the head and the embedding too."""
    return _changed(
        scaled_votes_pure(steps),
        model={"scale_rule": "residual", "embedding_scale_rule": "residual"},
    )


@hookimpl
def arb_register_recipes() -> Sequence[RecipeSpec]:
    recipes = (
        float_weights_int8,
        votes_float_activations,
        votes_learned_exponents,
        votes_ternary_embedding,
        votes_ternary_head,
        pure_learned_exponents,
    )
    return [
        RecipeSpec(
            name=recipe.__name__,
            target=f"ablation:{recipe.__name__}",
            summary=str(recipe.__doc__).split(".")[0],
        )
        for recipe in recipes
    ]
