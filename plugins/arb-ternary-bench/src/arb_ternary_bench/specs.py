"""The kind of component that the bench adds."""

from __future__ import annotations

from attrs import frozen

from arb_ternary.specs import Spec


@frozen(kw_only=True)
class RecipeSpec(Spec):
    """A way of training that ``arb bench quality`` measures. Factory: ``(steps: int) -> Recipe``.

    ``steps`` is the number of optimizer steps of the run that the recipe is for.
    """

    kind = "recipe"
    hook = "arb_register_recipes"
    noun = "recipe"
