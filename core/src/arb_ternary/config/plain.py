"""Config classes back to plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import attrs

from arb_ternary.config.choice import Choice
from arb_ternary.config.fields import config_fields
from arb_ternary.config.paths import Path

__all__ = ["leaves", "to_plain"]


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
        return {
            field.key: to_plain(getattr(config, field.attribute.name), given=given)
            for field in config_fields(type(config))
        }
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
