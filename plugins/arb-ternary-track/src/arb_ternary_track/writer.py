"""The base of the classes that write to a library, and the file with what they have written."""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from attrs import define, field

from arb_ternary_track.points import Point, TrackedRun


class Writer(ABC):
    """Writes points to a library. One thread makes all calls, and each may raise.

    Attributes:
        key: where the points go. Two trackers of a run have different ones.
    """

    #: Whether :meth:`open` removes the points after the step of the run.
    rewinds: ClassVar[bool] = False
    key: str

    @abstractmethod
    def open(self, run: TrackedRun) -> None:
        """Begin or continue a run."""

    @abstractmethod
    def write(self, points: Sequence[Point]) -> None:
        """Write points, which come in order and once each."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """End the run, or interrupt it."""


@define(eq=False)
class Progress:
    """What a tracker has of a run, in a file of the run directory.

    Attributes:
        path: the file.
        id: see ``TrackedRun.id``.
        last: the last step of each kind of points.
    """

    path: Path
    id: str = field(factory=lambda: secrets.token_hex(8))
    last: dict[str, int] = field(factory=dict)

    @classmethod
    def load(cls, path: Path) -> Progress:
        """Return the content of ``path``, or the progress of a new run."""
        if not path.exists():
            return cls(path)
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(path, content["id"], content["last"])

    def save(self) -> None:
        """Replace the file as a whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"id": self.id, "last": self.last}) + "\n", encoding="utf-8")
        new.replace(self.path)

    def rewind(self, step: int) -> None:
        """Forget the points after ``step``."""
        self.last = {kind: min(last, step) for kind, last in self.last.items()}

    def take_new(self, points: Iterable[Point]) -> list[Point]:
        """Return the points that the tracker does not have, and count them as written."""
        new = []
        for point in points:
            if point.step > self.last.get(point.kind, -1):
                self.last[point.kind] = point.step
                new.append(point)
        return new
