"""TOML with line numbers."""

from __future__ import annotations

import re
import tomllib

from arb_ternary.config.document import Document
from arb_ternary.config.errors import Fault, raise_faults
from arb_ternary.config.locate_toml import locate_keys
from arb_ternary.config.paths import Origin, Path

__all__ = ["read_toml"]


def read_toml(text: str, source: str) -> Document:
    """Read a TOML document.

    Raises:
        InvalidConfig: ``text`` is not TOML.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        match = re.search(r" \(at line (\d+), column \d+\)$", message)
        line = int(match[1]) if match is not None else text.count("\n") + 1
        reason = re.sub(r" \(at [^)]*\)$", "", message)
        raise_faults([Fault((), f"not valid TOML: {reason}", origin=_origin(source, line))], {}, source)
    origins: dict[Path, Origin] = {(): _origin(source, 1)}
    origins.update({path: _origin(source, line) for path, line in locate_keys(text).items()})
    return Document(data, source, origins)


def _origin(source: str, line: int) -> Origin:
    return Origin("file", f"{source}:{line}", line)
