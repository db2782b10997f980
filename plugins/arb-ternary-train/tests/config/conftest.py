"""The fake components, importable under one name by the tests and by the specs' targets."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from arb_ternary.errors import ArbError, render

_COMPONENTS = {"components": "arb_run_test_components", "study": "arb_study_test_components"}


def _load(stem: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{stem}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_MODULES = {stem: _load(stem, name) for stem, name in _COMPONENTS.items()}


@pytest.fixture(autouse=True)
def _no_backend_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARB_TERNARY_BACKEND", raising=False)


@pytest.fixture
def plugins() -> Any:
    return _MODULES["components"].FakePlugins()


@pytest.fixture
def registry() -> Any:
    """The components of the kind of config file called study."""
    return _MODULES["components"].FakeRegistry(_MODULES["study"].SPECS)


@pytest.fixture
def failure(load: Any) -> Any:
    """The error that a config gives: its class's exit code and its text as the command line prints
    it.
    """

    def run(text: str, *overrides: str) -> tuple[int, str]:
        with pytest.raises(ArbError) as caught:
            load(text, *overrides)
        return caught.value.exit_code, render(caught.value)

    return run


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, so that messages have short file names."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
