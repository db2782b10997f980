"""``${name}`` in a manifest: values that stand once, under ``vars``, and are used in many places.

A text that is nothing but ``${name}`` becomes the value itself, whatever its type: a number stays a
number, a list a list. Inside other text the value is written in, as YAML would write it. A variable
may use others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from attrs import evolve

from arb_ternary.config.errors import Fault, Faulty, Path
from arb_ternary.config.yaml_document import Document, dump_inline
from arb_ternary.errors import nearest

#: Keys of the top level: the variables, and other values of them by name.
VARIABLES: Final = "vars"
VARIANTS: Final = "variants"
_REFERENCE: Final = re.compile(r"\$\{([^{}]*)\}")


def with_variant(document: Document, name: str) -> Document:
    """The document with the values that the variant ``name`` has for some variables.

    A variant that names a variable that there is not is a fault of the document.
    """
    variables = _mapping(document.data.get(VARIABLES))
    chosen = _mapping(document.data[VARIANTS][name])
    origins = dict(document.origins)
    faults = list(document.faults)
    for key in chosen:
        where: Path = (VARIANTS, name, key)
        if key not in variables:
            faults.append(
                Fault(where, f"{VARIABLES} has no variable '{key}'" + _advice(str(key), variables))
            )
        below = [path for path in origins if path[:3] == where]
        replaced = [path for path in origins if path[:2] == (VARIABLES, key)]
        moved = {(VARIABLES, key, *path[3:]): origins[path] for path in below}
        origins = {path: origin for path, origin in origins.items() if path not in replaced} | moved
    data = {**document.data, VARIABLES: {**variables, **chosen}}
    return evolve(document, data=data, origins=origins, faults=tuple(faults))


def substitute(document: Document) -> tuple[Document, tuple[str, ...]]:
    """The document with every ``${name}`` replaced outside ``vars`` and ``variants``, and variables
    that nothing uses.

    A name that is unknown, or that leads back to itself, is a fault at the line where it is used.
    """
    if not isinstance(document.data, dict):
        return document, ()  # structuring reports that it is not a mapping
    variables = _mapping(document.data.get(VARIABLES))
    values = _Values(variables)
    for name in variables:
        values.resolve(name)
    data = {
        key: value if key in (VARIABLES, VARIANTS) else values.replaced(value, (key,))
        for key, value in document.data.items()
    }
    unused = tuple(str(name) for name in variables if name not in values.used)
    return evolve(document, data=data, faults=(*document.faults, *values.faults)), unused


class _Values:
    """Variables with everything replaced in them, as they are asked for."""

    def __init__(self, variables: Mapping[Any, Any]) -> None:
        self.variables = variables
        self.done: dict[str, Any] = {}
        self.under_way: list[str] = []
        self.used: set[str] = set()
        self.faults: list[Fault] = []

    def resolve(self, name: str) -> Any:
        """The value of a variable that exists; None where it leads back to itself."""
        if name in self.under_way:
            circle = [*self.under_way[self.under_way.index(name) :], name]
            raise Faulty(
                Fault(
                    (VARIABLES, self.under_way[-1]), f"a circle of variables: {' -> '.join(circle)}"
                )
            )
        if name not in self.done:
            self.under_way.append(name)
            self.done[name] = self.replaced(self.variables[name], (VARIABLES, name))
            self.under_way.pop()
        return self.done[name]

    def replaced(self, value: Any, path: Path) -> Any:
        """``value``, which stands at ``path``, with every reference in it replaced; None for one
        that is at fault.
        """
        if isinstance(value, dict):
            return {key: self.replaced(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self.replaced(item, (*path, index)) for index, item in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        try:
            return self._text(value, path)
        except Faulty as error:
            self.faults += error.faults
            return None

    def _text(self, text: str, path: Path) -> Any:
        if (whole := _REFERENCE.fullmatch(text)) is not None:
            return self._value(whole[1], path)
        if "${" in _REFERENCE.sub("", text):
            raise Faulty(Fault(path, f"{text!r} has a ${{ without its }}"))
        return "".join(self._pieces(text, path))

    def _pieces(self, text: str, path: Path) -> Iterator[str]:
        end = 0
        for found in _REFERENCE.finditer(text):
            value = self._value(found[1], path)
            if isinstance(value, dict | list):
                kind = "a mapping" if isinstance(value, dict) else "a list"
                raise Faulty(
                    Fault(path, f"{found[0]} is {kind}, which cannot be written into a text")
                )
            yield text[end : found.start()]
            yield value if isinstance(value, str) else dump_inline(value)
            end = found.end()
        yield text[end:]

    def _value(self, reference: str, path: Path) -> Any:
        name = reference.strip()
        if name not in self.variables:
            raise Faulty(
                Fault(path, f"{VARIABLES} has no variable '{name}'" + _advice(name, self.variables))
            )
        self.used.add(name)
        return self.resolve(name)


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, dict) else {}


def _advice(name: str, variables: Mapping[Any, Any]) -> str:
    close = nearest(name, [str(each) for each in variables])
    if close is not None:
        return f"; did you mean '{close}'?"
    return f"; there are {', '.join(map(str, variables))}" if variables else "; there are none"
