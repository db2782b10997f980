"""Config classes read back: their options with types resolved and put into words, their instances as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import attrs
from attrs import NOTHING, frozen

from arb_ternary.config.choice import Choice
from arb_ternary.config.errors import Path
from arb_ternary.config.options import DEFAULT_CHOICE, HELP
from arb_ternary.errors import ComponentError

__all__ = ["ConfigField", "config_fields", "describe_type", "describe_value", "leaves", "shape_of", "to_plain"]

_SHAPES: Mapping[Any, str] = {
    **dict.fromkeys((list, tuple, Sequence), "list"),
    **dict.fromkeys((dict, Mapping), "mapping"),
    **dict.fromkeys((Union, UnionType), "union"),
    Literal: "literal",
}
_PLAIN: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    FilePath: "a path",
    **dict.fromkeys((None, NoneType), "null"),
}


@frozen(eq=False)
class ConfigField:
    """An option of a config class."""

    attribute: attrs.Attribute[Any]

    @property
    def key(self) -> str:
        """What files and ``__init__`` call the option."""
        return str(self.attribute.alias)

    @property
    def type(self) -> Any:
        """Its type, resolved."""
        return self.attribute.type

    @property
    def help(self) -> str:
        """One line of help; empty when the class gives none."""
        return str(self.attribute.metadata.get(HELP, ""))

    @property
    def required(self) -> bool:
        """Whether a file must have the option."""
        return self.attribute.default is NOTHING and DEFAULT_CHOICE not in self.attribute.metadata

    @property
    def default(self) -> Any:
        """The default as a plain value; ``attrs.NOTHING`` for a required option, or one that depends on others."""
        found: Any = self.attribute.metadata.get(DEFAULT_CHOICE, self.attribute.default)
        if isinstance(found, attrs.Factory):  # type: ignore[arg-type]
            return NOTHING if found.takes_self else to_plain(found.factory())
        return to_plain(found)


def config_fields(cls: type[Any]) -> tuple[ConfigField, ...]:
    """The options of ``cls``, in the order of its definition.

    Raises:
        ComponentError: an annotation does not resolve at run time.
    """
    try:
        attrs.resolve_types(cls, include_extras=False)
    except (NameError, AttributeError) as error:
        raise ComponentError(
            f"{cls.__module__}.{cls.__qualname__}: the type of an option does not resolve: {error}",
            hint="Types of options are needed at run time: import them outside `if TYPE_CHECKING:`.",
        ) from error
    return tuple(ConfigField(attribute) for attribute in attrs.fields(cls) if attribute.init)


# --- instances -------------------------------------------------------------------------------------------------------


def to_plain(config: Any, *, given: bool = True) -> Any:
    """Nested dicts and lists that structure into an object equal to ``config``, every default written out.

    Args:
        config: an instance of a config class, or any value inside one.
        given: note with each component which options the user wrote (key ``given``). Without it the result is shorter,
            and reads back as if the user had written every option.
    """
    if isinstance(config, Choice):
        if config.options is None:
            return config.name
        plain = {"name": config.name, **to_plain(config.options, given=given)}
        return {**plain, "given": sorted(config.given)} if given else plain
    if attrs.has(type(config)):
        fields = config_fields(type(config))
        return {field.key: to_plain(getattr(config, field.attribute.name), given=given) for field in fields}
    if isinstance(config, Mapping):
        return {key: to_plain(value, given=given) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [to_plain(value, given=given) for value in config]
    return str(config) if isinstance(config, PurePath) else config


def leaves(plain: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that holds no mapping, with its path; a list of scalars is one value."""
    if isinstance(plain, dict) and plain:
        for key, value in plain.items():
            yield from leaves(value, (*path, key))
    elif isinstance(plain, list) and any(isinstance(item, dict | list) for item in plain):
        for index, value in enumerate(plain):
            yield from leaves(value, (*path, index))
    else:
        yield path, plain


# --- types -----------------------------------------------------------------------------------------------------------


def shape_of(t: Any) -> str:
    """``list``, ``mapping``, ``union``, ``literal``, ``choice``, ``class`` (of options) or ``plain`` (the rest)."""
    if isinstance(t, type) and attrs.has(t):
        return "choice" if issubclass(t, Choice) else "class"
    return _SHAPES.get(get_origin(t) or t, "plain")


def describe_type(t: Any) -> str:
    """A type in words that complete "must be ..."."""
    match shape_of(t):
        case "literal":
            return _either([f"'{value}'" if isinstance(value, str) else describe_value(value) for value in get_args(t)])
        case "union":
            return _either([describe_type(arm) for arm in get_args(t)])
        case "list":
            return "a list"
        case "choice":
            article = "an" if t.noun[0] in "aeiou" else "a"
            return f"the name of {article} {t.noun}, or a mapping with its name and options"
    return _PLAIN.get(t, "a mapping")


def describe_value(value: Any) -> str:
    """A value in words that complete "not ..."."""
    if isinstance(value, str):
        return f"{value!r} (text)"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _either(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"
