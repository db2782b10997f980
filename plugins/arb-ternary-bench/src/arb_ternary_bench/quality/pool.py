"""The runs of a study, a few at a time, each in a process of its own; what a kill left half-way is
continued.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary.errors import ArbError, Interrupted, UsageProblem
from arb_ternary_bench.child import ChildRun, Ended
from arb_ternary_bench.quality.outcomes import failed, measured, read_outcome, write_outcome
from arb_ternary_bench.quality.trials import Trial
from arb_ternary_train.directory import RunDirectory, locked
from arb_ternary_train.signals import StopRequest

#: Seconds between looks at the processes.
_PAUSE = 0.05
#: What `arb train` exits with when the run itself failed, as opposed to its config or the machine.
_FAILURE = 1


@frozen(eq=False)
class _Running:
    """A trial under way; ``resumed`` when it goes on with what an earlier process left."""

    trial: Trial
    child: ChildRun
    resumed: bool


@define(eq=False, kw_only=True)
class Pool:
    """Runs trials in a study's folder: ``configs/``, ``runs/`` and ``trials/``.

    Attributes:
        folder: the study's folder.
        jobs: processes at once.
        threads: of each.
        stop: whether somebody asked the study to stop.
        say: told what becomes of every trial.
        finished: called with each trial that was run, and its outcome.
    """

    folder: Path
    jobs: int
    threads: int
    stop: StopRequest
    say: Callable[[str], None]
    finished: Callable[[Trial, dict[str, Any]], None]
    _running: list[_Running] = field(factory=list)

    def outcome_file(self, trial: Trial) -> Path:
        """Where the outcome of a trial is kept."""
        return self.folder / "trials" / f"{trial.name}.json"

    def known(self, trial: Trial) -> dict[str, Any] | None:
        """The outcome that a trial has already, if its config was exactly this one."""
        outcome = read_outcome(self.outcome_file(trial))
        return outcome if outcome is not None and outcome["digest"] == trial.digest else None

    def run(self, trials: Sequence[Trial]) -> dict[str, dict[str, Any]]:
        """The outcome of every trial, by name; those that are known are not run again.

        Raises:
            Interrupted: the study was asked to stop; the runs under way have saved a checkpoint.
            ArbError: a run could not be carried out at all.
        """
        outcomes: dict[str, dict[str, Any]] = {}
        waiting: deque[Trial] = deque()
        for trial in trials:
            outcome = self.known(trial)
            if outcome is None:
                if self.outcome_file(trial).exists():
                    self.say(
                        f"{trial.title}: its config has changed since it was run; it is run again"
                    )
                waiting.append(trial)
            else:
                outcomes[trial.name] = outcome
                self._remove_checkpoints(trial)
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self.jobs:
                    self._leave_if_asked()
                    self._running.append(self._start(waiting.popleft()))
                for running in list(self._running):
                    ended = running.child.poll()
                    if ended is None:
                        continue
                    self._running.remove(running)
                    if ended.code == _FAILURE and running.resumed:
                        self.say(
                            f"{running.trial.title}: could not be continued, and is started again"
                        )
                        shutil.rmtree(running.child.directory, ignore_errors=True)
                        waiting.appendleft(running.trial)
                    else:
                        outcomes[running.trial.name] = self._take(running, ended)
                self._leave_if_asked()
                time.sleep(_PAUSE)
        finally:
            self._end_all()
        return outcomes

    def _start(self, trial: Trial) -> _Running:
        """Start a run, or go on with it where the same config has one half-way."""
        config = self.folder / "configs" / f"{trial.name}.yaml"
        directory = self.folder / "runs" / trial.name
        text = dump_yaml(dict(trial.config))
        self._wait_for(trial, directory)
        same = config.exists() and config.read_text(encoding="utf-8") == text
        if directory.exists() and not same:
            shutil.rmtree(directory)
        config.parent.mkdir(parents=True, exist_ok=True)
        directory.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(text, encoding="utf-8")
        resumed = RunDirectory(directory).exists()
        child = ChildRun.start(config, directory, resume=True, threads=self.threads, detached=True)
        return _Running(trial, child, resumed)

    def _wait_for(self, trial: Trial, directory: Path) -> None:
        """Let a process end that a killed study left behind."""
        waited = False
        while directory.exists():
            busy = UsageProblem(f"{directory}: another process is training in this directory")
            try:
                with locked(directory, busy):
                    return
            except UsageProblem as problem:
                if problem is not busy:
                    raise
            if not waited:
                self.say(f"{trial.title}: waiting for a process of an earlier study to end")
            waited = True
            self._leave_if_asked()
            time.sleep(_PAUSE)

    def _take(self, running: _Running, ended: Ended) -> dict[str, Any]:
        """The outcome of a run that has ended, once it is safe on the disk."""
        trial = running.trial
        child = running.child
        if ended.code == 0:
            outcome = measured(trial, child, ended, self.threads)
        elif ended.code == _FAILURE:
            outcome = failed(trial, child.log_tail(4))
        elif ended.code < 0:
            name = signal.Signals(-ended.code).name
            raise ArbError(
                f"{trial.name}: the run was killed by {name}",
                f"{child.log_tail()}\nIt may have run out of memory; the same command continues "
                f"the study.",
            )
        else:
            raise ArbError(
                f"{trial.name}: the run ended with {ended.code}; see {child.log}", child.log_tail()
            )
        write_outcome(self.outcome_file(trial), outcome)
        self._remove_checkpoints(trial)
        self.finished(trial, outcome)
        return outcome

    def _remove_checkpoints(self, trial: Trial) -> None:
        shutil.rmtree(
            RunDirectory(self.folder / "runs" / trial.name).checkpoints, ignore_errors=True
        )

    def _leave_if_asked(self) -> None:
        if self.stop.requested:
            raise Interrupted(
                f"{self.folder}: stopped by {self.stop.reason}",
                "The same command continues the study.",
            )

    def _end_all(self) -> None:
        """Let the runs under way save a checkpoint; a second signal to this process kills them."""
        try:
            for running in self._running:
                running.child.stop()
            for running in self._running:
                ended = running.child.wait()
                if ended.code == 0:  # it had taken its last step when it was asked
                    self._take(running, ended)
        except BaseException:
            for running in self._running:
                running.child.kill()
            raise
        finally:
            self._running.clear()
