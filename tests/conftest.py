"""A guard around every test across distributions: no plugin left loaded or unloaded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from arb_ternary.plugins.manager import manager


@pytest.fixture(autouse=True)
def _the_registry_is_left_unchanged() -> Iterator[None]:
    before = _components()
    yield
    assert _components() == before, "a test left plugins loaded or unloaded; call reset_manager() when it ends"


def _components() -> list[tuple[str, str, str, str]]:
    plugins = manager()
    return [
        (record.name, str(record.status), found.kind, found.name)
        for record in plugins.records
        for found in record.components
    ]
