"""``${name}`` in a manifest: a value that is given once, under ``vars``, and used in many places.

A text that is nothing but ``${name}`` becomes the value itself, with its type: a number stays a
number, a list a list. Inside other text the value is inserted as YAML would write it. A variable
may use other variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from attrs import evolve

from arb_ternary.config.errors import Fault, Faulty, Path
from arb_ternary.config.yaml_document import Document, dump_inline
from arb_ternary.errors import nearest

#: Keys of the top level: the variables, and other values for them by name.
VARIABLES: Final = "vars"
VARIANTS: Final = "variants"
_REFERENCE: Final = re.compile(r"\$\{([^{}]*)\}")


def with_variant(document: Document, name: str) -> Document:
    """Return the document with the values that the variant ``name`` has for some variables.

    A variant that names an unknown variable is a fault of the document.
    """
    variables = _mapping(document.data.get(VARIABLES))
    chosen = _mapping(document.data[VARIANTS][name])
    origins = dict(document.origins)
    faults = list(document.faults)
    for key in chosen:
        where: Path = (VARIANTS, name, key)
        if key not in variables:
            faults.append(_unknown_variable(where, str(key), variables))
        # The variable's lines are now those of the variant.
        moved = {
            (VARIABLES, key, *path[3:]): origin
            for path, origin in origins.items()
            if path[:3] == where
        }
        kept = {path: origin for path, origin in origins.items() if path[:2] != (VARIABLES, key)}
        origins = {**kept, **moved}
    data = {**document.data, VARIABLES: {**variables, **chosen}}
    return evolve(document, data=data, origins=origins, faults=tuple(faults))


def substitute(document: Document) -> tuple[Document, tuple[str, ...]]:
    """Replace every ``${name}`` outside ``vars`` and ``variants``.

    A name that is unknown, or that leads back to itself, is a fault at the line where it is used.

    Returns:
        The document, and the names of variables that nothing uses.
    """
    if not isinstance(document.data, dict):
        return document, ()  # structuring reports that it is not a mapping
    variables = _mapping(document.data.get(VARIABLES))
    values = _Values(variables)
    for name in variables:
        values.resolve(name)
    data = dict(document.data)
    for key, value in data.items():
        if key not in (VARIABLES, VARIANTS):
            data[key] = values.replaced(value, (key,))
    unused = tuple(str(name) for name in variables if name not in values.used)
    return evolve(document, data=data, faults=(*document.faults, *values.faults)), unused


class _Values:
    """The values of variables, with the variables in them replaced when they are first used."""

    def __init__(self, variables: Mapping[Any, Any]) -> None:
        self.variables = variables
        self.done: dict[str, Any] = {}
        self.in_progress: list[str] = []
        self.used: set[str] = set()
        self.faults: list[Fault] = []

    def resolve(self, name: str) -> Any:
        """Return the value of a variable that exists.

        Raises:
            Faulty: it leads back to itself.
        """
        if name in self.in_progress:
            circle = [*self.in_progress[self.in_progress.index(name) :], name]
            text = f"a circle of variables: {' -> '.join(circle)}"
            raise Faulty(Fault((VARIABLES, self.in_progress[-1]), text))
        if name not in self.done:
            self.in_progress.append(name)
            self.done[name] = self.replaced(self.variables[name], (VARIABLES, name))
            self.in_progress.pop()
        return self.done[name]

    def replaced(self, value: Any, path: Path) -> Any:
        """Return ``value``, found at ``path``, with every reference in it replaced.

        A text with a fault becomes None, and the fault is collected.
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
        whole = _REFERENCE.fullmatch(text)
        if whole is not None:
            return self._value(whole[1], path)
        if "${" in _REFERENCE.sub("", text):
            raise Faulty(Fault(path, f"{text!r} has a ${{ without its }}"))
        return _REFERENCE.sub(lambda found: self._inserted(found, path), text)

    def _inserted(self, reference: re.Match[str], path: Path) -> str:
        value = self._value(reference[1], path)
        if isinstance(value, str):
            return value
        if isinstance(value, dict | list):
            kind = "a mapping" if isinstance(value, dict) else "a list"
            text = f"{reference[0]} is {kind}, which cannot be written into a text"
            raise Faulty(Fault(path, text))
        return dump_inline(value)

    def _value(self, reference: str, path: Path) -> Any:
        name = reference.strip()
        if name not in self.variables:
            raise Faulty(_unknown_variable(path, name, self.variables))
        self.used.add(name)
        return self.resolve(name)


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, dict) else {}


def _unknown_variable(path: Path, name: str, variables: Mapping[Any, Any]) -> Fault:
    known = [str(each) for each in variables]
    close = nearest(name, known)
    advice = f"there are {', '.join(known) or 'none'}"
    if close is not None:
        advice = f"did you mean '{close}'?"
    return Fault(path, f"{VARIABLES} has no variable '{name}'; {advice}")
