"""Read config classes: their options with resolved types, and their instances as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from types import UnionType
from typing import Any, Literal, Union, get_origin

import attrs
from attrs import NOTHING

from arb_ternary.config.choice import Choice
from arb_ternary.config.errors import Path
from arb_ternary.config.options import ACTIVE_WHEN, DEFAULT_CHOICE
from arb_ternary.errors import ComponentError

_SHAPES: Mapping[Any, str] = {
    **dict.fromkeys((list, tuple, Sequence), "list"),
    **dict.fromkeys((dict, Mapping), "mapping"),
    **dict.fromkeys((Union, UnionType), "union"),
    Literal: "literal",
}


def config_fields(cls: type[Any]) -> tuple[attrs.Attribute[Any], ...]:
    """Return the options of ``cls``, in the order of their definition, with types resolved.

    The ``alias`` of an option is its key.

    Raises:
        ComponentError: a type does not resolve.
    """
    try:
        attrs.resolve_types(cls, include_extras=False)
    except (NameError, AttributeError) as error:
        raise ComponentError(
            f"{cls.__module__}.{cls.__qualname__}: the type of an option does not resolve: {error}",
            hint="Types of options are needed at run time: import them outside `if "
            "TYPE_CHECKING:`.",
        ) from error
    return tuple(attribute for attribute in attrs.fields(cls) if attribute.init)


def is_required(option: attrs.Attribute[Any]) -> bool:
    """Whether a file must have the option."""
    return option.default is NOTHING and DEFAULT_CHOICE not in option.metadata


def default_of(option: attrs.Attribute[Any]) -> Any:
    """Return the default as a plain value.

    It is ``attrs.NOTHING`` for a required option, and for one whose default depends on others.
    """
    found: Any = option.metadata.get(DEFAULT_CHOICE, option.default)
    if not isinstance(found, attrs.Factory):  # type: ignore[arg-type]
        return to_plain(found)
    if found.takes_self:
        return NOTHING
    return to_plain(found.factory())


def unused_options(config: Any, run: Any = None, plan: Any = None) -> Iterator[tuple[str, str]]:
    """Find the options of ``config`` that are set and do nothing.

    An option is set if it is not at its default, and does nothing if one of the conditions that
    it declares (``option(active_when=...)``) does not hold.

    Args:
        config: an object of a config class.
        run: the ``RunConfig`` that it is used in; None outside a run.
        plan: what the run trains (``arb_ternary.optim.protocol.Planned``); None if not known.

    Yields:
        The key of each such option, and the message for the user.
    """
    for field in config_fields(type(config)):
        conditions = field.metadata.get(ACTIVE_WHEN, ())
        if not conditions:
            continue
        value = to_plain(getattr(config, field.name))
        if value == default_of(field):
            continue
        for condition in conditions:
            if not condition.holds(config, run, plan):
                reason = condition.reason_for(config)
                yield str(field.alias), f"has no effect because {reason}; remove it"
                break


# --- instances


def to_plain(config: Any, *, given: bool = True) -> Any:
    """Return nested dicts and lists that structure into an object equal to ``config``.

    Every default is written out. With ``given``, each component notes which options the user wrote.
    Without, it reads back as if the user had written all of them.
    """
    if isinstance(config, Choice):
        if config.options is None:
            return config.name
        plain = {"name": config.name, **to_plain(config.options, given=given)}
        if given:
            plain["given"] = sorted(config.given)
        return plain
    if attrs.has(type(config)):
        plain = {}
        for option in config_fields(type(config)):
            value = getattr(config, option.name)
            plain[option.alias] = to_plain(value, given=given)
        return plain
    if isinstance(config, Mapping):
        return {key: to_plain(value, given=given) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [to_plain(value, given=given) for value in config]
    if isinstance(config, PurePath):
        return str(config)
    return config


def leaves(plain: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every value that holds no mapping, with its path; a list of scalars is one value."""
    if isinstance(plain, dict) and plain:
        for key, value in plain.items():
            yield from leaves(value, (*path, key))
    elif isinstance(plain, list) and any(isinstance(item, dict | list) for item in plain):
        for index, value in enumerate(plain):
            yield from leaves(value, (*path, index))
    else:
        yield path, plain


# --- types


def shape_of(t: Any) -> str:
    """Return what a type of options is.

    ``list``, ``mapping``, ``union``, ``literal``, ``choice``, ``class`` (of options) or ``plain``.
    """
    if isinstance(t, type) and attrs.has(t):
        return "choice" if issubclass(t, Choice) else "class"
    return _SHAPES.get(get_origin(t) or t, "plain")
