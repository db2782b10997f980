"""Standard output and error: closed, full, or in an encoding that lacks a character."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Final

from arb_ternary.errors import ArbError

#: What a shell reports of a program that ended as `cat` does if its reader has gone (SIGPIPE).
READER_HAS_GONE: Final = 141


def prepare_streams() -> None:
    """Make standard output and error fit for any text.

    A character that the encoding lacks is written as an escape. Without a standard error, messages
    go nowhere.

    Raises:
        ArbError: standard output is closed.
    """
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    if sys.stdout is None:
        raise ArbError(f"standard output: {os.strerror(errno.EBADF)}")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def flush_output() -> None:
    """Write what is buffered.

    Raises:
        OSError: it cannot be written.
    """
    if sys.stdout is not None:
        sys.stdout.flush()


def reader_has_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more."""
    import select

    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        found = poll.poll(0)
    except (AttributeError, OSError, ValueError):
        return False  # Windows has no poll; a stream of a test is no file
    return any(event & select.POLLERR for _, event in found)


def describe_failure(error: OSError) -> str:
    """Return what the system refused, and where."""
    where = error.filename or "standard output"
    return f"{os.fsdecode(where)}: {error.strerror or error}"


def discard_output() -> None:
    """Send what is still buffered nowhere, so that the interpreter can end."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        return  # not a file of the system: nothing is written at the end
