"""Cells, and a backend whose kernels and probes a test replaces."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from arb_ternary import hookimpl
from arb_ternary.backends import reference
from arb_ternary.backends.protocol import ProbeResult
from arb_ternary.backends.select import reset_backends
from arb_ternary.plugins.manager import manager, reset_manager
from arb_ternary.specs import BackendSpec
from arb_ternary_bench.kernels.cells import Cell


@pytest.fixture
def make_cell() -> Callable[..., Cell]:
    def make(op: str = "linear", **changes: Any) -> Cell:
        sizes: dict[str, Any] = {
            "rows": 3,
            "out_features": 48,
            "in_features": 160,
            "group_size": 32,
            "cold": False,
            "cache_bytes": 1 << 16,
            "threads": 1,
        }
        return Cell(op=op, **{**sizes, **changes})

    return make


class _Plugin:
    """Registers the backend ``changed``."""

    @hookimpl
    def arb_register_backends(self) -> list[BackendSpec]:
        where = {"target": "changed_backend:build", "probe": "changed_backend:probe"}
        return [
            BackendSpec(name="changed", **where, devices=("cpu",), summary="a test", priority=-1)
        ]


@pytest.fixture
def changed() -> Iterator[Callable[..., str]]:
    """Registers the torch backend under the name ``changed``, with kernels replaced and attributes
    added.
    """

    def register(attributes: dict[str, Any] | None = None, **kernels: Callable[..., Any]) -> str:
        torch_backend = reference.build()
        backend = SimpleNamespace(
            name="changed",
            capabilities=torch_backend.capabilities,
            kernels={**torch_backend.kernels, **kernels},
            **(attributes or {}),
        )
        module = ModuleType("changed_backend")
        vars(module).update(build=lambda: backend, probe=lambda device: ProbeResult(True, "a test"))
        sys.modules["changed_backend"] = module
        manager().register(_Plugin(), "changed-backend")
        return "changed"

    yield register
    if sys.modules.pop("changed_backend", None) is not None:
        reset_manager()
        reset_backends()
