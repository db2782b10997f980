"""Child processes: what a bench or a study starts, talks to, watches and stops.

A process of its own has a peak memory of its own, and a kill or a crash takes nothing else with it.
There are two kinds: ``python -m MODULE REQUEST``, which answers in lines of JSON, and
``arb train``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from attrs import define, field, frozen

from arb_ternary.environment import for_child
from arb_ternary.errors import ArbError

#: Lines of the log that an error shows.
_TAIL = 12


@frozen
class Ended:
    """How a process ended.

    Attributes:
        code: its exit code; negative for the signal that killed it.
        peak_bytes: its largest resident memory.
        processor_seconds: the time that it had on processors.
    """

    code: int
    peak_bytes: int
    processor_seconds: float = 0.0


@define(eq=False)
class Child:
    """A running process.

    Attributes:
        title: what it does, for messages.
        log: the file of what it prints. Answers in JSON do not appear in it.
    """

    title: str
    log: Path
    _process: subprocess.Popen[bytes]
    _folder: tempfile.TemporaryDirectory[str] | None = field(default=None, kw_only=True)

    @property
    def running(self) -> bool:
        """Whether its end has not been seen yet, by :meth:`poll` or :meth:`wait`."""
        return self._process.returncode is None

    def poll(self) -> Ended | None:
        """Return how it ended, or None while it runs. Not to be called again after that."""
        return self._reap(os.WNOHANG)

    def wait(self) -> Ended:
        """Wait until it has ended."""
        ended = self._reap(0)
        assert ended is not None
        return ended

    def stop(self) -> None:
        """Send SIGTERM: a run saves a checkpoint and ends."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def log_tail(self, lines: int = _TAIL) -> str:
        """Return the last lines of the log."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        # LLVM, as torch.compile has it, prints probe messages that say nothing to a reader.
        kept = [line for line in text.splitlines() if not line.startswith("USDT:")]
        return "\n".join(kept[-lines:])

    def _reap(self, options: int) -> Ended | None:
        pid, status, usage = os.wait4(self._process.pid, options)
        if pid == 0:
            return None
        code = os.waitstatus_to_exitcode(status)
        self._process.returncode = code
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
        return Ended(code, usage.ru_maxrss * unit, usage.ru_utime + usage.ru_stime)


def start_arb(arguments: list[str], threads: int, log: Path) -> Child:
    """Start ``arb`` in a process of its own.

    Args:
        arguments: what follows ``arb``.
        threads: of OpenMP.
        log: the file for what it prints.
    """
    command = [sys.executable, "-m", "arb_ternary", *arguments]
    environment = for_child(OMP_NUM_THREADS=str(threads))
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    return Child(f"arb {' '.join(arguments)}", log, process)


def run_arb(arguments: list[str], threads: int, log: Path) -> Ended:
    """Run ``arb`` to the end; see :func:`start_arb` for the arguments.

    Raises:
        ArbError: it failed.
    """
    child = start_arb(arguments, threads, log)
    ended = child.wait()
    if ended.code:
        raise ArbError(f"{child.title} ended with {ended.code}", child.log_tail())
    return ended


@define(eq=False)
class AnsweringChild(Child):
    """A process that runs :func:`answer` on a request: ``python -m MODULE REQUEST``.

    In a ``with`` block, the process is killed at the end if it still runs.
    """

    @classmethod
    def start(
        cls,
        module: str,
        request: Mapping[str, Any],
        *,
        title: str,
        threads: int,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Start the process.

        Args:
            module: what it runs.
            request: plain values, its only argument.
            title: what it does, for messages.
            threads: of OpenMP.
            environment: further variables.
        """
        folder = tempfile.TemporaryDirectory(prefix="arb-bench-")
        log = Path(folder.name) / "log"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(request)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=for_child(OMP_NUM_THREADS=str(threads), **(environment or {})),
            )
        return cls(title, log, process, folder=folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.running:
            self.kill()
            self.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # its last order did not reach it
                pipe.close()
        assert self._folder is not None
        self._folder.cleanup()

    def send(self, order: str) -> None:
        """Give it an order, one line.

        Raises:
            ArbError: the process failed.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{order}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()

    def end_orders(self) -> None:
        """Tell it that no order follows."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def receive(self) -> dict[str, Any]:
        """Wait for its next answer.

        Raises:
            ArbError: the process failed; its log is the hint.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._fail()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _fail(self) -> None:
        code = self.wait().code
        tail = self.log_tail().strip()
        last = tail.splitlines()[-1] if tail else "it printed nothing"
        raise ArbError(f"{self.title}: its process ended with {code}: {last}", tail)


def ask(module: str, request: Mapping[str, Any], *, title: str, threads: int) -> dict[str, Any]:
    """Start a process that gives one answer, and return the answer.

    Raises:
        ArbError: the process failed.
    """
    with AnsweringChild.start(module, request, title=title, threads=threads) as child:
        answer = child.receive()
        child.end_orders()
        child.wait()
        return answer


def answer(
    respond: Callable[[dict[str, Any], Iterable[str]], Iterable[dict[str, Any]]],
) -> None:
    """Answer a request: the main program of a module for :class:`AnsweringChild`.

    Args:
        respond: takes the request and the orders, one line each, and gives the answers.
    """
    request = json.loads(sys.argv[1])
    # Whatever libraries print to the standard output goes to the log.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as output:
        os.dup2(2, 1)
        for each in respond(request, sys.stdin):
            print(json.dumps(each), file=output, flush=True)


@define(eq=False)
class ChildRun(Child):
    """``arb train`` of a config file.

    Attributes:
        directory: the run's directory.
    """

    directory: Path = field(kw_only=True)

    @classmethod
    def start(
        cls,
        config: Path,
        directory: Path,
        overrides: Sequence[str] = (),
        *,
        resume: bool = False,
        threads: int | None = None,
        detached: bool = False,
    ) -> Self:
        """Start the run.

        Args:
            config: the config file.
            directory: the run's directory; the log is next to it.
            overrides: ``path=value`` overrides of the config.
            resume: continue from the newest valid checkpoint, or start if there is none.
            threads: of OpenMP; None leaves that to the config and the environment.
            detached: signals of the terminal do not reach the process. It stops, with a checkpoint,
                when this process stops it or dies (the latter on Linux).
        """
        command = [sys.executable, "-m", "arb_ternary.cli.main", "train", str(config)]
        command += ["--run-dir", str(directory)]
        if resume:
            command += ["--resume", "auto"]
        for override in overrides:
            command += ["-o", override]
        changes = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        log = directory.with_name(f"{directory.name}.log")
        with log.open("ab" if resume else "wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=for_child(**changes),
                start_new_session=detached,
                # Called between fork and exec: it makes one system call, through a library that is
                # loaded already.
                preexec_fn=_end_with_parent() if detached else None,  # noqa: PLW1509
            )
        return cls(str(config), log, process, directory=directory)

    def report(self) -> dict[str, Any]:
        """Return what the finished run wrote to its ``result.json``."""
        text = (self.directory / "result.json").read_text(encoding="utf-8")
        report: dict[str, Any] = json.loads(text)
        return report


def _end_with_parent() -> Callable[[], None] | None:
    """Return what makes a new process get SIGTERM when its parent dies, even by SIGKILL.

    None where the system cannot do that.
    """
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    pr_set_pdeathsig = 1

    def arrange() -> None:
        prctl(pr_set_pdeathsig, signal.SIGTERM)

    return arrange
