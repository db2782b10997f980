"""Types and values of options: telling them apart, and putting them into words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from arb_ternary.config.choice import Choice

__all__ = [
    "describe_type",
    "describe_value",
    "is_choice",
    "is_literal",
    "is_mapping",
    "is_sequence",
    "is_union",
    "origin_of",
]


def origin_of(t: Any) -> Any:
    """The generic type without its arguments: ``list`` for ``list[int]``."""
    return get_origin(t) or t


def is_sequence(t: Any) -> bool:
    """``list``, ``tuple`` or ``Sequence``."""
    return origin_of(t) in (list, tuple, Sequence)


def is_mapping(t: Any) -> bool:
    """``dict`` or ``Mapping``."""
    return origin_of(t) in (dict, Mapping)


def is_literal(t: Any) -> bool:
    """``Literal[...]``."""
    return origin_of(t) is Literal


def is_union(t: Any) -> bool:
    """``X | Y``, ``Optional[X]`` or ``Union[X, Y]``."""
    return get_origin(t) in (Union, UnionType)


def is_choice(t: Any) -> bool:
    """A subclass of :class:`Choice`."""
    return isinstance(t, type) and issubclass(t, Choice)


def describe_type(t: Any) -> str:
    """A type in words that complete "must be ..."."""
    plain = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}
    if t in plain:
        return plain[t]
    if t in (None, NoneType):
        return "null"
    if is_literal(t):
        return _either([f"'{value}'" if isinstance(value, str) else _plain(value) for value in get_args(t)])
    if is_union(t):
        return _either([describe_type(arm) for arm in get_args(t)])
    if is_sequence(t):
        return "a list"
    if is_choice(t):
        noun = t.noun
        return f"the name of {'an' if noun[0] in 'aeiou' else 'a'} {noun}, or a mapping with its name and options"
    return "a mapping"


def describe_value(value: Any) -> str:
    """A value in words that complete "not ..."."""
    if isinstance(value, str):
        return f"{value!r} (text)"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return _plain(value)


def _plain(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _either(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"
