"""YAML with line numbers, by the rules of YAML 1.2 and without its surprises.

Only ``true`` and ``false`` are booleans (``no`` is text), ``1e-3`` is a number, ``2026-01-01`` is text, a key may stand
once, and a tag never builds an object. Anchors, aliases and merge keys work.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml
from attrs import field, frozen

from arb_ternary.config.errors import Fault, raise_faults
from arb_ternary.config.paths import Origin, Path

__all__ = ["Document", "dump_inline", "dump_yaml", "parse_yaml_value", "read_yaml"]

_TAG = "tag:yaml.org,2002:"
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*|0o[0-7_]+|0x[0-9a-fA-F_]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_RESOLVERS = (
    ("null", re.compile(r"(~|null|Null|NULL|)\Z"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"(true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")),
    ("int", re.compile(rf"({_INTEGER.pattern})\Z"), list("-+0123456789")),
    ("float", re.compile(rf"({_FLOAT.pattern})\Z"), list("-+0123456789.")),
    ("merge", re.compile(r"<<\Z"), ["<"]),
)


class _Loader(yaml.SafeLoader):
    """Composes nodes; :class:`_Reader` makes values of them."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (its own, not the base's)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the text that :class:`_Loader` would not read as text."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_TAG + _kind, _pattern, _first)


@frozen(eq=False)
class Document:
    """A config before it is structured: plain values, and where each of them came from.

    Attributes:
        data: nested dicts and lists of text, numbers, booleans and None.
        source: the file's name as the user gave it; empty when there is no file.
        origins: by path; a value without an entry came with the value around it.
        faults: what reading found; structuring adds to them, so that all are reported at once.
    """

    data: Any
    source: str = ""
    origins: Mapping[Path, Origin] = field(factory=dict)
    faults: tuple[Fault, ...] = ()


def read_yaml(text: str, source: str) -> Document:
    """Read one YAML document.

    Raises:
        InvalidConfig: ``text`` is not YAML.
    """
    reader = _Reader(source)
    try:
        data = reader.read(text)
    except yaml.YAMLError as error:
        raise_faults([_syntax_fault(error, source)], {}, source)
    return Document(data, source, reader.origins, tuple(reader.faults.values()))


def parse_yaml_value(text: str) -> Any:
    """The value of an override.

    Raises:
        ValueError: ``text`` is not a YAML value.
    """
    reader = _Reader("")
    try:
        value = reader.read(text)
    except yaml.YAMLError as error:
        raise ValueError(getattr(error, "problem", None) or str(error)) from None
    for fault in reader.faults.values():
        raise ValueError(fault.message)
    return value


def dump_yaml(data: Any) -> str:
    """Plain values as YAML that :func:`read_yaml` reads back as equal values, in the order of the keys."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100))


def dump_inline(value: Any) -> str:
    """A plain value as YAML on one line."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=2**31)
    return str(text).removesuffix("...\n").strip()


def _syntax_fault(error: yaml.YAMLError, source: str) -> Fault:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    context = getattr(error, "context", None)
    message = f"not valid YAML: {context + ': ' if context else ''}{problem}"
    origin = None if mark is None else Origin("file", f"{source}:{mark.line + 1}", mark.line + 1)
    return Fault((), message, origin=origin)


class _Reader:
    """Turns nodes into plain values and notes the line of each."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.origins: dict[Path, Origin] = {}
        #: By place and message: however many aliases lead to a fault, it is one.
        self.faults: dict[tuple[Origin, str], Fault] = {}

    def read(self, text: str) -> Any:
        node = yaml.compose(text, Loader=_Loader)
        return None if node is None else self._value(node, (), frozenset())

    def _value(self, node: yaml.Node, path: Path, above: frozenset[int]) -> Any:
        """The value of ``node``; ``above`` are the ids of the nodes that contain it."""
        self.origins.setdefault(path, self._origin(node))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        is_list = isinstance(node, yaml.SequenceNode)
        if node.tag != _TAG + ("seq" if is_list else "map"):
            self._fault(node, path, f"the tag {node.tag} is not allowed")
        if id(node) in above:
            self._fault(node, path, "an alias to a value that contains it")
            return None
        above |= {id(node)}
        if is_list:
            return [self._value(item, (*path, index), above) for index, item in enumerate(node.value)]
        result: dict[str | int, Any] = {}
        for key, (key_node, value_node) in self._entries(node, path, above).items():
            self.origins[(*path, key)] = self._origin(key_node)
            result[key] = self._value(value_node, (*path, key), above)
        return result

    def _entries(
        self, node: yaml.Node, path: Path, above: frozenset[int]
    ) -> dict[str | int, tuple[yaml.Node, yaml.Node]]:
        """The nodes of keys and values. Keys that are written out win over merged ones, earlier merges over later."""
        found: dict[str | int, tuple[yaml.Node, yaml.Node]] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == f"{_TAG}merge":
                merged.extend(value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node])
            elif (key := self._key(key_node, path)) is None:
                continue
            elif key in found:
                line = found[key][0].start_mark.line + 1
                self._fault(key_node, (*path, key), f"the key is here twice; the first is in line {line}")
            else:
                found[key] = (key_node, value_node)
        for source in merged:
            if not isinstance(source, yaml.MappingNode):
                self._fault(source, path, "a merge key (<<) needs a mapping, or a list of mappings")
            elif id(source) in above:
                self._fault(source, path, "an alias to a value that contains it")
            else:
                found = {**self._entries(source, path, above | {id(source)}), **found}
        return found

    def _key(self, node: yaml.Node, path: Path) -> str | int | None:
        if isinstance(node, yaml.ScalarNode):
            key = self._scalar(node, path)
            if isinstance(key, str) or type(key) is int:
                return key
        self._fault(node, path, "a key must be text or a whole number")
        return None

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        text = node.value
        tag = node.tag.removeprefix(_TAG)
        if tag == "str":
            return text
        if tag == "null":
            return None
        if tag == "bool" and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if tag == "int" and _INTEGER.fullmatch(text):
            digits = text.replace("_", "")
            return int(digits, {"0o": 8, "0x": 16}.get(digits[:2], 10))
        if tag in ("int", "float") and _FLOAT.fullmatch(text):
            return float(re.sub(r"\.(?=inf|nan)", "", text.lower().replace("_", "")))
        known = tag in ("bool", "int", "float")
        reason = f"{text!r} is not what its tag !!{tag} says" if known else f"the tag {node.tag} is not allowed"
        self._fault(node, path, reason)
        return None

    def _origin(self, node: yaml.Node) -> Origin:
        line = node.start_mark.line + 1
        return Origin("file", f"{self.source}:{line}", line)

    def _fault(self, node: yaml.Node, path: Path, message: str) -> None:
        origin = self._origin(node)
        self.faults.setdefault((origin, message), Fault(path, message, origin=origin))
