"""A run in a process of its own: what a study starts, watches and reads the report of.

A process of its own has a peak memory of its own, and a kill or a crash takes nothing else with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from attrs import define, frozen

from arb_ternary.environment import for_child
from arb_ternary_train.openmp import NUM_THREADS


@frozen
class Ended:
    """How a process ended: its exit code (negative: the signal that killed it) and its largest
    resident memory.
    """

    code: int
    peak_bytes: int


@define(eq=False)
class ChildRun:
    """``arb train`` of a config file in a process of its own.

    Attributes:
        config: the file.
        directory: the run's directory.
        log: where everything goes that the process prints.
    """

    config: Path
    directory: Path
    log: Path
    _process: subprocess.Popen[bytes]

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
        """Start it.

        Args:
            config: the config file.
            directory: the run's directory; the log lies beside it.
            overrides: ``path=value`` overrides of the config.
            resume: continue from the newest good checkpoint in the directory, or start where there
                is none.
            threads: for OpenMP; None leaves that to the config and the environment.
            detached: signals of the terminal do not reach the process, which stops, with a
                checkpoint, when this process stops it or dies (the latter on Linux).
        """
        command = [
            sys.executable,
            "-m",
            "arb_ternary.cli.main",
            "train",
            str(config),
            "--run-dir",
            str(directory),
        ]
        command += ["--resume", "auto"] if resume else []
        for override in overrides:
            command += ["-o", override]
        log = directory.with_name(f"{directory.name}.log")
        with log.open("ab" if resume else "wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=for_child(**({} if threads is None else {NUM_THREADS.name: str(threads)})),
                start_new_session=detached,
                # Called between fork and exec: it makes one system call, through a library that is
                # loaded already.
                preexec_fn=_end_with_parent() if detached else None,  # noqa: PLW1509
            )
        return cls(config, directory, log, process)

    def poll(self) -> Ended | None:
        """How it ended; None while it runs. Not to be called again after that."""
        return self._reap(os.WNOHANG)

    def wait(self) -> Ended:
        """Wait for its end."""
        ended = self._reap(0)
        assert ended is not None
        return ended

    def stop(self) -> None:
        """Ask it to save a checkpoint and to end."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def report(self) -> dict[str, Any]:
        """What the finished run wrote to its ``result.json``."""
        report: dict[str, Any] = json.loads(
            (self.directory / "result.json").read_text(encoding="utf-8")
        )
        return report

    def log_tail(self, lines: int = 12) -> str:
        """The end of what it printed."""
        return "\n".join(
            self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
        )

    def _reap(self, options: int) -> Ended | None:
        pid, status, usage = os.wait4(self._process.pid, options)
        if pid == 0:
            return None
        self._process.returncode = os.waitstatus_to_exitcode(status)
        # Linux counts in KiB, macOS in bytes.
        return Ended(
            self._process.returncode, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        )


def _end_with_parent() -> Callable[[], None] | None:
    """What a new process calls to get SIGTERM when its parent dies, even of SIGKILL; None where
    that cannot be had.
    """
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    pr_set_pdeathsig = 1

    def arrange() -> None:
        prctl(pr_set_pdeathsig, signal.SIGTERM)

    return arrange
