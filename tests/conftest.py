"""Fixtures of the tests across distributions: a guard of the registry, and fast Python programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from arb_ternary.plugins.manager import manager

#: Imports third-party packages, which takes most of the time of a short program, and nothing of
#: this repository. Each order starts a child: the arguments of Python (``-W error``, then ``-c``,
#: ``-m`` or a file) and a folder.
HELPER = """
import json, os, runpy, sys, traceback, warnings
import click, hypothesis, numpy, pytest, rich, torch, torch._dynamo, yaml

def run(folder, place, arguments):
    os.chdir(folder)
    os.environ["PYTHONPATH"] = place
    sys.path[:0] = ["", place]
    if arguments[:2] == ["-W", "error"]:
        warnings.simplefilter("error")
        del arguments[:2]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")

def ended(folder, place, arguments):
    try:
        run(folder, place, arguments)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

sys.path.pop(0)
print("ready", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(order["out"], os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(os.open(order["err"], os.O_WRONLY | os.O_CREAT), 2)
        code = ended(order["folder"], order["place"], order["arguments"])
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(autouse=True)
def _the_registry_is_left_unchanged() -> Iterator[None]:
    before = _components()
    yield
    assert _components() == before, (
        "a test left plugins loaded or unloaded; call reset_manager() when it ends"
    )


def _components() -> list[tuple[str, str, str, str]]:
    plugins = manager()
    return [
        (record.name, record.status, found.kind, found.name)
        for record in plugins.records
        for found in record.components
    ]


@pytest.fixture(scope="session")
def python() -> Iterator[Callable[..., str]]:
    """Return a function that runs Python in a folder and returns what it prints.

    The program can import what is in the folder, or in ``place``. It behaves like a new
    interpreter, but is forked from one that has already imported torch.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("ARB_", "PYTEST"))
    }
    environment.pop("PYTHONPATH", None)
    environment.update(PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    helper = subprocess.Popen(
        [sys.executable, "-c", HELPER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert helper.stdin is not None
    assert helper.stdout is not None
    orders = helper.stdin
    answers = helper.stdout
    assert answers.readline() == "ready\n"

    def run(folder: Path, *arguments: str, place: Path | None = None) -> str:
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "out"
            err = Path(name) / "err"
            order = {"folder": str(folder), "place": str(place or folder), "arguments": arguments}
            order |= {"out": str(out), "err": str(err)}
            orders.write(json.dumps(order) + "\n")
            orders.flush()
            code = int(answers.readline())
            assert code == 0, out.read_text() + err.read_text()
            return out.read_text()

    yield run
    orders.close()
    helper.wait(60)
    answers.close()
