"""The errors that a user sees, and the function that renders them.

Every error says what is wrong and, if possible, what to do about it (``hint``). The command line
turns an :class:`ArbError` into a message without a traceback, and into the exit code of its class.
A library user catches it as an ordinary exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any


class ArbError(Exception):
    """A failure that the user can understand and act on.

    Args:
        what: one sentence that begins with a path or name: what is wrong and where.
        hint: what to do about it; it may have several lines, and is empty if there is nothing to
            add.
    """

    exit_code = 1
    #: Every fault of a config (``config.errors.Fault``); empty for all other failures.
    faults: Sequence[Any] = ()

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.what}\n{self.hint}" if self.hint else self.what


class UsageProblem(ArbError):
    """The command line or an environment variable asks for something that does not exist."""

    exit_code = 2


class ConfigError(ArbError):
    """A config is wrong; ``what`` lists every fault with its file and line."""

    exit_code = 2


class EnvironmentProblem(ArbError):
    """Something that is named is not installed, failed to load, or cannot work on this machine."""

    exit_code = 3


class ComponentError(ArbError):
    """A component does not keep the protocol of its kind."""


class CheckpointError(ArbError):
    """A checkpoint is truncated, damaged, foreign or missing."""


class DataError(ArbError):
    """Data cannot be read, or do not have the expected form."""


class Interrupted(ArbError):
    """The run was asked to stop (SIGINT or SIGTERM) and has saved a checkpoint."""

    exit_code = 130


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that ``name`` probably means; None if none is close."""
    matches = get_close_matches(name, sorted(candidates), n=1, cutoff=0.6)
    return matches[0] if matches else None


def is_out_of_memory(error: Exception) -> bool:
    """Return whether memory could not be allocated: by Python, numpy, torch or a GPU's driver."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )


def out_of_memory(error: Exception) -> ArbError:
    """Return the error that the command line shows for memory that could not be allocated."""
    reason = str(error).partition("\n")[0]
    return ArbError(
        f"out of memory: {reason or 'the system has no more'}",
        "Lower batch_size, block_size, the number of samples or the sizes of the model.",
    )


def render(error: ArbError) -> str:
    """Return the text that the command line prints: an ``error:`` line, then the indented hint."""
    lines = [f"error: {error.what}"]
    lines.extend(f"  {line}" if line else "" for line in error.hint.splitlines())
    return "\n".join(lines)
