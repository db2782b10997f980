"""How a config class declares its options: a default, one line of help, and what values are
allowed.

A config class is an ordinary frozen attrs class::

    @frozen(kw_only=True)
    class DecayConfig:
        rate: float = option(0.1, "share that is lost a step", validator=fraction)
        after: int | None = option(None, "first step that decays; null = never",
            validator=optional(positive))

Types say what a value may be (``config.structure`` lists the supported ones), validators which
values of that type. The help text appears in ``arb config new``, in the JSON Schema and in the
reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import attrs
from attrs import NOTHING, frozen
from attrs.validators import optional as optional  # noqa: PLC0414 (public here: every config class needs it)

T = TypeVar("T")

#: Key of the help text in an attrs field's metadata.
HELP = "help"
#: Key of the component that stands in when a file does not name one, in an attrs field's metadata.
DEFAULT_CHOICE = "default_choice"


@overload
def option(default: T, help: str, *, validator: Any = ..., converter: Any = ...) -> T: ...
@overload
def option(
    *, help: str, factory: Callable[[], T], validator: Any = ..., converter: Any = ...
) -> T: ...
@overload
def option(*, help: str, validator: Any = ..., converter: Any = ...) -> Any: ...
def option(
    default: Any = NOTHING,
    help: str = "",  # noqa: A002
    *,
    factory: Callable[[], Any] | None = None,
    validator: Any = None,
    converter: Any = None,
) -> Any:
    """An attrs field with help text. Without ``default`` and ``factory`` the option is required.

    Args:
        default: the value when the file has none.
        help: one line; states the unit, and what null or 0 means where they are allowed.
        factory: builds the default, for mutable ones.
        validator: as for ``attrs.field``; a list is a conjunction.
        converter: a function of the value, which it sees after its type was checked.
    """
    if not help:
        raise TypeError("option() needs a help text")
    return attrs.field(
        default=default if factory is None else attrs.Factory(factory),
        validator=validator,
        converter=converter,
        metadata={HELP: help},
    )


def default_choice(name: str, help: str) -> Any:  # noqa: A002
    """A field of a ``Choice`` type that is the component ``name`` when the file does not say.

    In Python the field is a required keyword: only a file is read with the registry at hand.
    """
    return attrs.field(kw_only=True, metadata={HELP: help, DEFAULT_CHOICE: name})


@frozen
class Rule:
    """A validator that also states itself: ``text`` completes "must be ...", ``schema`` says it in
    JSON Schema.
    """

    text: str
    holds: Callable[[Any], bool]
    schema: Mapping[str, Any]

    def __call__(self, instance: Any, attribute: Any, value: Any) -> None:
        if not self.holds(value):
            raise ValueError(f"'{attribute.name}' must be {self.text}, not {value!r}")


positive = Rule("greater than 0", lambda value: value > 0, {"exclusiveMinimum": 0})
non_negative = Rule("0 or greater", lambda value: value >= 0, {"minimum": 0})
fraction = Rule("between 0 and 1", lambda value: 0 <= value <= 1, {"minimum": 0, "maximum": 1})


def one_of(*allowed: Any) -> Rule:
    """The value is one of ``allowed``; prefer a ``Literal`` type where the values are known to the
    type checker.
    """
    listing = ", ".join(repr(value) for value in allowed)
    return Rule(f"one of {listing}", lambda value: value in allowed, {"enum": list(allowed)})
