"""Ctrl-C, five times, while the program imports its parts: it ends without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from arb_ternary_program import main

CONFIG = """
data: {name: text, path: text.txt}
model: {name: decoder, width: 32, layers: 1, heads: 2, max_length: 8}
optimizer: scaled_votes
phases: [{name: standard, steps: 2, batch_size: 2, block_size: 8}]
"""
#: Says when the module of the first argument is imported, and waits for a signal there.
PROGRAM = """
import sys, time
module = sys.argv.pop(1)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(self)
            print("now", flush=True)
            time.sleep(10)
from arb_ternary_program import main
sys.meta_path.insert(0, Finder())
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("arb_ternary", ["--help"]),
        ("click", ["--help"]),
        ("arb_ternary.builtin.plugin", ["--help"]),
        ("arb_ternary_train.runner", ["train", "tiny.yaml"]),
        ("torch", ["train", "tiny.yaml"]),
    ],
)
def test_interrupts_while_a_module_is_imported(
    module: str, arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be that is the question " * 20)
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, module, *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "now\n"
        for _ in range(5):
            # As a terminal does: to all processes of the foreground.
            os.killpg(program.pid, signal.SIGINT)
        output, errors = program.communicate(timeout=60)
    assert program.returncode in (130, -signal.SIGINT)
    assert errors in ("", "interrupted\n", "\ninterrupted\n")
    assert output == ""


def test_an_ignored_interrupt_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    # A shell starts a job in the background so.
    monkeypatch.setattr("sys.argv", ["arb", "--version"])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert main() == 0
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
