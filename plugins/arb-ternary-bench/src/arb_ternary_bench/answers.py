"""A question to a process of its own, which prints the answer as its last line, in JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from arb_ternary.environment import for_child
from arb_ternary.errors import ArbError

#: Lines of what a failed process printed last that its error shows.
_TAIL = 12


def ask_process(
    module: str, request: Mapping[str, Any], *, threads: int, title: str, measures: str
) -> dict[str, Any]:
    """Run ``python -m module REQUEST`` with so many threads, and return its answer.

    Args:
        module: what is run; the request is its argument, as JSON.
        request: plain values.
        threads: of OpenMP.
        title: of what is measured, for the error.
        measures: what the process does, for the error: ``measures it``.

    Raises:
        ArbError: the process failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(request)],
        capture_output=True,
        text=True,
        check=False,
        env=for_child(OMP_NUM_THREADS=str(threads)),
    )
    if done.returncode:
        raise ArbError(
            f"{title}: the process that {measures} ended with {done.returncode}",
            "\n".join(done.stderr.splitlines()[-_TAIL:]),
        )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
