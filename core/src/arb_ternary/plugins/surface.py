"""The hook surface as data: which hooks there are, what they take, and where they are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final

from attrs import frozen

from arb_ternary import hookspecs
from arb_ternary.specs import Spec

__all__ = ["OBSERVATION", "PREFIX", "STATED", "HookFacts", "describe_hooks", "registration_hooks"]

#: What the name of every hook begins with.
PREFIX: Final = "arb_"
_GROUPS: Final = {
    "arb_register_kinds": "registration",
    "arb_plugin_info": "information",
    "arb_select_backend": "selection",
}
#: The hooks of ``hookspecs`` by name.
STATED: Final[dict[str, Callable[..., Any]]] = {
    name: value for name, value in vars(hookspecs).items() if name.startswith(PREFIX)
}

#: The hooks that an object on a run's manager can implement.
OBSERVATION: Final = tuple(name for name in STATED if _GROUPS.get(name, "observer") in ("observer", "selection"))


@frozen
class HookFacts:
    """A hook for listings.

    Attributes:
        name: the hook.
        group: ``registration``, ``information``, ``selection`` or ``observer``.
        arguments: names of the arguments; an implementation takes any subset of them.
        documentation: when the hook is called, how often, and what None means.
    """

    name: str
    group: str
    arguments: tuple[str, ...]
    documentation: str


def registration_hooks(kinds: Iterable[type[Spec]]) -> dict[str, Callable[..., Any]]:
    """The hook specifications of kinds of component, by name."""

    def specification(kind: type[Spec]) -> Callable[[], None]:
        def hook() -> None: ...

        hook.__doc__ = (
            f"Components of the kind `{kind.kind}` ({kind.noun}): a sequence of `{kind.__name__}`. Called once at "
            "load; an empty sequence or None means none."
        )
        return hookspecs.hookspec(hook)

    return {kind.hook: specification(kind) for kind in kinds}


def describe_hooks(kinds: Iterable[type[Spec]]) -> tuple[HookFacts, ...]:
    """Every hook of a program that knows ``kinds``: those of the kinds, then those of ``hookspecs``."""
    hooks: dict[str, Callable[..., Any]] = {**registration_hooks(kinds), **STATED}
    return tuple(
        HookFacts(
            name,
            _GROUPS.get(name, "observer") if name in STATED else "registration",
            tuple(inspect.signature(hook).parameters),
            inspect.getdoc(hook) or "",
        )
        for name, hook in hooks.items()
    )
