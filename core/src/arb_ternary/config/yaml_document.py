"""YAML with line numbers, by the rules of YAML 1.2 and without its surprises.

Only ``true`` and ``false`` are booleans (``no`` is text), ``1e-3`` is a number, ``2026-01-01`` is
text, a key may stand once, and a tag never builds an object. Anchors, aliases and merge keys work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

import yaml
from attrs import field, frozen

from arb_ternary.config.errors import Fault, Faulty, Origin, Path, raise_faults

T = TypeVar("T")
_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_FLOAT = (
    r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
# : How a scalar of each tag is written, and the value of such a text without its underscores. The
# first match counts.
_SCALARS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "null": (r"~|null|Null|NULL|", lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    "int": (
        r"[-+]?[0-9][0-9_]*|0o[0-7][0-7_]*|0x[0-9a-fA-F][0-9a-fA-F_]*",
        lambda text: int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)),
    ),
    "float": (_FLOAT, lambda text: float(re.sub(r"\.(?=[in])", "", text.lower()))),
}


class _Loader(yaml.SafeLoader):
    """Composes nodes; :class:`_Reader` makes values of them."""

    #: For text that begins with any letter (None).
    yaml_implicit_resolvers = {  # noqa: RUF012
        None: [
            *(
                (_TAG + tag, re.compile(rf"({pattern})\Z"))
                for tag, (pattern, _) in _SCALARS.items()
            ),
            (_MERGE, re.compile(r"<<\Z")),
        ]
    }


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the text that :class:`_Loader` would not read as text."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # Only in double quotes are these line breaks escaped; elsewhere they read back as others.
        style = '"' if re.search("[\x85\u2028\u2029]", data) else None
        return self.represent_scalar(f"{_TAG}str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


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


@frozen(eq=False)
class LoadedConfig(Generic[T]):
    """A structured config and where it came from.

    Attributes:
        origins: where each value of ``to_plain(config)`` came from, by path.
        source: the file, as the user named it.
        summary: what it describes, in a few words; empty when there is nothing to say.
    """

    config: T
    origins: Mapping[Path, Origin] = field(factory=dict)
    source: str = ""
    summary: str = ""


def read_yaml(text: str, source: str) -> Document:
    """Read one YAML document; a ConfigError says where ``text`` is not YAML."""
    reader = _Reader(source)
    try:
        data = reader.read(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        context = getattr(error, "context", None)
        message = f"not valid YAML: {context + ': ' if context else ''}{_problem(error)}"
        raise_faults(
            [Fault((), message, origin=None if mark is None else reader.line(mark))], {}, source
        )
    return Document(data, source, reader.origins, tuple(reader.faults.values()))


def parse_yaml_value(text: str) -> Any:
    """The value of an override; Faulty when ``text`` is not one."""
    reader = _Reader("")
    try:
        value = reader.read(text)
    except yaml.YAMLError as error:
        raise Faulty(Fault((), f"the value is not valid YAML: {_problem(error)}")) from None
    for fault in reader.faults.values():
        raise Faulty(Fault((), f"the value is not valid YAML: {fault.message}"))
    return value


def dump_yaml(data: Any) -> str:
    """Plain values as YAML that :func:`read_yaml` reads back as equal values, in the order of the
    keys.
    """
    return str(
        yaml.dump(
            data,
            Dumper=_Dumper,
            sort_keys=False,
            allow_unicode=True,
            default_flow_style=None,
            width=100,
        )
    )


def dump_inline(value: Any) -> str:
    """A plain value as YAML on one line."""
    text = yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=True,
        width=2**31,
    )
    return str(text).removesuffix("...\n").strip()


def _problem(error: yaml.YAMLError) -> str:
    return getattr(error, "problem", None) or str(error).splitlines()[0]


#: The nodes of key and value by key.
_Entries: TypeAlias = dict[str | int, tuple[yaml.Node, yaml.Node]]


class _Reader:
    """Turns nodes into plain values, and notes the line of each and what a config may not have."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.origins: dict[Path, Origin] = {}
        #: By place and message: however many aliases lead to a fault, it is one.
        self.faults: dict[tuple[Origin, str], Fault] = {}

    def read(self, text: str) -> Any:
        node = yaml.compose(text, Loader=_Loader)
        return None if node is None else self.value(node, (), ())

    def line(self, mark: Any) -> Origin:
        return Origin("file", f"{self.source}:{mark.line + 1}", mark.line + 1)

    def value(self, node: yaml.Node, path: Path, above: tuple[yaml.Node, ...]) -> Any:
        """The value of ``node``, which the nodes ``above`` contain."""
        self.origins.setdefault(path, self.line(node.start_mark))
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        is_list = isinstance(node, yaml.SequenceNode)
        if node.tag != _TAG + ("seq" if is_list else "map"):
            self.fault(node, path, f"the tag {node.tag} is not allowed")
        if node in above:
            return self.fault(node, path, "an alias to a value that contains it")
        if is_list:
            return [
                self.value(item, (*path, index), (*above, node))
                for index, item in enumerate(node.value)
            ]
        entries = self.entries(node, path, (*above, node))
        self.origins.update(
            {(*path, key): self.line(each.start_mark) for key, (each, _) in entries.items()}
        )
        return {
            key: self.value(each, (*path, key), (*above, node))
            for key, (_, each) in entries.items()
        }

    def entries(self, node: yaml.Node, path: Path, above: tuple[yaml.Node, ...]) -> _Entries:
        """The nodes of keys and values. Keys that are written out win over merged ones, earlier
        merges over later.
        """
        found: _Entries = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                merged.extend(
                    value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                )
                continue
            key: Any = (
                self.scalar(key_node, path) if isinstance(key_node, yaml.ScalarNode) else None
            )
            if type(key) not in (str, int):
                self.fault(key_node, path, "a key must be text or a whole number")
            elif key in found:
                line = found[key][0].start_mark.line + 1
                self.fault(
                    key_node, (*path, key), f"the key is here twice; the first is in line {line}"
                )
            else:
                found[key] = (key_node, value_node)
        for source in merged:
            if not isinstance(source, yaml.MappingNode):
                self.fault(source, path, "a merge key (<<) needs a mapping, or a list of mappings")
            elif source in above:
                self.fault(source, path, "an alias to a value that contains it")
            else:
                found = {**self.entries(source, path, (*above, source)), **found}
        return found

    def scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        tag = node.tag.removeprefix(_TAG)
        if tag == "str":
            return node.value
        if tag not in _SCALARS:
            return self.fault(node, path, f"the tag {node.tag} is not allowed")
        pattern, value_of = _SCALARS[tag]
        if re.fullmatch(pattern, node.value) is None:
            return self.fault(node, path, f"{node.value!r} is not what its tag !!{tag} says")
        return value_of(node.value.replace("_", ""))

    def fault(self, node: yaml.Node, path: Path, message: str) -> Any:
        """Note a fault; the value is None."""
        origin = self.line(node.start_mark)
        self.faults.setdefault((origin, message), Fault(path, message, origin=origin))
        return None
