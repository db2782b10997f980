"""Each distribution passes its tests in an environment that holds only what it declares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
#: Tests in `make test`; `make test-alone` runs all tests of every distribution.
QUICK = {
    "arb-ternary-core": ("plugins/test_surface.py",),
}


def run_alone(
    name: str,
    folders: Sequence[str],
    clean_environment: Any,
    install: Callable[..., Any],
    tmp_path: Path,
) -> None:
    folder = install(name, "test")[name].folder
    marks = "not slow and not gpu and not interpreted"
    clean_environment.python_run(
        *("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", marks),
        *("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)),
        *(str(folder / "tests" / part) for part in folders),
        cwd=tmp_path,
    )


@pytest.mark.parametrize("name", QUICK)
def test_the_quick_tests_pass_with_what_is_declared(
    name: str, clean_environment: Any, install: Callable[..., Any], tmp_path: Path
) -> None:
    run_alone(name, QUICK[name], clean_environment, install, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_tests_pass_with_what_is_declared(
    project: Any, clean_environment: Any, install: Callable[..., Any], tmp_path: Path
) -> None:
    if project.name == "arb-ternary":
        pytest.skip("has no tests of its own")
    run_alone(project.name, ["."], clean_environment, install, tmp_path)
