"""From a config file, and ``-o phases.0.steps=10``, to a structured config."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from copy import deepcopy
from itertools import pairwise
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import evolve

from arb_ternary.config.errors import Fault, Faulty, Origin, Path, show_path
from arb_ternary.config.fields import leaves, to_plain
from arb_ternary.config.structure import structure
from arb_ternary.config.yaml_document import Document, LoadedConfig, parse_yaml_value, read_yaml
from arb_ternary.errors import ConfigError

if TYPE_CHECKING:
    from arb_ternary.plugins.registry import Registry

T = TypeVar("T")
#: An index, or a key, quoted where it holds a dot; every key but the first follows a dot.
_PART = re.compile(r'\[(\d+)\]|(?:^|(?!^)\.)(?:"([^"]+)"|([^.\[\]"=]+))')
_DEFAULT = Origin("default", "default")


def load_as(
    cls: type[T],
    path: str | os.PathLike[str],
    overrides: Iterable[str] = (),
    *,
    registry: Registry | None = None,
) -> LoadedConfig[T]:
    """Load a file whose top level is the config class ``cls``; errors are those of
    :func:`raise_faults`.
    """
    from arb_ternary.plugins.manager import manager

    document = apply_overrides(read_document(path), overrides)
    config = structure(cls, document, manager().registry if registry is None else registry)
    return LoadedConfig(config, value_origins(config, document), document.source)


def read_document(path: str | os.PathLike[str]) -> Document:
    """Read a YAML file; a ConfigError when it cannot be read or is not YAML."""
    file = FilePath(path)
    source = os.fspath(path)
    if file.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(f"{source}: a config is a file ending in .yaml, .yml")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{source}: no such file", hint=f"arb config new {source}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = (
            error.strerror if isinstance(error, OSError) else f"not UTF-8 at byte {error.start}"
        )
        raise ConfigError(f"{source}: cannot be read: {reason}") from error
    return read_yaml(text, source)


def value_origins(config: Any, document: Document) -> dict[Path, Origin]:
    """The origin of every value of ``config``, made from ``document``, by its path in
    ``to_plain(config)``.
    """
    origins = {}
    for path, value in leaves(to_plain(config, given=False)):
        # A component that is given by its name alone has no entry for the name.
        own = path if path in document.origins or path[-1:] != ("name",) else path[:-1]
        parts = (
            [own, *((*own, index) for index in range(len(value)))]
            if isinstance(value, list)
            else [own]
        )
        found = dict.fromkeys(document.origins[part] for part in parts if part in document.origins)
        origins[path] = max(
            found, key=lambda origin: (origin.kind == "override", origin.order), default=_DEFAULT
        )
    return origins


# --- overrides


def apply_overrides(document: Document, overrides: Iterable[str]) -> Document:
    """A document with the values of ``overrides`` (``path=value``, the value in YAML) in place,
    later ones last.

    Keys that are missing on the way are added; a component that is given by its name alone becomes
    a mapping, so that ``optimizer.lr=0.1`` works on ``optimizer: adamw``. List items must exist.
    Faults are collected in the document.
    """
    changed = evolve(document, data=deepcopy(document.data))
    faults = list(document.faults)
    for order, text in enumerate(overrides):
        origin = Origin("override", f"-o {text}", order)
        try:
            where, equals, value = text.partition("=")
            path = parse_path(where.strip())
            if not equals or path is None:
                raise Faulty(
                    Fault(
                        (), "an override is written path=value", "For example: -o phases.0.steps=10"
                    )
                )
            changed = set_value(changed, path, parse_yaml_value(value), origin)
        except Faulty as error:
            faults.extend(evolve(fault, origin=origin) for fault in error.faults)
    return evolve(changed, faults=tuple(faults))


def parse_path(text: str) -> Path | None:
    """The inverse of ``show_path``; ``phases.0.steps`` works too (the index stays text). None when
    malformed.
    """
    if not re.fullmatch(f"({_PART.pattern})+", text):
        return None
    path = tuple(
        int(part[1]) if part[1] else part[2] or part[3].strip() for part in _PART.finditer(text)
    )
    return None if "" in path else path


def set_value(document: Document, path: Path, value: Any, origin: Origin) -> Document:
    """A document with ``value`` at ``path``; Faulty when the path leads nowhere. The data are
    changed in place.
    """
    if not isinstance(document.data, dict):
        return document  # structuring reports that the whole is not a mapping
    origins = dict(document.origins)
    holder: Any = document.data
    above: Path = ()
    for part, following in pairwise(path):
        key = _key_in(holder, part, above)
        above = (*above, key)
        inner = holder.get(key) if isinstance(holder, dict) else holder[key]
        if inner is None:
            inner = holder[key] = {}
            origins[above] = origin
        elif isinstance(inner, str):
            inner = holder[key] = {"name": inner}
            origins[(*above, "name")] = origins.get(above, origin)
        elif not isinstance(inner, dict | list):
            raise Faulty(Fault(above, f"{inner!r} has no key {following!r}"))
        holder = inner
    last = _key_in(holder, path[-1], above)
    holder[last] = value
    real = (*above, last)
    kept = {p: o for p, o in origins.items() if p[: len(real)] != real}
    return evolve(
        document, origins={**kept, **{(*real, *below): origin for below in _paths_in(value)}}
    )


def _key_in(holder: Any, part: str | int, path: Path) -> str | int:
    """``part`` of an override's path as a key of ``holder``: digits are an index in a list and text
    in a mapping.
    """
    if isinstance(holder, dict):
        return (
            part
            if part in holder
            else next((key for key in holder if str(key) == str(part)), str(part))
        )
    if not str(part).isdecimal():
        raise Faulty(Fault((*path, part), "a list has items by number, from 0"))
    index = int(part)
    if index >= len(holder):
        raise Faulty(
            Fault((*path, index), f"{show_path(path)} has {len(holder)} items, numbered from 0")
        )
    return index


def _paths_in(value: Any) -> Iterable[Path]:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [(), *((key, *below) for key, item in items for below in _paths_in(item))]
