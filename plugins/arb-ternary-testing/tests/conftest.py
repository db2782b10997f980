"""Run programs in a fork of the test's process, which has already imported torch."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest

Forked = Callable[[Callable[[], int]], tuple[int, str]]


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Forked:
    """Return a runner of functions in a fork; it returns the exit code and what was printed."""

    def run(function: Callable[[], int]) -> tuple[int, str]:
        log = tmp_path_factory.mktemp("forked") / "output.txt"
        process = get_context("fork").Process(target=_run, args=(function, log))
        with warnings.catch_warnings():
            # Python warns of a fork while other threads run; they hold no lock that is used here.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        process.join()
        assert process.exitcode is not None
        return process.exitcode, log.read_text(encoding="utf-8")

    return run


def _run(function: Callable[[], int], log: Path) -> None:
    with log.open("w", buffering=1, encoding="utf-8") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout = sys.stderr = output
        try:
            code = int(function())
        except BaseException:
            traceback.print_exc()
            code = 70
        output.flush()
        os._exit(code)
