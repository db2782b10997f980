"""Environment variables: how they are declared and read, and those of the core.

No other module looks at the environment. A distribution declares its variables beside the component
that reads them (``Spec.variables``). A variable is read when its value is needed, never at import,
so that a test or a notebook can change it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from attrs import frozen

from arb_ternary.errors import UsageProblem, nearest

_SWITCH: Final = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("0", "false", "no", "off", ""), False
)


@frozen
class Variable:
    """An environment variable: its name, the value that stands for an unset one, and one line of
    documentation.
    """

    name: str
    default: str
    summary: str

    def read(self) -> str:
        """The value, or the default when the variable is unset."""
        return os.environ.get(self.name, self.default)

    def set_default(self) -> None:
        """Set it to its default where it is unset, for a library that reads it when it is
        loaded.
        """
        os.environ.setdefault(self.name, self.default)

    def flag(self) -> bool:
        """The value as a switch: 1, true, yes, on against 0, false, no, off and the empty value; no
        other.
        """
        value = self.read().strip().lower()
        if value not in _SWITCH:
            raise UsageProblem(f"{self.name}: {self.read()!r} is neither on nor off", "use 1 or 0")
        return _SWITCH[value]

    def integer(self) -> int:
        """The value as a number, which must be 0 or more; an empty value is the default."""
        value = self.read().strip() or self.default
        if not (value.isascii() and value.isdecimal()):
            what = f"{self.name}: {value!r} is not a whole number of 0 or more"
            raise UsageProblem(what, f"unset, it is {self.default}")
        return int(value)

    def names(self) -> tuple[str, ...]:
        """The value as names separated by commas, trimmed; empty ones are dropped."""
        return tuple(part for part in (part.strip() for part in self.read().split(",")) if part)


PLUGINS: Final = Variable(
    "ARB_PLUGINS",
    "*",
    "plugins to load, by name, with commas between; `*`: every installed one; an empty value: none",
)
PLUGINS_DISABLED: Final = Variable(
    "ARB_PLUGINS_DISABLED", "", "plugins not to load, by name, separated by commas"
)
PLUGINS_STRICT: Final = Variable(
    "ARB_PLUGINS_STRICT",
    "0",
    "1 makes a plugin that cannot be loaded an error instead of a warning",
)
TRACE_PLUGINS: Final = Variable(
    "ARB_TRACE_PLUGINS", "0", "1 prints what the plugin loader does, with times, on standard error"
)
BACKEND: Final = Variable(
    "ARB_TERNARY_BACKEND",
    "",
    "kernel backend: `auto`, or names with commas, the preferred first; empty: the config's",
)
STRICT: Final = Variable(
    "ARB_TERNARY_STRICT",
    "0",
    "1 makes an optional op that the backend lacks an error instead of a fallback",
)
DECODE_CACHE_MB: Final = Variable(
    "ARB_TERNARY_DECODE_CACHE_MB",
    "256",
    "MiB of decoded weights that the torch backend keeps; 0 keeps none",
)
CUDA_VISIBLE_DEVICES: Final = Variable(
    "CUDA_VISIBLE_DEVICES",
    "all",
    "the driver's own list of visible devices; an empty one hides them all",
)

#: The variables that the core itself reads: those above.
VARIABLES: Final = tuple(value for value in list(globals().values()) if isinstance(value, Variable))


def given(variables: Iterable[Variable]) -> dict[str, str]:
    """Those of ``variables`` that are set, with their values."""
    return {
        variable.name: os.environ[variable.name]
        for variable in variables
        if variable.name in os.environ
    }


def unrecognised(variables: Iterable[Variable]) -> dict[str, str | None]:
    """What is set, looks like the program's own (``ARB_...``), and is not listed; with the nearest
    that is.
    """
    known = {variable.name for variable in variables}
    return {
        name: nearest(name, known)
        for name in sorted(os.environ)
        if name.startswith("ARB_") and name not in known
    }


def for_child(**changes: str) -> dict[str, str]:
    """The environment of this process with ``changes``, for a process that it starts."""
    return {**os.environ, **changes}


@contextmanager
def left_unchanged() -> Iterator[None]:
    """Put the environment back after a block: for imports of libraries that write to it."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
