"""The hook surface as data: which hooks exist, what they take, and which of them register components."""

from __future__ import annotations

import inspect
from typing import Final

from attrs import frozen

from arb_ternary import hookspecs
from arb_ternary.specs import (
    BackendSpec,
    CheckSpec,
    CommandSpec,
    DataSpec,
    DocumentSpec,
    ExporterSpec,
    MaskingSpec,
    ModelSpec,
    OptimizerSpec,
    PhaseSpec,
    RecipeSpec,
    Spec,
    StarterSpec,
    TrackerSpec,
)

__all__ = ["HOOKS", "NOUNS", "OBSERVATION", "PREFIX", "REGISTRATION", "HookFacts", "describe_hooks"]

#: What the name of every hook begins with.
PREFIX: Final = "arb_"

#: Every hook, in the order of ``hookspecs``.
HOOKS: Final[tuple[str, ...]] = tuple(
    name for name, value in vars(hookspecs).items() if name.startswith(PREFIX) and callable(value)
)

#: The hooks that register components, and the spec that each of them returns.
REGISTRATION: Final[dict[str, type[Spec]]] = {
    "arb_register_backends": BackendSpec,
    "arb_register_optimizers": OptimizerSpec,
    "arb_register_masking": MaskingSpec,
    "arb_register_phases": PhaseSpec,
    "arb_register_models": ModelSpec,
    "arb_register_datasets": DataSpec,
    "arb_register_trackers": TrackerSpec,
    "arb_register_exporters": ExporterSpec,
    "arb_register_commands": CommandSpec,
    "arb_register_checks": CheckSpec,
    "arb_register_recipes": RecipeSpec,
    "arb_register_documents": DocumentSpec,
    "arb_register_starters": StarterSpec,
}

#: The hooks that an object on a run's manager can implement.
OBSERVATION: Final[tuple[str, ...]] = tuple(
    name for name in HOOKS if name not in REGISTRATION and name != "arb_plugin_info"
)

#: How messages speak of each kind of component.
NOUNS: Final[dict[str, str]] = {
    "backend": "backend",
    "optimizer": "optimizer",
    "masking": "masking strategy",
    "phase": "phase",
    "model": "model",
    "data": "data source",
    "tracker": "tracker",
    "exporter": "exporter",
    "command": "command",
    "check": "check",
    "recipe": "recipe",
    "document": "kind of config file",
    "starter": "starter config",
}


@frozen
class HookFacts:
    """A hook for listings.

    Attributes:
        name: the hook.
        group: ``registration``, ``information``, ``selection`` or ``observer``.
        arguments: names of the arguments; an implementation takes any subset of them.
        documentation: the docstring: when the hook is called, how often, and what None means.
    """

    name: str
    group: str
    arguments: tuple[str, ...]
    documentation: str

    @property
    def summary(self) -> str:
        """The first line of the documentation."""
        return self.documentation.partition("\n")[0]


def describe_hooks() -> tuple[HookFacts, ...]:
    """Every hook, in the order of ``hookspecs``."""
    return tuple(
        HookFacts(name, _group(name), tuple(inspect.signature(function).parameters), inspect.getdoc(function) or "")
        for name, function in ((name, getattr(hookspecs, name)) for name in HOOKS)
    )


def _group(hook: str) -> str:
    if hook in REGISTRATION:
        return "registration"
    return {"arb_plugin_info": "information", "arb_select_backend": "selection"}.get(hook, "observer")
