"""Which cases of the kit's suite are part of `make test`: here, each compiles C++ and starts it,
which takes a while.

Of every test the first case and a twelfth of the others, always the same, and of narrow votes,
whose kernels take ten seconds each to compile, the first case alone; `make gpu-compile` runs the
rest.
"""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import pytest

_SUITE = Path(__file__).with_name("test_conformance.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: set[str] = set()
    for item in items:
        if item.path != _SUITE:
            continue
        name = getattr(item, "originalname", item.name)
        if name in seen and (name.startswith("test_narrow") or crc32(item.name.encode()) % 12):
            item.add_marker(pytest.mark.slow)
        seen.add(name)
