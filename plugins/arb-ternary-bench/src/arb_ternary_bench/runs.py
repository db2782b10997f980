"""Training runs of a study: a few at a time, each in a process of its own.

Everything that is known lies in the study's folder, so that the same command continues a study that
was killed:

==============  ================================================================
``study.json``  what studies in one folder must agree in; another study is refused
``trials/``     the outcome of every finished run, with a digest of its config
``configs/``    the config file of every run
``runs/``       directories and logs of the runs; checkpoints while they last
==============  ================================================================
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from attrs import define, field, frozen

from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary.errors import ArbError, ComponentError, Interrupted, UsageProblem
from arb_ternary_bench.child import ChildRun, Ended
from arb_ternary_train.directory import RunDirectory, locked, write_json
from arb_ternary_train.metrics import read_metrics
from arb_ternary_train.signals import StopRequest

FORMAT: Final = "arb-ternary-study-run"
VERSION: Final = 1
#: Seconds between looks at the processes.
_PAUSE: Final = 0.05
#: Exit code of `arb train` if the run itself failed, as opposed to its config or the machine.
_FAILURE: Final = 1
#: What an outcome takes over from a run's audit.
_AUDITED: Final = (
    "parameters",
    "float_parameters",
    "ternary_weights",
    "state_bytes",
    "state_bits_per_parameter",
)

Outcome = dict[str, Any]
Say = Callable[[str], None]


@frozen(eq=False, kw_only=True)
class PlannedRun:
    """One run of a study.

    Attributes:
        name: of its files.
        title: in messages.
        config: the run's config, as its file holds it.
        tokens: that it trains on.
        labels: what the study wants to find in the outcome again.
    """

    name: str
    title: str
    config: Mapping[str, Any] = field(repr=False)
    tokens: int
    labels: Mapping[str, Any] = field(factory=dict, repr=False)

    @property
    def digest(self) -> str:
        """SHA-256 of what decides the run: its config without the places of plugin files."""
        plain = {key: value for key, value in self.config.items() if key != "plugins"}
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


@frozen(eq=False)
class _Running:
    """A run under way; ``resumed`` if it continues what an earlier process left."""

    run: PlannedRun
    child: ChildRun
    resumed: bool


@contextmanager
def study_folder(
    folder: Path, identity: Mapping[str, Any], *, jobs: int, threads: int, say: Say
) -> Iterator[RunPool]:
    """Work in a study's folder, alone; yields what runs trainings there.

    Args:
        folder: is made if it is missing.
        identity: what an earlier study in the folder must agree in.
        jobs: processes at once.
        threads: of each process.
        say: is called with progress.

    Raises:
        UsageProblem: another study is in the folder, or another process works there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageProblem(f"{folder}: the folder cannot be made: {error}") from error
    busy = UsageProblem(
        f"{folder}: another process works here",
        "Wait for it, stop it, or choose another folder: --out FOLDER",
    )
    with locked(folder, busy), StopRequest() as stop:
        _refuse_another(folder, identity)
        yield RunPool(folder=folder, jobs=jobs, threads=threads, stop=stop, say=say)


def _refuse_another(folder: Path, identity: Mapping[str, Any]) -> None:
    path = folder / "study.json"
    if not path.exists():
        write_json(path, identity)
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArbError(f"{path}: cannot be read: {error}") from error
    if before != json.loads(json.dumps(identity)):
        described = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in before.items())
        raise UsageProblem(
            f"{folder}: a study with other settings is here: {described}",
            "Choose another folder: --out FOLDER",
        )


@define(eq=False, kw_only=True)
class RunPool:
    """Runs trainings in a study's folder.

    Attributes:
        folder: the study's folder.
        jobs: processes at once.
        threads: of each process.
        stop: whether somebody asked the study to stop.
        say: is called with what becomes of every run.
    """

    folder: Path
    jobs: int
    threads: int
    stop: StopRequest
    say: Say
    _running: list[_Running] = field(factory=list)

    def outcome_file(self, run: PlannedRun) -> Path:
        """Return where the outcome of a run is kept."""
        return self.folder / "trials" / f"{run.name}.json"

    def known(self, run: PlannedRun) -> Outcome | None:
        """Return the outcome that there is already, if it is of exactly this config."""
        outcome = read_outcome(self.outcome_file(run))
        return outcome if outcome is not None and outcome["digest"] == run.digest else None

    def train(self, runs: Sequence[PlannedRun]) -> dict[str, Outcome]:
        """Return the outcome of every run, by name; known ones are not repeated.

        Raises:
            Interrupted: the study was asked to stop; the runs under way have saved a checkpoint.
            ArbError: a run could not be carried out at all.
        """
        outcomes: dict[str, Outcome] = {}
        waiting: deque[PlannedRun] = deque()
        for run in runs:
            outcome = self.known(run)
            if outcome is not None:
                outcomes[run.name] = outcome
                self._remove_checkpoints(run)
                continue
            if self.outcome_file(run).exists():
                self.say(f"{run.title}: its config has changed since it was run; it is run again")
            waiting.append(run)
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
                    run = running.run
                    if ended.code == _FAILURE and running.resumed:
                        self.say(f"{run.title}: could not be continued, and is started again")
                        shutil.rmtree(running.child.directory, ignore_errors=True)
                        waiting.appendleft(run)
                        continue
                    outcomes[run.name] = self._take(running, ended)
                    left = len(waiting) + len(self._running)
                    self.say(f"{run.title}: {summary(outcomes[run.name])}; {left} runs to go")
                self._leave_if_asked()
                time.sleep(_PAUSE)
        finally:
            self._end_all()
        return outcomes

    def _start(self, run: PlannedRun) -> _Running:
        """Start a run, or continue it if one of the same config was left half-way."""
        config = self.folder / "configs" / f"{run.name}.yaml"
        directory = self.folder / "runs" / run.name
        text = dump_yaml(dict(run.config))
        self._wait_for(run, directory)
        same = config.exists() and config.read_text(encoding="utf-8") == text
        if directory.exists() and not same:
            shutil.rmtree(directory)
        config.parent.mkdir(parents=True, exist_ok=True)
        directory.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(text, encoding="utf-8")
        resumed = RunDirectory(directory).exists()
        child = ChildRun.start(config, directory, resume=True, threads=self.threads, detached=True)
        return _Running(run, child, resumed)

    def _wait_for(self, run: PlannedRun, directory: Path) -> None:
        """Wait until a process has ended that a killed study left behind."""
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
                self.say(f"{run.title}: waiting for a process of an earlier study to end")
            waited = True
            self._leave_if_asked()
            time.sleep(_PAUSE)

    def _take(self, running: _Running, ended: Ended) -> Outcome:
        """Return the outcome of a run that has ended, once it is safe on the disk."""
        run = running.run
        child = running.child
        if ended.code == 0:
            outcome = measured(run, child, ended, self.threads)
        elif ended.code == _FAILURE:
            outcome = {**_head(run), "loss": None, "failure": child.log_tail(4)}
        elif ended.code < 0:
            name = signal.Signals(-ended.code).name
            raise ArbError(
                f"{run.name}: the run was killed by {name}",
                f"{child.log_tail()}\nIt may have run out of memory; the same command continues "
                "the study.",
            )
        else:
            raise ArbError(
                f"{run.name}: the run ended with {ended.code}; see {child.log}", child.log_tail()
            )
        write_outcome(self.outcome_file(run), outcome)
        self._remove_checkpoints(run)
        return outcome

    def _remove_checkpoints(self, run: PlannedRun) -> None:
        directory = RunDirectory(self.folder / "runs" / run.name)
        shutil.rmtree(directory.checkpoints, ignore_errors=True)

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


# --- outcomes: one small JSON file per run


def measured(run: PlannedRun, child: ChildRun, ended: Ended, threads: int) -> Outcome:
    """Return the outcome of a finished run; a loss that is not finite counts as a failure.

    Raises:
        ComponentError: it trained on another number of tokens than was planned.
    """
    report = child.report()
    directory = RunDirectory(child.directory)
    if report["tokens"] != run.tokens:
        raise ComponentError(
            f"{run.name}: trained on {report['tokens']:,} tokens, not {run.tokens:,}",
            "All runs that are compared train on the same tokens.",
        )
    loss = float(report["validation_loss"])
    finite = math.isfinite(loss)
    record = directory.record()
    return {
        **_head(run),
        "loss": loss if finite else None,
        "failure": None if finite else f"the loss is {loss}",
        "curve": _curve(directory),
        "unigram_entropy": report["unigram_entropy"],
        "bigram_entropy": report["bigram_entropy"],
        **{key: report["audit"][key] for key in _AUDITED},
        "linears": report["linears"],
        "tokens_per_second": report["tokens_per_second"],
        "peak_bytes": ended.peak_bytes,
        "processor_seconds": ended.processor_seconds,
        "threads": threads,
        "backend": record["backend"]["name"],
        "versions": record["versions"],
    }


def summary(outcome: Mapping[str, Any]) -> str:
    """Describe an outcome in a few words."""
    if outcome["loss"] is None:
        return f"failed: {outcome['failure'].strip().splitlines()[-1]}"
    return f"loss {outcome['loss']:.4f}, {outcome['tokens_per_second']:,.0f} tokens/s"


def loss_of(outcome: Mapping[str, Any]) -> float:
    """Return the loss; infinite if the run failed."""
    loss = outcome["loss"]
    return math.inf if loss is None else float(loss)


def choose(losses: Sequence[float]) -> int | None:
    """Return the index of the least loss, the first of equals; None if no loss is finite."""
    best = min(range(len(losses)), key=lambda index: losses[index])
    return best if losses[best] < math.inf else None


def write_outcome(path: Path, outcome: Mapping[str, Any]) -> None:
    """Write an outcome, completely or not at all.

    Raises:
        ArbError: the disk refuses.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, outcome)
    except OSError as error:
        raise ArbError(
            f"{path}: cannot be written: {error}", "Free some space and repeat the command."
        ) from error


def read_outcome(path: Path) -> Outcome | None:
    """Return the outcome in ``path``, or None if there is no such file.

    Raises:
        ArbError: it is something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ArbError(
            f"{path}: cannot be read: {error}", "Delete it, and the run is repeated."
        ) from error
    known = isinstance(content, dict) and content.get("format") == FORMAT
    if not known or content.get("version") != VERSION:
        raise ArbError(f"{path}: not the outcome of a run", "Delete it, and the run is repeated.")
    return dict(content)


def _head(run: PlannedRun) -> Outcome:
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": run.name,
        **run.labels,
        "digest": run.digest,
        "config": dict(run.config),
        "tokens": run.tokens,
    }


def _curve(directory: RunDirectory) -> list[list[float]]:
    """Return tokens and held-out loss of each evaluation; the last is on all held-out tokens."""
    tokens = {0: 0}
    curve = []
    for record in read_metrics(directory.metrics_file):
        if record["event"] == "train":
            tokens[record["step"]] = record["tokens"]
        elif record["event"] == "validation" and isinstance(record["loss"], int | float):
            curve.append([tokens[record["step"]], record["loss"]])
    return curve
