"""The jinja2 environment of chat templates: that of transformers, with a bound on its work.

A template comes with a model, so it is not trusted. The sandbox of jinja2 keeps it from attributes
of Python's objects, but not from an endless loop or from huge texts. Here every call, filter,
operator, output and round of a loop adds to a count of characters and steps, and a template that
exceeds :attr:`Work.limit` is stopped. The count needs no clock and no signal, so it is the same
on every machine and in every thread.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

#: Work of a step that makes no text, in characters.
_STEP: Final = 10
#: Largest number that a template may give to a function, such as a width.
_LARGEST: Final = 100_000
#: The same for functions that repeat an argument in every line or item of a text.
_REPEATED: Final = frozenset({"indent", "wordwrap", "tojson", "expandtabs"})
_LARGEST_REPEATED: Final = 100
#: Widths in format strings that are too large, or taken from an argument.
_WIDE_BRACES: Final = re.compile(r"\{[^{}]*:[^{}]*(\{|\d{6})")
_WIDE_PERCENT: Final = re.compile(r"%[^a-zA-Z%]*(\*|\d{6})")
#: Methods of texts whose result can be as large as the product of what they are given.
_UNBOUNDED: Final = frozenset({"format_map", "translate"})


class TooMuchWorkError(jinja2.TemplateError):
    """A template does more than it may."""


class RaisedError(jinja2.TemplateError):
    """A template has called ``raise_exception``: it does not write such conversations."""


class Work:
    """The work of a template so far.

    Args:
        limit: characters and steps after which it is stopped.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.done = 0

    def check(self, size: int) -> None:
        """Raise TooMuchWorkError if a result of ``size`` characters is too much."""
        if self.done + size > self.limit:
            raise TooMuchWorkError(
                f"the template does too much: more than {self.limit:,} characters and steps; "
                f"it may have an endless loop"
            )

    def add(self, size: int) -> None:
        """Count ``size`` characters and a step."""
        self.check(size + _STEP)
        self.done += size + _STEP


class Spans:
    """The texts that the blocks ``{% generation %}`` of a template have written.

    Attributes:
        length: characters that the template has written so far.
        found: first character and end of each block, and its text.
    """

    def __init__(self) -> None:
        self.length = 0
        self.found: list[tuple[int, int, str]] = []


class GenerationTag(Extension):
    """The block ``{% generation %}``, around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        """Return a call of :meth:`mark` with the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Macro) -> str:
        """Return the text of the block, and record where it lies."""
        text = str(caller())
        environment = self.environment
        assert isinstance(environment, TemplateEnvironment)
        spans = environment.spans.get()
        if spans is not None:
            spans.found.append((spans.length, spans.length + len(text), text))
        return text


class _Counted(NodeTransformer):
    """Let rounds of loops and joined texts of a template be counted."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        text = sum(len(each.data) for each in node.find_all(nodes.TemplateData))
        # An item costs less than a call, which the sandbox checks.
        rounds = nodes.EnvironmentAttribute("rounds")
        node.body.insert(0, nodes.ExprStmt(nodes.Getitem(rounds, nodes.Const(text), "load")))
        return node.set_lineno(node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        join = nodes.EnvironmentAttribute("join_texts")
        return nodes.Call(join, node.nodes, [], None, None).set_lineno(node.lineno)


class _Rounds:
    """Counts a round of a loop whose body has as many characters of text as the item says."""

    def __init__(self, work: ContextVar[Work]) -> None:
        self.work = work

    def __getitem__(self, size: int) -> None:
        self.work.get().add(size)


class _Namespace(Namespace):
    """The namespace of templates; no name begins with an underscore, as in transformers."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace has no name that begins with an underscore: {name}")
        super().__setitem__(name, value)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of chat templates."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        self.work: ContextVar[Work] = ContextVar("work")
        self.rounds = _Rounds(self.work)
        self.spans: ContextVar[Spans | None] = ContextVar("spans", default=None)
        self.date: ContextVar[datetime | None] = ContextVar("date", default=None)
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            finalize=self._counted_output,
        )
        for name, function in self.filters.items():
            self.filters[name] = self._counted_filter(name, function)
        self.filters["tojson"] = self._counted_filter("tojson", _to_json)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = self._strftime_now
        self.globals["namespace"] = _Namespace
        self.globals["dict"] = _dict
        del self.globals["lipsum"]

    @contextmanager
    def limited(
        self, work: Work, spans: Spans | None = None, date: datetime | None = None
    ) -> Iterator[None]:
        """Compile or render a template: count its work, and record its spans."""
        tokens = (self.work.set(work), self.spans.set(spans), self.date.set(date))
        try:
            yield
        finally:
            self.work.reset(tokens[0])
            self.spans.reset(tokens[1])
            self.date.reset(tokens[2])

    def join_texts(self, *parts: Any) -> str:
        """Return what ``~`` makes of its operands."""
        texts = [str(part) for part in parts]
        self.work.get().add(sum(map(len, texts)))
        return "".join(texts)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _UNBOUNDED and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Refuse ``format_map``, which :meth:`is_safe_attribute` then does."""
        if getattr(value, "__name__", None) in _UNBOUNDED:
            return None
        return super().wrap_str_format(value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.work.get().add(self._size_of_binop(operator, left, right))
        return super().call_binop(context, operator, left, right)

    # As in the base class, the first names leave all others to the keywords of the template.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if not isinstance(__obj, Macro):
            # The sandbox wraps `format`.
            owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
            text = owner if isinstance(owner, str) else None
            args = __self._checked(getattr(__obj, "__name__", ""), text, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        __self.work.get().add(_size(result))
        return result

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = super()._parse(source, name, filename)
        _Counted().visit(parsed)
        return parsed

    def _counted_output(self, value: Any) -> Any:
        self.work.get().add(_size(value))
        return value

    def _counted_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # Some filters get the context or the environment before the value.
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            context = args[:first]
            given = args[first:]
            if given and isinstance(given[0], str):
                checked = (given[0], *self._checked(name, given[0], given[1:], kwargs))
            else:
                checked = self._checked(name, None, given, kwargs)
            result = function(*context, *checked, **kwargs)
            self.work.get().add(_size(result) + sum(map(_size, checked)))
            return result

        return counted

    def _checked(
        self, name: str, text: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Return the arguments of a function, after checking that its result is not too large.

        Args:
            name: name of the function, a filter or a method of ``text``.
            text: the text that it changes; None if it changes none.
            args: its arguments besides ``text``.
            kwargs: its arguments by name.
        """
        work = self.work.get()
        if name in ("join", "sum") and args and not isinstance(args[0], str):
            # What `map` and `select` return can be read only once.
            items = list(args[0])
            args = (items, *args[1:])
            between = max(map(_size, [text, *args[1:], *kwargs.values()]))
            total = sum(map(_size, items)) + len(items) * between
            # Lists are added one after another, and each sum is a new list.
            work.check(total * len(items) if name == "sum" else total)
        others = (*args, *kwargs.values())
        if name == "replace" and text is not None:
            texts = [value for value in others if isinstance(value, str)]
            pairs = itertools.permutations(texts, 2)
            work.check(max((text.count(old) * len(new) for old, new in pairs), default=0))
        if name == "format" and text is not None:
            _require_narrow(text)
        largest = _LARGEST_REPEATED if name in _REPEATED else _LARGEST
        for value in others:
            if isinstance(value, int) and value > largest:
                raise TooMuchWorkError(f"the template gives {name} {value}: at most {largest}")
            if name in _REPEATED and isinstance(value, str) and len(value) > largest:
                raise TooMuchWorkError(f"the template repeats a text of {len(value)} characters")
        return args

    @staticmethod
    def _size_of_binop(operator: str, left: Any, right: Any) -> int:
        """Return the size of the result of an operator, as :func:`_size` gives it."""
        if operator == "*":
            numbers = [each for each in (left, right) if isinstance(each, int)]
            if len(numbers) == 1:
                return max(numbers[0], 0) * max(_size(left), _size(right))
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            return left.bit_length() * max(right, 0)
        if operator == "%" and isinstance(left, str):
            _require_narrow(left)
        return _size(left) + _size(right)

    def _strftime_now(self, form: str) -> str:
        return (self.date.get() or datetime.now()).strftime(form)


def _size(value: Any) -> int:
    """Return the size of a value: characters, items, or bits of a whole number."""
    if isinstance(value, str | list | tuple | dict):
        return len(value)
    return value.bit_length() if isinstance(value, int) else 0


def _require_narrow(text: str) -> None:
    """Raise TooMuchWorkError if a format string has a large width, or takes one from elsewhere."""
    braces = text.replace("{{", "").replace("}}", "")
    if _WIDE_BRACES.search(braces) or _WIDE_PERCENT.search(text):
        raise TooMuchWorkError(f"the template formats a text too wide: {text[:80]!r}")


def _raise_exception(message: str) -> None:
    raise RaisedError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter writes HTML's characters as escapes.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)
