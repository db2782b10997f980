"""Runs to report, and a headless Chromium that shows their pages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from arb_ternary_train.directory import RunDirectory

#: Chromium looks for updates and hints of its maker unless it is told not to.
FLAGS = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
CONFIG = "name: made\nmodel: {name: decoder, width: 8}\noptimizer: sign_votes\n"

MakeRun = Callable[..., RunDirectory]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Make a run directory from records of its metrics, without training."""

    def make(
        name: str,
        metrics: Sequence[Mapping[str, Any]] | None = None,
        result: Mapping[str, Any] | None = None,
        config: str = CONFIG,
        **record: Any,
    ) -> RunDirectory:
        facts = {
            "name": name,
            "device": "cpu",
            "backend": {"name": "torch", "source": "default"},
            "data": {"name": "text", "fingerprint": "abc123"},
            "threads": {"loops": {}, "last": 1},
            "vocabulary_size": 256,
            "versions": {"arb-ternary-core": "0.1.0", "python": "3.11.7", "torch": "2.13.0+cpu"},
            **record,
        }
        directory = RunDirectory(tmp_path / name)
        directory.create(config, facts, {})
        if metrics is not None:
            lines = [f"{json.dumps(line)}\n" for line in metrics]
            directory.metrics_file.write_text("".join(lines))
        if result is not None:
            directory.result_file.write_text(json.dumps(result))
        return directory

    return make


# Not for the session: Playwright keeps a loop running in the thread, so that tests of other modules
# could run none.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(names)} is installed")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()
