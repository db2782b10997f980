"""Every environment variable that the program reads, and the only place that reads them.

Variables are read when their value is needed, never at import, so that a test or a notebook can change them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from attrs import frozen

from arb_ternary.errors import UsageProblem, nearest

__all__ = [
    "VARIABLES",
    "Variable",
    "for_child",
    "given",
    "left_unchanged",
    "read",
    "read_flag",
    "read_integer",
    "read_names",
    "unrecognised",
]


@frozen
class Variable:
    """An environment variable: its name, the value that stands for an unset one, and one line of documentation."""

    name: str
    default: str
    summary: str


VARIABLES: Final[tuple[Variable, ...]] = (
    Variable(
        "ARB_PLUGINS",
        "*",
        "plugins to load, by name, separated by commas; `*` loads every installed one, an empty value none",
    ),
    Variable("ARB_PLUGINS_DISABLED", "", "plugins not to load, by name, separated by commas"),
    Variable("ARB_PLUGINS_STRICT", "0", "1 makes a plugin that cannot be loaded an error instead of a warning"),
    Variable("ARB_TRACE_PLUGINS", "0", "1 prints what the plugin loader does, with times, on standard error"),
    Variable(
        "ARB_TERNARY_BACKEND",
        "",
        "kernel backend: `auto`, a name, or names with commas in order of preference; empty leaves it to the config",
    ),
    Variable("ARB_TERNARY_STRICT", "0", "1 makes an optional op that the backend lacks an error instead of a fallback"),
    Variable("ARB_TERNARY_DECODE_CACHE_MB", "256", "MiB of decoded weights that the torch backend keeps; 0 keeps none"),
    Variable("ARB_TERNARY_CPU_ISA", "", "instruction set of the `cpu` backend; an empty one takes the fastest"),
    Variable("TRITON_INTERPRET", "0", "Triton's own switch: 1 runs its kernels in an interpreter, on the CPU"),
    Variable(
        "CXX", "", "the C++ compiler of kernels that are compiled for the CPU; empty takes the first that is found"
    ),
    Variable(
        "CUDA_HOME", "", "the CUDA toolkit that compiles kernels; empty looks for nvcc in PATH and /usr/local/cuda"
    ),
    Variable(
        "ARB_TERNARY_TRITON_TUNE", "0", "1 lets the `triton` backend measure tile sizes on the GPU and keep the fastest"
    ),
    Variable("XDG_CACHE_HOME", "", "folder of caches, for measured tile sizes; empty is ~/.cache"),
    Variable("CUDA_VISIBLE_DEVICES", "all", "the driver's own list of visible devices; an empty one hides them all"),
)

_BY_NAME: Final = {variable.name: variable for variable in VARIABLES}
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off", ""})


def read(name: str) -> str:
    """The value of a listed variable, or its default when it is unset.

    Raises:
        KeyError: ``name`` is not in :data:`VARIABLES`.
    """
    return os.environ.get(name, _BY_NAME[name].default)


def read_flag(name: str) -> bool:
    """A listed variable as a switch: 1, true, yes, on against 0, false, no, off and the empty value.

    Raises:
        UsageProblem: the value is something else.
    """
    value = read(name).strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise UsageProblem(f"{name}: {read(name)!r} is neither on nor off", "use 1 or 0")


def read_integer(name: str) -> int:
    """A listed variable as a number, 0 or more; an empty value is the default.

    Raises:
        UsageProblem: the value is no such number.
    """
    value = read(name).strip() or _BY_NAME[name].default
    if not (value.isascii() and value.isdecimal()):
        raise UsageProblem(
            f"{name}: {value!r} is not a whole number of 0 or more", f"unset, it is {_BY_NAME[name].default}"
        )
    return int(value)


def read_names(name: str) -> tuple[str, ...]:
    """A listed variable as names separated by commas, trimmed; empty ones are dropped."""
    return tuple(part for part in (part.strip() for part in read(name).split(",")) if part)


def given() -> dict[str, str]:
    """The listed variables that are set, with their values, in the order of :data:`VARIABLES`."""
    return {variable.name: os.environ[variable.name] for variable in VARIABLES if variable.name in os.environ}


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


def unrecognised() -> dict[str, str | None]:
    """Variables that look like the program's own (``ARB_...``) but are not, each with the nearest listed one."""
    return {
        name: nearest(name, _BY_NAME) for name in sorted(os.environ) if name.startswith("ARB_") and name not in _BY_NAME
    }
