"""What has been measured so far, on disk: a benchmark that was killed goes on with what is
missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from arb_ternary.errors import ArbError
from arb_ternary_train.directory import write_json
from arb_ternary_upcycle.verification.reports import plain

#: Where they lie in a run.
MEASUREMENTS: Final = Path("report") / "measurements.json"


class Measurements:
    """Rows by what they measure. Times differ from run to run, so that they are in no checkpoint.

    Args:
        run: the run directory.
        origin: what was measured, plain JSON; measurements of anything else that are there are
            dropped.
    """

    def __init__(self, run: Path, origin: Mapping[str, Any]) -> None:
        self.file = run / MEASUREMENTS
        origin = json.loads(json.dumps(origin))
        found = read_measurements(run)
        same = found is not None and found["origin"] == origin
        self.content: dict[str, Any] = (
            found if found is not None and same else {"origin": origin, "parts": {}}
        )

    def __contains__(self, key: str) -> bool:
        return key in self.content["parts"]

    def __getitem__(self, key: str) -> Any:
        return self.content["parts"][key]

    def add(self, key: str, value: Any) -> None:
        """Keep a part.

        Raises:
            ArbError: it cannot be written.
        """
        # As it is read back, so that what goes on after a kill sees the same.
        self.content["parts"][key] = json.loads(json.dumps(plain(value), sort_keys=True))
        try:
            self.file.parent.mkdir(exist_ok=True)
            write_json(self.file, self.content)
        except OSError as error:
            raise ArbError(
                f"{self.file}: cannot be written: {error}", "Free some space, then --resume."
            ) from error


def read_measurements(run: Path) -> dict[str, Any] | None:
    """The measurements of a run; None where there are none.

    Raises:
        ArbError: the file is damaged.
    """
    file = run / MEASUREMENTS
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return {"origin": content["origin"], "parts": dict(content["parts"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArbError(
            f"{file}: cannot be read: {error}", "Remove it and run the phase `benchmark` again."
        ) from error
