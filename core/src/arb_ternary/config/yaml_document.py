"""YAML with line numbers, by the rules of YAML 1.2 and without its surprises.

Only ``true`` and ``false`` are booleans (``no`` is text), ``1e-3`` is a number, ``2026-01-01`` is text, a key may stand
once, and a tag never builds an object. Anchors, aliases and merge keys work.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from arb_ternary.config.document import Document
from arb_ternary.config.errors import Fault, raise_faults
from arb_ternary.config.paths import Origin, Path

__all__ = ["dump_inline", "dump_yaml", "parse_yaml_value", "read_yaml"]

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

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (its own, not the base's)

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_TAG + _kind, _pattern, _first)
    _Dumper.add_implicit_resolver(_TAG + _kind, _pattern, _first)


def read_yaml(text: str, source: str) -> Document:
    """Read one YAML document.

    Raises:
        InvalidConfig: ``text`` is not YAML.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise_faults([_syntax_fault(error, source)], {}, source)
    reader = _Reader(source)
    data = None if node is None else reader.value(node, ())
    return Document(data, source, reader.origins, tuple(reader.faults))


def parse_yaml_value(text: str) -> Any:
    """The value of an override.

    Raises:
        ValueError: ``text`` is not a YAML value.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(getattr(error, "problem", None) or str(error)) from None
    reader = _Reader("")
    value = None if node is None else reader.value(node, ())
    if reader.faults:
        raise ValueError(reader.faults[0].message)
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
        self.faults: list[Fault] = []
        self._open: set[int] = set()

    def value(self, node: yaml.Node, path: Path) -> Any:
        self.origins.setdefault(path, self._origin(node))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if id(node) in self._open:
            self._fault(node, path, "an alias to a value that contains it")
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                if node.tag != f"{_TAG}seq":
                    self._fault(node, path, f"the tag {node.tag} is not allowed")
                return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
            if node.tag != f"{_TAG}map":
                self._fault(node, path, f"the tag {node.tag} is not allowed")
            return self._mapping(node, path)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.Node, path: Path) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        merged: list[yaml.Node] = []
        lines: dict[Any, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == f"{_TAG}merge":
                merged.extend(value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node])
                continue
            key = self._key(key_node, path)
            if key is None:
                continue
            if key in lines:
                self._fault(key_node, (*path, key), f"the key is here twice; the first is in line {lines[key]}")
                continue
            lines[key] = key_node.start_mark.line + 1
            self.origins[(*path, key)] = self._origin(key_node)
            result[key] = self.value(value_node, (*path, key))
        for source in merged:
            if not isinstance(source, yaml.MappingNode):
                self._fault(source, path, "a merge key (<<) needs a mapping, or a list of mappings")
            elif id(source) in self._open:
                self._fault(source, path, "an alias to a value that contains it")
            else:
                # Keys that are written out win over merged ones, and earlier merges over later ones.
                inherited = _Reader(self.source)
                inherited._open = self._open | {id(source)}
                for key, value in inherited._mapping(source, path).items():
                    if key not in result:
                        result[key] = value
                        depth = len(path) + 1
                        self.origins.update({p: o for p, o in inherited.origins.items() if p[:depth] == (*path, key)})
                # The faults of an anchor were noted where it stands.
                noted = {(fault.origin, fault.message) for fault in self.faults}
                self.faults.extend(fault for fault in inherited.faults if (fault.origin, fault.message) not in noted)
        return result

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
        if tag in ("bool", "int", "float"):
            self._fault(node, path, f"{text!r} is not what its tag !!{tag} says")
        else:
            self._fault(node, path, f"the tag {node.tag} is not allowed")
        return None

    def _origin(self, node: yaml.Node) -> Origin:
        line = node.start_mark.line + 1
        return Origin("file", f"{self.source}:{line}", line)

    def _fault(self, node: yaml.Node, path: Path, message: str) -> None:
        self.faults.append(Fault(path, message, origin=self._origin(node)))
