"""What a check finds, and the report of it: ``verify/<label>.json`` in the run."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from arb_ternary.errors import ArbError

#: Where the reports lie in a run.
FOLDER: Final = "verify"


@frozen
class Judgement:
    """One number beside its limit. A number at the limit passes; one that is no number does not.

    Attributes:
        what: what was measured, in words.
        value: the number.
        limit: the option's value.
        at_most: whether the number may be at most the limit; else it has to be at least that.
    """

    what: str
    value: float
    limit: float
    at_most: bool = True

    @property
    def passed(self) -> bool:
        """Whether the number keeps the limit."""
        return bool((operator.le if self.at_most else operator.ge)(self.value, self.limit))

    def sentence(self) -> str:
        """``what 0.12, at most 0.1 allowed``."""
        return (
            f"{self.what} {self.value:.6g}, {'at most' if self.at_most else 'at least'} "
            f"{self.limit:g} allowed"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "what": self.what,
            "value": self.value,
            "limit": self.limit,
            "at_most": self.at_most,
            "passed": self.passed,
        }


@frozen(kw_only=True)
class Findings:
    """What a check measured.

    Attributes:
        judged: the numbers that have a limit.
        metrics: all numbers.
        details: whatever else the report is to hold, plain JSON.
    """

    judged: Sequence[Judgement]
    metrics: Mapping[str, float]
    details: Mapping[str, Any] = field(factory=dict)


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it: numbers that are not finite become the texts ``nan``, ``inf``
    and ``-inf``.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def read_reports(run: Path) -> list[dict[str, Any]]:
    """The reports of the checks that were made in the run directory ``run``, by label.

    Raises:
        ArbError: one is damaged.
    """
    reports = []
    for file in sorted((run / FOLDER).glob("*.json")):
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ArbError(
                f"{file}: cannot be read: {error}", "Remove it and make the check again."
            ) from error
        reports.append(found)
    return reports
