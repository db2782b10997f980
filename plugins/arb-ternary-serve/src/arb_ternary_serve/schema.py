"""Check JSON against a part of JSON Schema; the same schemas describe the API to its users."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

from arb_ternary.errors import nearest
from arb_ternary_serve.problems import RequestProblem

Schema = Mapping[str, Any]

_TYPES: Final[Mapping[str, tuple[type, str]]] = {
    "null": (type(None), "null"),
    "boolean": (bool, "true or false"),
    "integer": (int, "a whole number"),
    "number": (float, "a number"),
    "string": (str, "a text"),
    "array": (list, "a list"),
    "object": (dict, "an object"),
}


def check(value: Any, schema: Schema, where: str) -> None:
    """Check a value.

    Args:
        value: plain JSON.
        schema: uses ``type``, ``enum``, ``anyOf``, ``minimum``, ``exclusiveMinimum``, ``maximum``,
            ``minLength``, ``minItems``, ``maxItems``, ``items``, ``properties``, ``required`` and
            ``additionalProperties: false``. An ``enum`` without ``type`` has the values of a field
            that is not supported at which it would change nothing.
        where: name of the value in errors.

    Raises:
        RequestProblem: it does not fit.
    """
    if "anyOf" in schema:
        if not any(_fits(value, each) for each in schema["anyOf"]):
            raise _problem(where, f"must be {schema['description']}")
        return
    names = _type_names(schema)
    if names and not any(_has_type(value, name) for name in names):
        wanted = " or ".join(_TYPES[name][1] for name in names if name != "null")
        raise _problem(where, f"must be {wanted}, not {_kind(value)}")
    if "enum" in schema and not _is_in(value, schema["enum"]):
        if not names:
            raise RequestProblem(
                f"{where}: this server does not support it. Leave it out.",
                param=where,
                code="unsupported_parameter",
            )
        choices = ", ".join(repr(each) for each in schema["enum"] if each is not None)
        raise _problem(where, f"must be one of {choices}")
    if isinstance(value, str):
        _check_text(value, schema, where)
    elif isinstance(value, list):
        _check_list(value, schema, where)
    elif isinstance(value, dict):
        _check_object(value, schema, where)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        _check_number(value, schema, where)


def _fits(value: Any, schema: Schema) -> bool:
    try:
        check(value, schema, "")
    except RequestProblem:
        return False
    return True


def _type_names(schema: Schema) -> Collection[str]:
    names = schema.get("type", ())
    return [names] if isinstance(names, str) else names


def _has_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "number":
        return isinstance(value, int | float)
    return isinstance(value, _TYPES[name][0])


def _kind(value: Any) -> str:
    return next(shown for name, (_, shown) in _TYPES.items() if _has_type(value, name))


def _is_in(value: Any, choices: Collection[Any]) -> bool:
    """Return whether a value is one of the choices; True is not 1."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in choices
    )


def _check_text(value: str, schema: Schema, where: str) -> None:
    if len(value) < schema.get("minLength", 0):
        raise _problem(where, "must not be empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _problem(where, "has half of a surrogate pair, which UTF-8 cannot write") from None


def _check_number(value: float, schema: Schema, where: str) -> None:
    if not math.isfinite(value):
        raise _problem(where, "must be finite")
    if "minimum" in schema and value < schema["minimum"]:
        raise _problem(where, f"must be at least {schema['minimum']}, not {value}")
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        raise _problem(where, f"must be above {schema['exclusiveMinimum']}, not {value}")
    if "maximum" in schema and value > schema["maximum"]:
        raise _problem(where, f"must be at most {schema['maximum']}, not {value}")


def _check_list(value: list[Any], schema: Schema, where: str) -> None:
    if len(value) < schema.get("minItems", 0):
        raise _problem(where, "must not be empty")
    if len(value) > schema.get("maxItems", len(value)):
        raise _problem(where, f"has {len(value)} items, and at most {schema['maxItems']} may be")
    for number, item in enumerate(value):
        check(item, schema.get("items", {}), f"{where}[{number}]")


def _check_object(value: dict[str, Any], schema: Schema, where: str) -> None:
    known = schema.get("properties", {})
    for name, item in value.items():
        if name in known:
            check(item, known[name], _inside(where, name))
        elif schema.get("additionalProperties") is False:
            raise _unknown_field(name, known, where)
    for name in schema.get("required", ()):
        if name not in value:
            raise _problem(_inside(where, name), "is missing")


def _unknown_field(name: str, known: Collection[str], where: str) -> RequestProblem:
    """Return the error of a field that does not exist."""
    guess = nearest(name, known)
    shown = _inside(where, name[:80] if name.isidentifier() else ascii(name[:80]))
    hint = "Leave it out." if guess is None else f"Did you mean {guess}?"
    return _problem(shown, f"is no field of this request. {hint}")


def _inside(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _problem(where: str, what: str) -> RequestProblem:
    return RequestProblem(f"{where}: {what}", param=where or None)
