"""Read and write YAML by the rules of YAML 1.2, with line numbers.

Only ``true`` and ``false`` are booleans (``no`` is text), ``1e-3`` is a number, ``2026-01-01`` is
text, a key may occur once, and a tag never builds an object. Anchors, aliases and merge keys work.
Size, depth and what aliases expand to are limited, so that every file is read in a second.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import yaml
from attrs import field, frozen

from arb_ternary.config.errors import Fault, Faulty, Origin, Path, raise_faults

T = TypeVar("T")
#: Limits of a document: characters, values, values with every alias counted as what it stands for,
#: values inside each other, digits of a whole number.
_LONGEST = 1 << 19
_MOST_NODES = 10_000
_MOST_EXPANDED = 50_000
_DEEPEST = 64
_MOST_DIGITS = 1_000
_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_FLOAT = (
    r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
#: How a scalar of each tag is written, and the value of such a text without its underscores. The
#: first match counts.
_SCALARS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "null": (r"~|null|Null|NULL|", lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    "int": (
        r"[-+]?[0-9][0-9_]*|0o[0-7][0-7_]*|0x[0-9a-fA-F][0-9a-fA-F_]*",
        lambda text: int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)),
    ),
    "float": (_FLOAT, lambda text: float(re.sub(r"\.(?=[in])", "", text.lower()))),
}


_RESOLVERS = []
for _tag, (_pattern, _) in _SCALARS.items():
    _RESOLVERS.append((f"{_TAG}{_tag}", re.compile(rf"({_pattern})\Z")))
_RESOLVERS.append((_MERGE, re.compile(r"<<\Z")))


class _Loader(yaml.SafeLoader):
    """Composes nodes; :class:`_Reader` turns them into values."""

    #: The key None stands for text that begins with any letter.
    yaml_implicit_resolvers = {None: _RESOLVERS}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = 0
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node and those inside it.

        Raises:
            ComposerError: there are too many, or one is too deep.
        """
        self._nodes += 1
        self._depth += 1
        problem = None
        if self._nodes > _MOST_NODES:
            problem = f"more than {_MOST_NODES:,} values"
        if self._depth > _DEEPEST:
            problem = f"more than {_DEEPEST} values inside each other"
        if problem is not None:
            raise yaml.composer.ComposerError(None, None, problem, self.get_mark())
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


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
        source: the name of the file as the user gave it; empty if there is no file.
        origins: by path; a value without an entry came with the value that contains it.
        faults: the faults that reading found. Structuring adds to them, so that all are reported
            together.
    """

    data: Any
    source: str = ""
    origins: Mapping[Path, Origin] = field(factory=dict)
    faults: tuple[Fault, ...] = ()


@frozen(eq=False)
class LoadedConfig(Generic[T]):
    """A structured config and where it came from.

    Attributes:
        config: an object of the root class.
        origins: where each value of ``to_plain(config)`` came from, by path.
        source: the file, as the user named it.
        summary: a description in a few words; may be empty.
        notes: what the user should know about it, a sentence each.
    """

    config: T
    origins: Mapping[Path, Origin] = field(factory=dict)
    source: str = ""
    summary: str = ""
    notes: Sequence[str] = ()


def read_yaml(text: str, source: str) -> Document:
    """Read one YAML document.

    Raises:
        ConfigError: ``text`` is not YAML; it names the line.
    """
    reader = _Reader(source)
    try:
        data = reader.read(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = None if mark is None else reader.line(mark)
        problem = _problem(error)
        context = getattr(error, "context", None)
        if context:
            problem = f"{context}: {problem}"
        fault = Fault((), f"not valid YAML: {problem}", origin=line)
        raise_faults([fault], {}, source)
    return Document(data, source, reader.origins, tuple(reader.faults.values()))


def parse_yaml_value(text: str) -> Any:
    """Return the value of an override.

    Raises:
        Faulty: ``text`` is not YAML, or holds what a config may not have.
    """
    reader = _Reader("")
    try:
        value = reader.read(text)
    except yaml.YAMLError as error:
        raise Faulty(Fault((), f"the value is not valid YAML: {_problem(error)}")) from None
    for fault in reader.faults.values():
        raise Faulty(Fault((), f"the value is not valid YAML: {fault.message}"))
    return value


def dump_yaml(data: Any) -> str:
    """Return plain values as YAML that :func:`read_yaml` reads back as equal values."""
    return _dump(data, flow=None, width=100)


def dump_inline(value: Any) -> str:
    """Return a plain value as YAML on one line."""
    return _dump(value, flow=True, width=2**31).removesuffix("...\n").strip()


def _dump(value: Any, *, flow: bool | None, width: int) -> str:
    """Return a value as YAML, all in flow style (``{a: 1}``), or None: only its innermost parts."""
    text = yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=flow,
        width=width,
    )
    return str(text)


def _problem(error: yaml.YAMLError) -> str:
    """Return what is wrong, on one line."""
    return getattr(error, "problem", None) or str(error).splitlines()[0]


#: The nodes of key and value by key.
_Entries: TypeAlias = dict[str | int, tuple[yaml.Node, yaml.Node]]


class _Reader:
    """Turns nodes into plain values; records the line of each, and what a config may not have."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.origins: dict[Path, Origin] = {}
        #: By place and message: a fault to which several aliases lead is reported once.
        self.faults: dict[tuple[Origin, str], Fault] = {}
        self._expanded = 0

    def read(self, text: str) -> Any:
        """Return the value of a document; None if it is empty.

        Raises:
            YAMLError: it is not YAML, or beyond a limit.
        """
        if len(text) > _LONGEST:
            raise yaml.YAMLError(f"{len(text):,} characters are more than {_LONGEST:,}")
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        except (ValueError, OverflowError) as error:
            # The scanner takes any number in an escape such as \\UFFFFFFFF.
            raise yaml.scanner.ScannerError(None, None, str(error), loader.get_mark()) from error
        finally:
            loader.dispose()
        if node is None:
            return None
        return self.value(node, (), ())

    def line(self, mark: Any) -> Origin:
        """Return the line of a mark as an origin."""
        return Origin("file", f"{self.source}:{mark.line + 1}", mark.line + 1)

    def value(self, node: yaml.Node, path: Path, above: tuple[yaml.Node, ...]) -> Any:
        """Return the value of ``node``, which is inside the nodes ``above``."""
        self.count(node, above)
        self.origins.setdefault(path, self.line(node.start_mark))
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        is_list = isinstance(node, yaml.SequenceNode)
        usual_tag = f"{_TAG}seq" if is_list else f"{_TAG}map"
        if node.tag != usual_tag:
            self.fault(node, path, f"the tag {node.tag} is not allowed")
        if node in above:
            return self.fault(node, path, "an alias to a value that contains it")

        inside = (*above, node)
        if is_list:
            items = []
            for index, item in enumerate(node.value):
                items.append(self.value(item, (*path, index), inside))
            return items

        values = {}
        for key, (key_node, value_node) in self.entries(node, path, inside).items():
            place = (*path, key)
            self.origins[place] = self.line(key_node.start_mark)
            values[key] = self.value(value_node, place, inside)
        return values

    def entries(self, node: yaml.Node, path: Path, above: tuple[yaml.Node, ...]) -> _Entries:
        """Return the nodes of keys and values of a mapping.

        Keys that are written out win over merged ones, and earlier merges over later ones.
        """
        self.count(node, above)
        found: _Entries = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                if isinstance(value_node, yaml.SequenceNode):
                    merged += value_node.value
                else:
                    merged.append(value_node)
                continue

            key: Any = None
            if isinstance(key_node, yaml.ScalarNode):
                key = self.scalar(key_node, path)
            if type(key) not in (str, int):
                self.fault(key_node, path, "a key must be text or a whole number")
            elif key in found:
                line = found[key][0].start_mark.line + 1
                message = f"the key is here twice; the first is in line {line}"
                self.fault(key_node, (*path, key), message)
            else:
                found[key] = (key_node, value_node)

        for source in merged:
            if not isinstance(source, yaml.MappingNode):
                self.fault(source, path, "a merge key (<<) needs a mapping, or a list of mappings")
            elif source in above:
                self.fault(source, path, "an alias to a value that contains it")
            else:
                from_source = self.entries(source, path, (*above, source))
                found = {**from_source, **found}
        return found

    def count(self, node: yaml.Node, above: tuple[yaml.Node, ...]) -> None:
        """Count a node, again for each alias that leads to it.

        Raises:
            ComposerError: aliases expand to too many nodes, or too deep.
        """
        self._expanded += 1
        problem = None
        if self._expanded > _MOST_EXPANDED:
            problem = f"aliases expand to more than {_MOST_EXPANDED:,} values"
        if len(above) > _DEEPEST:
            problem = f"aliases expand to more than {_DEEPEST} values inside each other"
        if problem is not None:
            raise yaml.composer.ComposerError(None, None, problem, node.start_mark)

    def scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        """Return the value of a scalar by its tag."""
        tag = node.tag.removeprefix(_TAG)
        if tag == "str":
            if not node.value.isascii() and re.search("[\ud800-\udfff]", node.value):
                return self.fault(node, path, "the text has half of a surrogate pair")
            return node.value
        if tag not in _SCALARS:
            return self.fault(node, path, f"the tag {node.tag} is not allowed")
        pattern, value_of = _SCALARS[tag]
        if re.fullmatch(pattern, node.value) is None:
            return self.fault(node, path, f"{node.value!r} is not what its tag !!{tag} says")
        if tag == "int" and len(node.value) > _MOST_DIGITS:
            message = f"a whole number of {len(node.value):,} digits; at most {_MOST_DIGITS:,}"
            return self.fault(node, path, message)
        return value_of(node.value.replace("_", ""))

    def fault(self, node: yaml.Node, path: Path, message: str) -> Any:
        """Record a fault; return None as the value."""
        origin = self.line(node.start_mark)
        self.faults.setdefault((origin, message), Fault(path, message, origin=origin))
        return None
