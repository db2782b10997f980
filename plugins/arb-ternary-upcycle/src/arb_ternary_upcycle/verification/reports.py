"""Measured numbers, their limits, and the report of a check: ``verify/LABEL.json`` in the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from attrs import asdict, frozen

from arb_ternary_upcycle.store import read_json

#: Folder of the reports in a run.
FOLDER: Final = "verify"


@frozen
class Judgement:
    """One measured number and its limit. A number at the limit passes, NaN does not.

    Attributes:
        what: what was measured.
        value: the number.
        limit: the value of the option.
        at_most: whether the limit is the largest number allowed, or the smallest.
    """

    what: str
    value: float
    limit: float
    at_most: bool = True

    @property
    def passed(self) -> bool:
        """Whether the number keeps the limit."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def sentence(self) -> str:
        """Return ``what 0.12, at most 0.1 allowed``."""
        relation = "at most" if self.at_most else "at least"
        return f"{self.what} {self.value:.6g}, {relation} {self.limit:g} allowed"

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "passed": self.passed}


def judge(what: str, value: float, limit: float | None, *, at_most: bool = True) -> list[Judgement]:
    """Judge a number; no judgement if the option that limits it is null."""
    return [] if limit is None else [Judgement(what, value, limit, at_most)]


def read_reports(run: Path) -> list[dict[str, Any]]:
    """Read the reports of all checks of a run directory, by label.

    Raises:
        ArbError: one is damaged.
    """
    files = sorted((run / FOLDER).glob("*.json"))
    return [read_json(file, "Remove it and make the check again.") for file in files]
