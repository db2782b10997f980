"""The program for machines with a GPU, tried where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PARTS = Path(__file__).with_name("parts.py")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(PARTS), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = _run("facts")
    assert done.returncode == 2
    assert "torch sees no GPU here" in done.stderr


def test_an_unknown_part_is_refused() -> None:
    done = _run("fact", "--device", "cpu")
    assert done.returncode == 2
    assert "no part is called fact: there are facts, tests, bytes, bench" in done.stderr


def test_facts_say_what_every_backend_does(tmp_path: Path) -> None:
    done = _run("facts", "--device", "cpu", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "facts.json").read_text())["backends"]["torch"] == "works"
