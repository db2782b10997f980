"""Files that a phase leaves behind as it works, so that it continues after a kill.

An unfinished projection and measurements are kept in a :class:`Store`.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from arb_ternary.errors import ArbError
from arb_ternary_train.directory import write_json
from arb_ternary_train.durable import flush, replacing
from arb_ternary_train.metrics import json_value
from arb_ternary_train.safetensors_file import SafetensorsFile, write_safetensors

_LOG = logging.getLogger(__name__)

#: File that says what the other files of the folder were made from.
PLAN_FILE: Final = "plan.json"


class Store:
    """A folder of files, each of them complete or absent even after a kill or a loss of power.

    All files are made from one plan. Content that was made from another plan is deleted when the
    store is opened, so that a phase with changed options starts from the beginning.

    Args:
        folder: created if it does not exist.
        plan: everything that the content depends on, plain JSON.

    Raises:
        ArbError: the plan of an existing folder cannot be read.
    """

    def __init__(self, folder: Path, plan: Mapping[str, Any]) -> None:
        self.folder = folder
        wanted = json.loads(json.dumps(plan))
        if stored_plan(folder) == wanted:
            return
        self.remove()
        folder.mkdir(parents=True)
        write_json(folder / PLAN_FILE, wanted)

    def __contains__(self, name: str) -> bool:
        return (self.folder / name).is_file()

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Yield a temporary path; what is written there becomes the file ``name`` at the end.

        Raises:
            ArbError: the disk refuses.
        """
        try:
            with replacing(self.folder / name) as new:
                yield new
            flush(self.folder)
        except OSError as error:
            raise _unwritable(self.folder / name, error) from error

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a safetensors file."""
        with self.writing(name) as new:
            write_safetensors(new, tensors, "")

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Read a safetensors file."""
        return dict(SafetensorsFile(self.folder / name))

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file; numbers that are not finite are read back as they were."""
        try:
            write_json(self.folder / name, content)
            flush(self.folder)
        except OSError as error:
            raise _unwritable(self.folder / name, error) from error

    def json(self, name: str) -> Any:
        """Read a JSON file."""
        return read_json(self.folder / name)

    def remove(self) -> None:
        """Delete the folder.

        It is renamed first, so that a kill leaves no folder with some of its files.
        """
        removed = self.folder.with_name(f".{self.folder.name}.removed")
        shutil.rmtree(removed, ignore_errors=True)
        if not self.folder.exists():
            return
        self.folder.rename(removed)
        try:
            shutil.rmtree(removed)
        except OSError as error:
            _LOG.warning("%s: no longer needed, and cannot be deleted: %s", removed, error)


def stored_plan(folder: Path) -> Any:
    """Return the plan of the store in ``folder``, or None if there is no store.

    Raises:
        ArbError: it cannot be read.
    """
    file = folder / PLAN_FILE
    return read_json(file, hint="Remove the folder.") if file.exists() else None


def read_json(file: Path, hint: str = "") -> Any:
    """Read a JSON file.

    Raises:
        ArbError: it cannot be read.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArbError(f"{file}: cannot be read: {error}", hint) from error


def save_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, complete or not at all.

    JSON has no numbers that are not finite: they are written as the texts ``nan``, ``inf`` and
    ``-inf``.

    Raises:
        ArbError: the disk refuses.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, json_value(content))
    except OSError as error:
        raise _unwritable(file, error) from error


def _unwritable(file: Path, error: OSError) -> ArbError:
    return ArbError(f"{file}: cannot be written: {error}", "Free some space, then --resume.")
