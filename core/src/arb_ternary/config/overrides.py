"""``-o phases.0.steps=10``: changes to a config from the command line."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from itertools import pairwise
from typing import Any

from attrs import evolve

from arb_ternary.config.errors import Fault, Faulty
from arb_ternary.config.paths import Origin, Path, parse_path, show_path
from arb_ternary.config.yaml_document import Document, parse_yaml_value

__all__ = ["apply_overrides", "set_value"]


def apply_overrides(document: Document, overrides: Iterable[str]) -> Document:
    """A document with the values of ``overrides`` (``path=value``, the value in YAML) in place, later ones last.

    Keys that are missing on the way are added; a component that is given by its name alone becomes a mapping, so that
    ``optimizer.lr=0.1`` works on ``optimizer: adamw``. List items must exist. Faults are collected in the document.
    """
    changed = evolve(document, data=deepcopy(document.data), origins=dict(document.origins))
    faults = list(document.faults)
    for order, text in enumerate(overrides):
        origin = Origin("override", f"-o {text}", order)
        try:
            where, equals, value_text = text.partition("=")
            path = parse_path(where.strip())
            if not equals or path is None:
                raise Faulty(Fault((), "an override is written path=value", "For example: -o phases.0.steps=10"))
            try:
                value = parse_yaml_value(value_text)
            except ValueError as error:
                raise Faulty(Fault((), f"the value is not valid YAML: {error}")) from None
            changed = set_value(changed, path, value, origin)
        except Faulty as error:
            faults.extend(evolve(fault, origin=origin) for fault in error.faults)
    return evolve(changed, faults=tuple(faults))


def set_value(document: Document, path: Path, value: Any, origin: Origin) -> Document:
    """A document with ``value`` at ``path``. The data of ``document`` is changed in place, its origins are not.

    Raises:
        Faulty: the path does not lead anywhere.
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
    return evolve(document, origins={**kept, **{(*real, *below): origin for below in _paths_in(value)}})


def _key_in(holder: Any, part: str | int, path: Path) -> str | int:
    """``part`` of an override's path as a key of ``holder``: digits are an index in a list and text in a mapping."""
    if isinstance(holder, dict):
        if isinstance(part, str) and part not in holder and part.lstrip("-").isdigit() and int(part) in holder:
            return int(part)
        return part if part in holder else str(part)
    if not str(part).isdigit():
        raise Faulty(Fault((*path, part), "a list has items by number, from 0"))
    index = int(part)
    if index >= len(holder):
        raise Faulty(Fault((*path, index), f"{show_path(path)} has {len(holder)} items, numbered from 0"))
    return index


def _paths_in(value: Any) -> Iterable[Path]:
    yield ()
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    yield from ((key, *below) for key, item in items for below in _paths_in(item))
