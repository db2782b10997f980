"""Whether the extension module was built from the sources that lie beside the package.

Kernels get addresses and sizes. A module of other sources reads them as something else: it writes
wrong numbers, or past the end of memory. In a checkout, where sources change under an installed
module, that is found out before the first kernel; an installed wheel has no sources beside it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from arb_ternary.errors import EnvironmentProblem
from arb_ternary_cpu import _native

#: The sources of a checkout.
FOLDER: Final = Path(__file__).parents[1] / "native"


def digest_of(folder: Path) -> str:
    """SHA-256 of a line for each source file: its own SHA-256 and its name.
    ``sources_digest.cmake`` does the same.
    """
    files = sorted([*folder.glob("*.cpp"), *folder.glob("*.h")], key=lambda file: file.name)
    lines = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def check_sources(folder: Path = FOLDER) -> None:
    """Nothing where ``folder`` has no sources, or those of the module.

    Raises:
        EnvironmentProblem: the module was built from others.
    """
    if (folder / "module.cpp").is_file() and digest_of(folder) != _native.sources:
        raise EnvironmentProblem(
            f"backend cpu: its extension module was built from other sources than those in "
            f"{folder}",
            f"Build it again: `make .venv/native` in the checkout, or `pip install --no-deps "
            f"{folder.parents[1]}`.",
        )
