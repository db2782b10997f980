"""The directory of a run: what it was asked to do, with what, and everything that it wrote.

======================
=====================================================================================
``config.yaml`` the resolved config; loading it again gives an equal one ``run.json`` seed, device,
threads, backend and its source, data, versions of what took part ``<name>.json`` what the data
source attaches (``tokenizer.json``), to use a trained model without the data ``metrics.jsonl`` one
line an event ``checkpoints/`` see ``arb_ternary_train.checkpoint`` ``logs/train.log`` what was
printed, with the time ``result.json`` final numbers, once the run has finished
======================
=====================================================================================

A directory is put together under a hidden name and renamed, so that one with ``run.json`` is
complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from arb_ternary.errors import ArbError, UsageProblem, nearest
from arb_ternary_train.durable import replacing

#: Where runs go that are not given a directory.
RUNS: Final = Path("runs")
FORMAT: Final = "arb-ternary-run"
VERSION: Final = 1


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` to ``path``, replacing it whole."""
    with replacing(path) as new:
        new.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def locked(folder: Path, problem: ArbError) -> Iterator[None]:
    """Hold the lock of ``folder``. It goes with the process, however that ends.

    Raises:
        ArbError: ``problem``, when another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # not a POSIX system: there is no lock that a kill releases
        yield
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise problem from error
        yield


@frozen
class RunDirectory:
    """A run's directory."""

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
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def log_file(self) -> Path:
        return self.path / "logs" / "train.log"

    @classmethod
    def unused(cls, name: str, parent: Path = RUNS) -> RunDirectory:
        """``runs/<name>``, or ``runs/<name>-2`` and so on where that is taken."""
        path = parent / name
        serial = 1
        while path.exists():
            serial += 1
            path = parent / f"{name}-{serial}"
        return cls(path)

    @classmethod
    def newest(cls, name: str, parent: Path = RUNS) -> RunDirectory | None:
        """The last of ``runs/<name>``, ``runs/<name>-2``, ... that exists."""
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
        """The run in ``path``.

        Raises:
            UsageProblem: it is not a run directory.
        """
        directory = cls(path)
        if not directory.exists():
            what = (
                "is not a run directory: it has no run.json"
                if path.exists()
                else "there is no such directory"
            )
            beside = {
                file.parent.name for file in path.parent.glob(f"*/{directory.record_file.name}")
            }
            close = nearest(path.name, beside)
            meant = "" if close is None else f"did you mean {path.with_name(close)}?\n"
            raise UsageProblem(
                f"{path}: {what}", f"{meant}`arb train CONFIG` makes one and prints where."
            )
        record = directory.record()
        if record.get("format") != FORMAT or record.get("version") != VERSION:
            raise ArbError(
                f"{directory.record_file}: format {record.get('format')!r} version "
                f"{record.get('version')!r}; this program reads {FORMAT!r} version {VERSION}"
            )
        return directory

    def exists(self) -> bool:
        """Whether a run was started here."""
        return self.record_file.is_file()

    def attachment_file(self, name: str) -> Path:
        """Where an attachment of the data source lies."""
        return self.path / f"{name}.json"

    def attachments(self) -> dict[str, Any]:
        """What the data source attached to the run, by name.

        Raises:
            ArbError: a file is damaged.
        """
        return {
            name: _read_any_json(self.attachment_file(name))
            for name in self.record()["attachments"]
        }

    def create(
        self,
        config_text: str,
        record: Mapping[str, Any],
        attachments: Mapping[str, Any],
        finish: Callable[[RunDirectory], None] = lambda _: None,
    ) -> None:
        """Make the directory, with ``attachments`` of the data source.

        ``finish`` is called with what has been made, before it has its name; what it raises leaves
        nothing behind.

        Raises:
            UsageProblem: another run is there, or files that are not a run's.
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
        staging = self.path.with_name(f".{self.path.name}.making-{os.getpid()}")
        try:
            staging.mkdir(parents=True)
            (staging / "logs").mkdir()
            (staging / "checkpoints").mkdir()
            made = RunDirectory(staging)
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

    def record(self) -> dict[str, Any]:
        """What ``run.json`` says.

        Raises:
            ArbError: the file is damaged.
        """
        return _read_json(self.record_file)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time trains here. The lock goes with the process, however it ends.

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
    except (OSError, ValueError) as error:
        raise ArbError(f"{path}: cannot be read: {error}") from error
