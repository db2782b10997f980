"""The result file of a study that goes on where it was stopped: read at the start, written after
every run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arb_ternary_train.durable import replacing


def read_result(path: Path, new: dict[str, Any]) -> dict[str, Any]:
    """What ``path`` holds, or ``new`` where there is no such file yet."""
    if not path.exists():
        return new
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result as JSON with a line a value; what ``path`` held stays whole until it is
    replaced.
    """
    with replacing(path) as file:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
