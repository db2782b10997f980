"""Declare and read environment variables; the variables of the core.

No other module reads the environment. A distribution declares its variables on the spec of the
component that reads them (``Spec.variables``). A variable is read when its value is needed, never
at import, so that a test or a notebook can change it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from attrs import frozen

from arb_ternary.errors import UsageProblem, nearest

_ON: Final = ("1", "true", "yes", "on")
_OFF: Final = ("0", "false", "no", "off", "")


@frozen
class Variable:
    """An environment variable.

    Attributes:
        name: its name.
        default: the value that stands for an unset variable.
        summary: one line of documentation.
    """

    name: str
    default: str
    summary: str

    def read(self) -> str:
        """Return the value, or the default if the variable is unset."""
        return os.environ.get(self.name, self.default)

    def set_default(self) -> None:
        """Set it to its default if it is unset, for a library that reads it when it is loaded."""
        os.environ.setdefault(self.name, self.default)

    def flag(self) -> bool:
        """Return the value as a switch: 1, true, yes, on; or 0, false, no, off, or empty.

        Raises:
            UsageProblem: it is another value.
        """
        value = self.read().strip().lower()
        if value not in (*_ON, *_OFF):
            raise UsageProblem(f"{self.name}: {self.read()!r} is neither on nor off", "use 1 or 0")
        return value in _ON

    def integer(self, largest: int = 2**31 - 1) -> int:
        """Return the value as a number; an empty value is the default.

        Raises:
            UsageProblem: it is not a whole number from 0 to ``largest``.
        """
        value = self.read().strip() or self.default
        is_whole = value.isascii() and value.isdecimal()
        # Python reads numbers of a few thousand digits only.
        if not is_whole or len(value.lstrip("0")) > len(str(largest)) or int(value) > largest:
            what = f"{self.name}: {value!r} is not a whole number from 0 to {largest}"
            raise UsageProblem(what, f"unset, it is {self.default}")
        return int(value)

    def names(self) -> tuple[str, ...]:
        """Return the value as names separated by commas, trimmed; empty ones are dropped."""
        return tuple(filter(None, map(str.strip, self.read().split(","))))


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

#: The variables that the core reads: those above.
VARIABLES: Final = tuple(value for value in list(globals().values()) if isinstance(value, Variable))


def given(variables: Iterable[Variable]) -> dict[str, str]:
    """Return the values of those of ``variables`` that are set, by name."""
    names = [variable.name for variable in variables]
    return {name: os.environ[name] for name in names if name in os.environ}


def unrecognised(variables: Iterable[Variable]) -> dict[str, str | None]:
    """Return set variables called ``ARB_...`` that are not in ``variables``.

    Each comes with the nearest name of a known variable, or None.
    """
    known = {variable.name for variable in variables}
    unknown = [name for name in sorted(os.environ) if name.startswith("ARB_")]
    return {name: nearest(name, known) for name in unknown if name not in known}


def for_child(**changes: str) -> dict[str, str]:
    """Return the environment of this process with ``changes``, for a child process."""
    return {**os.environ, **changes}


@contextmanager
def left_unchanged() -> Iterator[None]:
    """Restore the environment after a block, around imports of libraries that write to it."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
