"""Declare the options of a config class: default, help, allowed values, conditions.

A config class is an ordinary frozen attrs class::

    @frozen(kw_only=True)
    class DecayConfig:
        rate: float = option(0.1, "share that is lost per step", validator=fraction)
        after: int | None = option(
            None,
            "first step that decays; null = never",
            validator=optional(positive),
            active_when=when("rate"),
        )

Types say what a value may be (``config.structure`` lists the supported ones), validators which
values of that type, and ``active_when`` under which conditions the option does anything. The help
text appears in ``arb config new``, in the JSON Schema and in the reference.

Every number has limits beyond its validator: a whole number those of ``option(largest=...)``, any
other number what float32 holds, so that it is finite, and does not become infinite or 0 when it
meets a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar, overload

import attrs
from attrs import frozen

# Public here, because every config class needs it.
from attrs.validators import optional as optional  # noqa: PLC0414

_T = TypeVar("_T")

#: Key of the help text in an attrs field's metadata.
HELP = "help"
#: Key of the conditions under which an option takes effect, in an attrs field's metadata.
ACTIVE_WHEN = "active_when"
#: Key of the component that stands in when a file does not name one, in an attrs field's metadata.
DEFAULT_CHOICE = "default_choice"

#: Largest whole number of an option. Two of them multiply to less than 2**62, so that products of
#: sizes and counts fit into 64 bits.
LARGEST_COUNT: Final = 2**31 - 1
#: Largest seed, and largest number of bytes: both are kept in words of 64 bits.
LARGEST_INT64: Final = 2**63 - 1
#: Sizes of the numbers that float32 holds in full precision.
SMALLEST_FLOAT: Final = 2.0**-126
LARGEST_FLOAT: Final = (2.0 - 2.0**-23) * 2.0**127


@frozen
class Condition:
    """A condition for an option to take effect.

    Attributes:
        holds: ``(options, run, plan) -> bool``. ``options`` is the config object that has the
            option, ``run`` the ``RunConfig`` it is used in, and ``plan`` what the run trains
            (``arb_ternary.optim.protocol.Planned``, None if the model's options do not say).
            ``run`` and ``plan`` are None if the options are checked outside a run.
        reason: completes "has no effect because ..."; a text, or a function of the config object.
    """

    holds: Callable[[Any, Any, Any], bool]
    reason: str | Callable[[Any], str]

    def reason_for(self, options: Any) -> str:
        """Return the reason why an option of ``options`` has no effect."""
        return self.reason if isinstance(self.reason, str) else self.reason(options)


def when(name: str, *values: Any, reason: str | None = None) -> Condition:
    """Return the condition that the option ``name`` of the same class has one of ``values``.

    Without ``values`` it must be neither None, False nor 0. Without ``reason`` the message states
    the value that the option has: ``'use_amp' is false``.
    """

    def holds(options: Any, run: Any, plan: Any) -> bool:
        value = getattr(options, name)
        return value in values if values else bool(value)

    return Condition(holds, reason or (lambda options: _stated(options, name)))


def unless(name: str, *values: Any, reason: str | None = None) -> Condition:
    """Return the condition that the option ``name`` of the same class has none of ``values``."""

    def holds(options: Any, run: Any, plan: Any) -> bool:
        return getattr(options, name) not in values

    return Condition(holds, reason or (lambda options: _stated(options, name)))


def trains(*parts: str, reason: str) -> Condition:
    """Return the condition that the run trains one of ``parts``: ternary or float.

    It holds as long as the run's plan is not known.
    """

    def holds(options: Any, run: Any, plan: Any) -> bool:
        return plan is None or any(part in plan.kinds for part in parts)

    return Condition(holds, reason)


def _stated(options: Any, name: str) -> str:
    return f"'{name}' is {scalar_text(getattr(options, name))}"


def scalar_text(value: Any) -> str:
    """Return a scalar as YAML spells it, without quotes."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


@overload
def option(
    default: _T,
    help: str,
    *,
    validator: Any = ...,
    converter: Any = ...,
    active_when: Condition | Sequence[Condition] = ...,
    largest: int = ...,
) -> _T: ...
@overload
def option(
    *,
    help: str,
    factory: Callable[[], _T],
    validator: Any = ...,
    converter: Any = ...,
    active_when: Condition | Sequence[Condition] = ...,
    largest: int = ...,
) -> _T: ...
@overload
def option(*, help: str, validator: Any = ..., converter: Any = ..., largest: int = ...) -> Any: ...
def option(
    default: Any = attrs.NOTHING,
    help: str = "",  # noqa: A002
    *,
    factory: Callable[[], Any] | None = None,
    validator: Any = None,
    converter: Any = None,
    active_when: Condition | Sequence[Condition] = (),
    largest: int = LARGEST_COUNT,
) -> Any:
    """Return an attrs field with help text.

    Args:
        default: the value if the file has none. Without ``default`` and ``factory`` the option is
            required.
        help: one line; states the unit, and what null or 0 means where they are allowed.
        factory: builds the default, for mutable ones.
        validator: as for ``attrs.field``; a list is a conjunction.
        converter: a function of the value, called after the type of the value was checked.
        active_when: conditions that must all hold for the option to do anything. A config that
            sets the option although one of them does not hold is refused, with the reason
            (``arb_ternary.config.fields.unused_options``).
        largest: the largest size of a whole number in the value.
    """
    if not help:
        raise TypeError("option() needs a help text")
    conditions = (active_when,) if isinstance(active_when, Condition) else tuple(active_when)
    validators = [] if validator is None else [validator]
    if isinstance(validator, list | tuple):
        validators = [*validator]
    return attrs.field(
        default=default if factory is None else attrs.Factory(factory),
        validator=[*validators, Limits(largest)],
        converter=converter,
        metadata={HELP: help, ACTIVE_WHEN: conditions},
    )


def default_choice(name: str, help: str) -> Any:  # noqa: A002
    """Return a field of a ``Choice`` type whose default in a file is the component ``name``.

    In Python the field is a required keyword: only a file is read together with a registry.
    """
    return attrs.field(kw_only=True, metadata={HELP: help, DEFAULT_CHOICE: name})


@frozen
class Rule:
    """A validator that also states its rule.

    Attributes:
        text: completes "must be ...".
        holds: whether a value is allowed.
        schema: the rule in JSON Schema.
    """

    text: str
    holds: Callable[[Any], bool]
    schema: Mapping[str, Any]

    def __call__(self, instance: Any, attribute: Any, value: Any) -> None:
        if not self.holds(value):
            raise ValueError(f"'{attribute.name}' must be {self.text}, not {value!r}")


@frozen
class Limits:
    """A validator of the size of numbers: the value itself, or those in its lists and mappings.

    Whole numbers in a mapping are left to whoever knows what they count.

    Attributes:
        largest: the largest size of a whole number.
    """

    largest: int

    def __call__(self, instance: Any, attribute: Any, value: Any) -> None:
        broken = self.broken_by(value)
        if broken is not None:
            raise ValueError(f"'{attribute.name}' {broken}")

    def broken_by(self, value: Any) -> str | None:
        """Return the rule that a number in ``value`` breaks: "must be ..."; None if none does."""
        for number in _numbers(value):
            if isinstance(number, int):
                holds = abs(number) <= self.largest
                rule = f"at most {self.largest}" if number > 0 else f"at least -{self.largest}"
            else:
                holds = number == 0 or SMALLEST_FLOAT <= abs(number) <= LARGEST_FLOAT
                rule = "0, or of a size from 1.2e-38 to 3.4e+38, which float32 holds"
            if not holds:
                return f"must be {rule}, not {number!r}"
        return None


def _numbers(value: Any) -> Iterator[int | float]:
    """Yield every number in a value of an option."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    elif isinstance(value, Mapping):
        yield from (each for each in _numbers([*value.values()]) if isinstance(each, float))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)


positive = Rule("greater than 0", lambda value: value > 0, {"exclusiveMinimum": 0})
non_negative = Rule("0 or greater", lambda value: value >= 0, {"minimum": 0})
fraction = Rule("between 0 and 1", lambda value: 0 <= value <= 1, {"minimum": 0, "maximum": 1})


def whole(low: float, high: float = math.inf) -> Rule:
    """Return the rule that a value is a whole number from ``low`` to ``high``."""
    schema = {"minimum": low}
    text = f"a whole number of at least {low}"
    if high < math.inf:
        schema["maximum"] = high
        text = f"a whole number from {low} to {high}"
    return Rule(text, lambda value: type(value) is int and low <= value <= high, schema)


def one_of(*allowed: Any) -> Rule:
    """Return the rule that a value is one of ``allowed``.

    Prefer a ``Literal`` type if the type checker can know the values.
    """
    listing = ", ".join(repr(value) for value in allowed)
    return Rule(f"one of {listing}", lambda value: value in allowed, {"enum": list(allowed)})
