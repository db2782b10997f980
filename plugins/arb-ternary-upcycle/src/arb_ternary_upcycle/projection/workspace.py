"""What a projection has done so far, on disk, so that a killed one goes on at the block where it
was.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from arb_ternary.errors import ArbError
from arb_ternary_train.directory import write_json
from arb_ternary_train.durable import replacing
from arb_ternary_train.safetensors_file import SafetensorsFile, write_safetensors

_PROGRESS: Final = "progress.json"


class Workspace:
    """A folder with the student's finished blocks, their errors, and the streams behind the last of
    them.

    ``progress.json`` is written last: what it counts is there.

    Args:
        folder: is made. What another plan has left there is removed.
        plan: what the numbers are made from, plain JSON.
    """

    def __init__(self, folder: Path, plan: Mapping[str, Any]) -> None:
        self.folder = folder
        self._plan = json.loads(json.dumps(plan))
        self.done = -1
        self.errors: list[list[dict[str, Any]]] = []
        self._read()

    def _read(self) -> None:
        try:
            content = json.loads((self.folder / _PROGRESS).read_text(encoding="utf-8"))
        except FileNotFoundError:
            content = {}
        except (OSError, ValueError) as error:
            raise ArbError(
                f"{self.folder / _PROGRESS}: cannot be read: {error}", "Remove the folder."
            ) from error
        if content.get("plan") != self._plan:
            self.remove()
            self.folder.mkdir(parents=True)
            return
        self.done = content["done"]
        self.errors = content["errors"]

    def started(self) -> None:
        """The streams in front of block 0 are there."""
        self._write(0)

    def finished(
        self, number: int, state: Mapping[str, Tensor], errors: list[dict[str, Any]]
    ) -> None:
        """Block ``number`` is rounded and the streams behind it are there.

        Args:
            number: of the block.
            state: its state dict in the student.
            errors: of its linears.
        """
        with replacing(self._block(number)) as new:
            write_safetensors(new, state, "")
        self.errors.append(errors)
        self._write(number + 1)

    def block(self, number: int) -> dict[str, Tensor]:
        """The state dict of a finished block."""
        return dict(SafetensorsFile(self._block(number)))

    def remove(self) -> None:
        """Nothing in it is needed any more."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, done: int) -> None:
        self.done = done
        write_json(
            self.folder / _PROGRESS, {"plan": self._plan, "done": done, "errors": self.errors}
        )

    def _block(self, number: int) -> Path:
        return self.folder / f"block-{number:05d}.safetensors"
