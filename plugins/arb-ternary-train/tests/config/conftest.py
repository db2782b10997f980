"""Makes the fake components importable by the tests and by targets of specs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from arb_ternary.errors import ArbError, render

_NAME = "arb_run_test_components"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).with_name("components.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)
    return module


_components = _load()


@pytest.fixture(autouse=True)
def _no_backend_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARB_TERNARY_BACKEND", raising=False)


@pytest.fixture
def plugins() -> Any:
    return _components.FakePlugins()


@pytest.fixture
def failure(load: Any) -> Any:
    """Return the exit code of a config's error, and its text as the command line prints it."""

    def run(text: str, *overrides: str) -> tuple[int, str]:
        with pytest.raises(ArbError) as caught:
            load(text, *overrides)
        return caught.value.exit_code, render(caught.value)

    return run


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a temporary directory, so that messages have short file names."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
