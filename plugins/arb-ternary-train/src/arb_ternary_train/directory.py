"""The directory of a run.

================== =================================================================================
``config.yaml``    the resolved config; loading it again gives an equal one
``run.json``       seed, device, threads, backend and its source, data, versions of what took part
``<name>.json``    attachments of the data source, such as ``tokenizer.json``
``metrics.jsonl``  one line per event; ``metrics.before.jsonl`` is of an attempt that was killed
                   before its first checkpoint
``checkpoints/``   see ``arb_ternary_train.checkpoint``
``logs/train.log`` what was printed, with the time
``result.json``    final numbers, when the run has finished; ``result.before.json`` is of a run
                   that was then made longer
``tasks.json``     the newest result of each task that ``arb eval --tasks`` measured
================== =================================================================================

A directory is created under a hidden name and then renamed, so a directory with ``run.json`` is
complete.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

from attrs import frozen

from arb_ternary.errors import ArbError, UsageProblem, nearest
from arb_ternary_train.durable import replacing

#: Default parent of run directories.
RUNS: Final = Path("runs")
FORMAT: Final = "arb-ternary-run"
VERSION: Final = 1
#: What to do when the system refuses to write.
_AGAIN: Final = "Free some space, or allow it; then continue with --resume."
#: What commands read of ``run.json``, by path, with its type.
_RECORDED: Final[Mapping[str, type]] = {
    "attachments": list,
    "backend.name": str,
    "data.name": str,
    "threads.loops": dict,
    "versions": dict,
    "vocabulary_size": int,
}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` to ``path``, which is replaced as a whole.

    Raises:
        ArbError: the system refuses.
    """
    try:
        with replacing(path) as new:
            new.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise unwritable(path, error) from error


@contextmanager
def locked(folder: Path, problem: ArbError) -> Iterator[None]:
    """Hold the lock of ``folder`` within a ``with`` block; it ends with the process at the latest.

    Raises:
        ArbError: ``problem``, if another process holds the lock.
    """
    try:
        import fcntl
    except ImportError:
        # Not a POSIX system: there is no lock that a kill releases.
        yield
        return
    with open_file(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise problem from error
        yield


def check_regular(path: Path) -> None:
    """Check that ``path`` is a file or does not exist.

    A folder cannot be written to, and a device such as ``/dev/full`` may never end.

    Raises:
        ArbError: it is something else.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ArbError(f"{path}: cannot be opened: {reason_of(error)}") from error
    if not stat.S_ISREG(mode):
        raise ArbError(f"{path}: is not a file", "Move it away, then repeat the command.")


def open_file(path: Path, mode: str, **options: Any) -> IO[Any]:
    """Open a file of a run; ``options`` are those of ``Path.open``.

    Raises:
        ArbError: it is something else than a file, or the system refuses.
    """
    check_regular(path)
    try:
        return path.open(mode, **options)
    except OSError as error:
        raise ArbError(f"{path}: cannot be opened: {reason_of(error)}") from error


def write_line(file: IO[bytes], path: Path, line: bytes) -> None:
    """Write to ``file``, which has no buffer and is at ``path``.

    Raises:
        ArbError: the disk is full or refuses.
    """
    try:
        written = file.write(line)
    except OSError as error:
        raise unwritable(path, error) from error
    if written != len(line):
        raise ArbError(f"{path}: the disk is full", _AGAIN)


def unwritable(path: Path, error: OSError) -> ArbError:
    """Return the error for a file of a run that the system refuses to write."""
    return ArbError(f"{path}: cannot be written: {reason_of(error)}", _AGAIN)


def reason_of(error: OSError) -> str:
    """Return the system's words for an error, such as ``No space left on device``."""
    return error.strerror or str(error)


@frozen
class RunDirectory:
    """The directory of a run, which may not exist yet."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def record_file(self) -> Path:
        return self.path / "run.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def result_file(self) -> Path:
        return self.path / "result.json"

    @property
    def tasks_file(self) -> Path:
        """Results of ``arb eval --tasks``."""
        return self.path / "tasks.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def log_file(self) -> Path:
        return self.path / "logs" / "train.log"

    @classmethod
    def unused(cls, name: str, parent: Path = RUNS) -> RunDirectory:
        """Return ``runs/<name>``, or ``runs/<name>-2`` and so on if that is taken."""
        path = parent / name
        serial = 1
        while path.exists():
            serial += 1
            path = parent / f"{name}-{serial}"
        return cls(path)

    @classmethod
    def newest(cls, name: str, parent: Path = RUNS) -> RunDirectory | None:
        """Return the last of ``runs/<name>``, ``runs/<name>-2``, ... that exists."""
        found: Path | None = None
        path = parent / name
        serial = 1
        while path.exists():
            found = path
            serial += 1
            path = parent / f"{name}-{serial}"
        return None if found is None else cls(found)

    @classmethod
    def existing(cls, path: Path) -> RunDirectory:
        """Return the run in ``path``.

        Raises:
            UsageProblem: it is not a run directory.
        """
        directory = cls(path)
        if not directory.exists():
            what = "there is no such directory"
            if path.exists():
                what = "is not a run directory: it has no run.json"
            records = path.parent.glob(f"*/{directory.record_file.name}")
            close = nearest(path.name, {file.parent.name for file in records})
            meant = "" if close is None else f"did you mean {path.with_name(close)}?\n"
            raise UsageProblem(
                f"{path}: {what}", f"{meant}`arb train CONFIG` makes one and prints where."
            )
        directory.record()
        return directory

    def exists(self) -> bool:
        """Return whether a run was started here, also if its record cannot be read."""
        return os.path.lexists(self.record_file)

    def attachment_file(self, name: str) -> Path:
        """Return the file of an attachment of the data source."""
        return self.path / f"{name}.json"

    def attachments(self) -> dict[str, Any]:
        """Return what the data source attached to the run, by name.

        Raises:
            ArbError: a file is damaged.
        """
        names = self.record()["attachments"]
        return {name: _read_any_json(self.attachment_file(name)) for name in names}

    def create(
        self,
        config_text: str,
        record: Mapping[str, Any],
        attachments: Mapping[str, Any],
        finish: Callable[[RunDirectory], None] = lambda _: None,
    ) -> None:
        """Create the directory.

        Args:
            config_text: content of ``config.yaml``.
            record: content of ``run.json``.
            attachments: attachments of the data source, by name.
            finish: called with the directory before it gets its name; what it raises leaves nothing
                behind.

        Raises:
            UsageProblem: the path is taken by another run or other files.
        """
        if self.exists():
            raise UsageProblem(
                f"{self.path}: a run was started here already",
                f"Continue it with --resume, or choose another directory: --run-dir {self.path}-2",
            )
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UsageProblem(
                f"{self.path}: exists and is not a run directory", "Choose another: --run-dir DIR"
            )
        self._remove_unfinished()
        staging = self.path.with_name(f"{self._staging_prefix}{os.getpid()}")
        made = RunDirectory(staging)
        try:
            staging.mkdir(parents=True)
            with made.locked():
                (staging / "logs").mkdir()
                (staging / "checkpoints").mkdir()
                made.config_file.write_text(config_text, encoding="utf-8")
                for name, content in attachments.items():
                    write_json(made.attachment_file(name), content)
                facts = {
                    "format": FORMAT,
                    "version": VERSION,
                    **record,
                    "attachments": sorted(attachments),
                }
                write_json(made.record_file, facts)
                finish(made)
                staging.replace(self.path)
        except BaseException as error:
            shutil.rmtree(staging, ignore_errors=True)
            if isinstance(error, OSError):
                raise ArbError(f"{self.path}: the run directory cannot be made: {error}") from error
            raise

    @property
    def _staging_prefix(self) -> str:
        """Beginning of the hidden name that the directory has while a process makes it."""
        return f".{self.path.name}.making-"

    def _remove_unfinished(self) -> None:
        """Remove what killed processes left that were making this directory."""
        for path in self.path.parent.glob(f"{glob.escape(self._staging_prefix)}*"):
            # A process that lives has the lock.
            with suppress(ArbError), RunDirectory(path).locked():
                shutil.rmtree(path, ignore_errors=True)

    def change_length(self, config_text: str) -> None:
        """Replace the config of a run that goes on with another number of steps.

        The result of the shorter run becomes ``result.before.json``: the run has not ended.

        Raises:
            ArbError: the system refuses.
        """
        try:
            if self.result_file.exists():
                self.result_file.replace(self.path / "result.before.json")
            with replacing(self.config_file) as new:
                new.write_text(config_text, encoding="utf-8")
        except OSError as error:
            raise unwritable(self.config_file, error) from error

    def keep_metrics(self) -> None:
        """Rename the metrics of an attempt that left no checkpoint, before the next one begins.

        Raises:
            ArbError: the system refuses.
        """
        try:
            if self.metrics_file.stat().st_size:
                self.metrics_file.replace(self.path / "metrics.before.jsonl")
        except FileNotFoundError:
            return
        except OSError as error:
            raise ArbError(f"{self.metrics_file}: cannot be renamed: {error}") from error

    def set_aside(self) -> Path:
        """Rename the directory to ``<name>.old-1``, or the next number that is unused; return that.

        Raises:
            UsageProblem: another process trains here.
            ArbError: the system refuses.
        """
        serial = 1
        while (target := self.path.with_name(f"{self.path.name}.old-{serial}")).exists():
            serial += 1
        with self.locked():
            try:
                self.path.rename(target)
            except OSError as error:
                raise ArbError(f"{self.path}: cannot be renamed: {error}") from error
        return target

    def record(self) -> dict[str, Any]:
        """Return the content of ``run.json``.

        Raises:
            ArbError: the file is damaged, or of another version.
        """
        record = _read_json(self.record_file)
        if record.get("format") != FORMAT or record.get("version") != VERSION:
            raise ArbError(
                f"{self.record_file}: format {record.get('format')!r} version "
                f"{record.get('version')!r}; this program reads {FORMAT!r} version {VERSION}"
            )
        for path, kind in _RECORDED.items():
            value: Any = record
            for key in path.split("."):
                value = value.get(key) if isinstance(value, dict) else None
            if not isinstance(value, kind):
                raise ArbError(
                    f"{self.record_file}: the file is damaged: {path!r} is missing or has another "
                    "type"
                )
        return record

    def result(self) -> dict[str, Any]:
        """Return the content of ``result.json``.

        Raises:
            ArbError: the file is missing or damaged.
        """
        return _read_json(self.result_file)

    def task_results(self) -> dict[str, Any]:
        """Return the content of ``tasks.json``; nothing if there is no such file.

        Raises:
            ArbError: the file is damaged.
        """
        return _read_json(self.tasks_file) if self.tasks_file.exists() else {}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory: one process at a time trains in it.

        Raises:
            UsageProblem: another process trains here.
        """
        problem = UsageProblem(
            f"{self.path}: another process is training in this directory",
            "Wait for it, stop it, or choose another directory with --run-dir.",
        )
        with locked(self.path, problem):
            yield


def _read_json(path: Path) -> dict[str, Any]:
    content = _read_any_json(path)
    if not isinstance(content, dict):
        raise ArbError(f"{path}: not a JSON object")
    return content


def _read_any_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArbError(f"{path}: cannot be read: {reason_of(error)}") from error
    except (ValueError, RecursionError) as error:
        raise ArbError(f"{path}: the file is damaged: {error}") from error
