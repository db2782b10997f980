"""Choose the cases of the kit's suite that are part of `make test`.

Each case compiles C++ and loads it, which takes seconds. Of every test the first case and one in 24
of the others are run, always the same; of narrow votes, whose kernels take ten seconds each to
compile, the first case of two tests. `make gpu-compile` runs the rest.
"""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import pytest

#: Their kernels are those of the other tests of narrow votes.
_NARROW_TWINS = (
    "test_layout_of_narrow_votes_is_lossless_and_compact",
    "test_narrow_votes_of_a_lookup_leave_other_rows_alone",
)
_SUITE = Path(__file__).with_name("test_conformance.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: set[str] = set()
    for item in items:
        if item.path != _SUITE:
            continue
        name = getattr(item, "originalname", item.name)
        narrow = "narrow" in name
        chosen = not narrow and crc32(item.name.encode()) % 24 == 0
        if name in _NARROW_TWINS or (name in seen and not chosen):
            item.add_marker(pytest.mark.slow)
        seen.add(name)
