"""llama.cpp's library, which the package ``xllamacpp`` (PyPI) contains, through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

INSTALL: Final = "pip install xllamacpp gguf"


def missing() -> str | None:
    """Return what has to be installed, or None."""
    absent = [name for name in ("xllamacpp", "gguf") if find_spec(name) is None]
    return f"{' and '.join(absent)} not installed: {INSTALL}" if absent else None


def library_version() -> str | None:
    """Return the package and its version, or None if it is not installed."""
    return f"xllamacpp {version('xllamacpp')}" if find_spec("xllamacpp") else None


def load(functions: Iterable[tuple[str, Any, tuple[Any, ...]]]) -> Any:
    """Return the library with the types of these functions: name, result and arguments."""
    spec = find_spec("xllamacpp")
    assert spec is not None
    assert spec.origin is not None
    library = ctypes.CDLL(str(Path(spec.origin).with_name("xllamacpp.abi3.so")))
    for name, result, arguments in functions:
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library
