"""Triton's interpreter is chosen for a whole process, at its start: tests that need it have a run
of their own.
"""

from __future__ import annotations

import os

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return
    apart = pytest.mark.skip(
        reason="needs TRITON_INTERPRET=1 from the start of the process; make test has a run with it"
    )
    for item in items:
        if item.get_closest_marker("interpreted"):
            item.add_marker(apart)
