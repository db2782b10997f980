"""The cache of compiled kernels on disk: what its keys cover, and locks between processes.

TileLang keys compiled kernels by their program (sizes that are constants included), their target,
their flags and its own release. It publishes each by one rename, and checks it against a manifest
when it reads it: a broken one is removed with a warning, and compiled again. This module adds a
macro to the flags, which no kernel reads and whose value covers everything else that a build
depends on. It also adds a lock, so that a process waits for a kernel that another one is compiling.
"""

from __future__ import annotations

import fcntl
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from arb_ternary.environment import left_unchanged
from arb_ternary.errors import EnvironmentProblem
from arb_ternary_tilelang import __version__

_CPU_INFO: Final = Path("/proc/cpuinfo")
#: Fields that name a processor and its instructions, as Linux spells them on x86 and on ARM.
_CPU_FIELDS: Final = ("model name", "flags", "CPU part", "Features")


def folder() -> Path:
    """Return the folder in which TileLang keeps compiled kernels."""
    with left_unchanged():
        from tilelang import env

    return Path(env.TILELANG_CACHE_DIR)


def build_flag(compiler: str, native: bool) -> str:
    """Return a flag that differs between builds that must not be shared.

    Args:
        compiler: path of the compiler.
        native: whether the kernel may use every instruction of this processor.
    """
    parts = [__version__, version("tilelang"), version("torch"), compiler, _release(compiler)]
    return f"-DARB_TERNARY_BUILD=0x{_digest(*parts, _processor() if native else '')[:15]}"


@cache
def _release(compiler: str) -> str:
    """Return the output of ``compiler --version``.

    It is empty if the compiler cannot be run; compiling will report that.
    """
    try:
        done = subprocess.run(
            [compiler, "--version"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


@cache
def _processor() -> str:
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # no Linux
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(_CPU_FIELDS)}))


def _digest(*parts: str) -> str:
    return sha256("\0".join(parts).encode()).hexdigest()


@contextmanager
def taking_turns(*name: str) -> Iterator[None]:
    """Hold the lock of a kernel, after waiting for another process that compiles it.

    Raises:
        EnvironmentProblem: the folder of compiled kernels cannot be written to.
    """
    place = folder() / "arb-ternary-locks"
    try:
        place.mkdir(parents=True, exist_ok=True)
        file = (place / f"{_digest(*name)[:32]}.lock").open("a")
    except OSError as error:
        raise EnvironmentProblem(
            f"backend 'tilelang' keeps its compiled kernels in {folder()} and cannot write there: "
            f"{error.strerror}",
            "name another folder: TILELANG_CACHE_DIR=...",
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file ends the lock


def tidy(built: Any) -> None:
    """Remove the files that TileLang leaves in the temporary folder when it compiles C++.

    The library is loaded by now.
    """
    library = Path(getattr(getattr(built, "adapter", None), "libpath", None) or "")
    if library.suffix == ".so" and library.parent == Path(tempfile.gettempdir()):
        for path in (library, library.with_suffix(".cpp")):
            path.unlink(missing_ok=True)
