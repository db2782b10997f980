"""The program of the process in which a chat template runs.

A template comes with a model, so it is not trusted. jinja2's sandbox keeps it from attributes of
Python's objects, but not from endless loops or huge texts. So it runs in a process of its own,
which the operating system ends when a text takes too long, and whose memory has a limit.

Each line of standard input is a question in JSON and each line of standard output its answer. The
first question has the template, its variables, the date and the seconds for each answer; further
ones have a conversation.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

#: Most memory of the process, in bytes.
_MEMORY: Final = 1 << 30
#: Longest text that a template may write, in characters.
_LONGEST: Final = 1 << 24

Answer = dict[str, Any]


class RaisedError(jinja2.TemplateError):
    """A template has called ``raise_exception``: it does not write such conversations."""


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
        environment.blocks.append((environment.written, text))
        return text


class _Namespace(Namespace):
    """The namespace of templates; no name begins with an underscore, as in transformers."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace has no name that begins with an underscore: {name}")
        super().__setitem__(name, value)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of chat templates, which is that of transformers.

    Args:
        date: the time that ``strftime_now`` tells; None = now.

    Attributes:
        written: characters that the template has written so far.
        blocks: first character and text of each block ``{% generation %}``.
    """

    def __init__(self, date: datetime | None = None) -> None:
        self.date = date
        self.written = 0
        self.blocks: list[tuple[int, str]] = []
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        self.filters["tojson"] = _to_json
        self.globals["namespace"] = _Namespace
        self.globals["dict"] = _dict
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = self._strftime_now

    def compile_template(self, source: str) -> Answer:
        """Make :meth:`write` use a template."""
        self._template = self.from_string(source)
        return {}

    def write(self, variables: dict[str, Any]) -> Answer:
        """Return the text of the template, and first character and end of its marked blocks."""
        self.written = 0
        self.blocks = []
        pieces = []
        for piece in self._template.generate(variables):
            pieces.append(piece)
            self.written += len(piece)
            if self.written > _LONGEST:
                raise jinja2.TemplateError(f"the text has more than {_LONGEST:,} characters")
        text = "".join(pieces)
        spans = [(start, start + len(block)) for start, block in self.blocks]
        if any(not text.startswith(block, start) for start, block in self.blocks):
            return {
                "error": "{% generation %} lies within a macro, a call or a `set` block, so that "
                "the answers cannot be told from the rest",
                "hint": "Move the block to the top level of the template, or remove it.",
            }
        return {"text": text, "generated": spans}

    def _strftime_now(self, form: str) -> str:
        return (self.date or datetime.now()).strftime(form)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


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


def _fault(error: Exception) -> Answer:
    """Return an error in the template, with its line."""
    line = getattr(error, "lineno", None)
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == "<template>":
            line = frame.lineno
    what = str(error) or type(error).__name__
    if isinstance(error, MemoryError):
        what = f"the template needs more than {_MEMORY >> 30} GiB of memory"
    return {"error": what, "line": line, "refused": isinstance(error, RaisedError)}


def _answer(seconds: float, work: Callable[[], Answer]) -> None:
    """Write what ``work`` returns, or its error; the process ends after ``seconds``."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        answer = work()
    except Exception as error:
        answer = _fault(error)
    line = json.dumps(answer)
    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Answer the questions of standard input."""
    with suppress(ValueError, OSError):  # macOS refuses it
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    first = json.loads(sys.stdin.readline())
    seconds = first["seconds"]
    date = first["date"]
    environment = TemplateEnvironment(None if date is None else datetime.fromisoformat(date))

    _answer(seconds, lambda: environment.compile_template(first["source"]))
    for line in sys.stdin:
        conversation = json.loads(line)
        variables = {**first["variables"], **conversation, "tools": None, "documents": None}
        _answer(seconds, partial(environment.write, variables))


if __name__ == "__main__":
    main()
