"""Child processes, so that peak memory is that of one measurement and a crash ends nothing else.

Most run ``arb``; others answer a request in JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import define, frozen

from arb_ternary.environment import for_child
from arb_ternary.errors import ArbError

#: The folder of the scripts, from which children import their modules.
BENCHMARKS: Final = Path(__file__).parents[1]
#: Lines of the log that an error shows.
_TAIL: Final = 12


@frozen
class Ended:
    """How a process ended.

    Attributes:
        code: its exit code; negative for the signal that killed it.
        peak_bytes: its largest resident memory.
    """

    code: int
    peak_bytes: int


@define(eq=False)
class Child:
    """A running process.

    Attributes:
        title: what it does, for messages.
        log: the file of what it prints.
    """

    title: str
    log: Path
    process: subprocess.Popen[bytes]

    def poll(self) -> Ended | None:
        """Return how it ended, or None while it runs. Not to be called again after that."""
        return self._reap(os.WNOHANG)

    def wait(self) -> Ended:
        """Wait until it has ended."""
        ended = self._reap(0)
        assert ended is not None
        return ended

    def log_tail(self) -> str:
        """Return the last lines of the log."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        # LLVM, as torch.compile has it, prints probe messages that say nothing to a reader.
        kept = [line for line in text.splitlines() if not line.startswith("USDT:")]
        return "\n".join(kept[-_TAIL:])

    def _reap(self, options: int) -> Ended | None:
        pid, status, usage = os.wait4(self.process.pid, options)
        if pid == 0:
            return None
        code = os.waitstatus_to_exitcode(status)
        self.process.returncode = code
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
        return Ended(code, usage.ru_maxrss * unit)


def start_module(
    module: str, arguments: Sequence[str], log: Path, *, threads: int | None = None
) -> Child:
    """Start ``python -m MODULE ARGUMENTS`` in a process of its own.

    Args:
        module: an installed one, or one below the folder of the scripts.
        arguments: what follows the name.
        log: the file for what it prints, which is appended to.
        threads: of OpenMP; None leaves that to the config and the environment.
    """
    paths = filter(None, (str(BENCHMARKS), os.environ.get("PYTHONPATH")))
    changes = {"PYTHONPATH": os.pathsep.join(paths)}
    if threads is not None:
        changes["OMP_NUM_THREADS"] = str(threads)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=for_child(**changes),
        )
    return Child(f"{module} {' '.join(arguments)}", log, process)


def start_arb(arguments: Sequence[str], log: Path, *, threads: int | None = None) -> Child:
    """Start ``arb`` in a process of its own; see :func:`start_module`."""
    return start_module("arb_ternary", arguments, log, threads=threads)


def run_arb(arguments: Sequence[str], log: Path, *, threads: int | None = None) -> Ended:
    """Run ``arb`` to the end; see :func:`start_module` for the arguments.

    Raises:
        ArbError: it failed.
    """
    child = start_arb(arguments, log, threads=threads)
    ended = child.wait()
    if ended.code:
        raise ArbError(f"arb {' '.join(arguments)} ended with {ended.code}", child.log_tail())
    return ended


def ask(module: str, request: Mapping[str, Any], *, title: str, threads: int) -> dict[str, Any]:
    """Start a process whose main program is :func:`answer`, and return its answer.

    Raises:
        ArbError: the process failed; the end of what it printed is the hint.
    """
    with tempfile.TemporaryDirectory(prefix="arb-benchmarks-") as folder:
        file = Path(folder) / "answer.json"
        arguments = [json.dumps(request), str(file)]
        child = start_module(module, arguments, Path(folder) / "log", threads=threads)
        try:
            code = child.wait().code
        except BaseException:
            child.process.kill()
            raise
        if code:
            tail = child.log_tail().strip()
            last = tail.splitlines()[-1] if tail else "it printed nothing"
            raise ArbError(f"{title}: its process ended with {code}: {last}", tail)
        answer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return answer


def answer(respond: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer a request in the process that :func:`ask` started."""
    request, file = sys.argv[1:]
    Path(file).write_text(json.dumps(respond(json.loads(request))), encoding="utf-8")
