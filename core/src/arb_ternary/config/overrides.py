"""Settings of the command line, ``-o phases.0.steps=10``, put into the document of a config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import pairwise
from typing import Any

from attrs import evolve

from arb_ternary.config.errors import Fault, Faulty, Origin, Path, show_path
from arb_ternary.config.yaml_document import Document, parse_yaml_value

#: An index, or a key, which is quoted if it holds a dot. Every key but the first follows a dot.
_PART = re.compile(r'\[(\d+)\]|(?:^|(?!^)\.)(?:"([^"]+)"|([^.\[\]"=]+))')
_FORM = Fault((), "an override is written path=value", "For example: -o phases.0.steps=10")


def apply_overrides(document: Document, overrides: Iterable[str]) -> Document:
    """Return a document in which the values of ``overrides`` are in place.

    Each override is ``path=value`` with the value in YAML. They are applied in order. Missing keys
    on the way are added. A component that is given by its name alone becomes a mapping, so that
    ``optimizer.lr=0.1`` works on ``optimizer: adamw``. Items of lists must exist. Faults are
    collected in the document.
    """
    changed = evolve(document, data=deepcopy(document.data))
    faults = list(document.faults)
    for order, text in enumerate(overrides):
        origin = Origin("override", f"-o {text}", order)
        try:
            where, equals, value = text.partition("=")
            path = parse_path(where.strip())
            if not equals or path is None:
                raise Faulty(_FORM)
            changed = set_value(changed, path, parse_yaml_value(value), origin)
        except Faulty as error:
            faults.extend(evolve(fault, origin=origin) for fault in error.faults)
    return evolve(changed, faults=tuple(faults))


def parse_path(text: str) -> Path | None:
    """Return the path that ``show_path`` shows as ``text``, or None if it is malformed.

    ``phases.0.steps`` works too; the index is then text.
    """
    if not re.fullmatch(f"({_PART.pattern})+", text):
        return None
    path: list[str | int] = []
    for match in _PART.finditer(text):
        index, quoted, plain = match.groups()
        if index:
            path.append(int(index))
        else:
            path.append(quoted or plain.strip())
    if "" in path:
        return None
    return tuple(path)


def set_value(document: Document, path: Path, value: Any, origin: Origin) -> Document:
    """Return a document with ``value`` at ``path``; the data are changed in place.

    Raises:
        Faulty: the path leads nowhere.
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
            inner = {}
            holder[key] = inner
            origins[above] = origin
        elif isinstance(inner, str):
            inner = {"name": inner}
            holder[key] = inner
            origins[(*above, "name")] = origins.get(above, origin)
        elif not isinstance(inner, dict | list):
            raise Faulty(Fault(above, f"{inner!r} has no key {following!r}"))
        holder = inner

    last = _key_in(holder, path[-1], above)
    holder[last] = value
    changed = (*above, last)
    length = len(changed)
    kept = {each: old for each, old in origins.items() if each[:length] != changed}
    new = {(*changed, *below): origin for below in _paths_in(value)}
    return evolve(document, origins={**kept, **new})


def _key_in(holder: Any, part: str | int, path: Path) -> str | int:
    """Return a part of an override's path as a key of ``holder``, which is at ``path``.

    Digits are an index in a list and text in a mapping.
    """
    if isinstance(holder, dict):
        if part in holder:
            return part
        key: str | int
        for key in holder:
            if str(key) == str(part):
                return key  # a whole number, which the path writes as text
        return str(part)
    if not str(part).isdecimal():
        raise Faulty(Fault((*path, part), "a list has items by number, from 0"))
    index = int(part)
    if index >= len(holder):
        message = f"{show_path(path)} has {len(holder)} items, numbered from 0"
        raise Faulty(Fault((*path, index), message))
    return index


def _paths_in(value: Any) -> Iterator[Path]:
    """Yield the path of ``value`` and of every value inside it."""
    yield ()
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        for below in _paths_in(item):
            yield (key, *below)
