"""``plain.yaml`` alone, and beside a busy loop on every core: what a machine that does something
else as well costs.

``python plugins/arb-ternary-bench/studies/busy.py``, on an otherwise idle machine, trains the demo
twice, prints seconds, speeds and their ratio, and fails where the second run takes more than
``--limit`` times as long. With ``-o phases.0.steps=240`` it takes a tenth of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from arb_ternary_bench.child import ChildRun
from arb_ternary_bench.compare import machine_facts
from arb_ternary_train.directory import RunDirectory

PLAIN = Path(__file__).parents[3] / "docs" / "examples" / "plain.yaml"


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that do nothing but take a core each."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def measured(directory: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Train the demo: seconds from start to end, tokens a second while it trained, threads."""
    started = time.monotonic()
    child = ChildRun.start(PLAIN, directory, overrides)
    if ended := child.wait().code:
        sys.exit(f"the run ended with {ended}\n{child.log_tail()}")
    seconds = time.monotonic() - started
    record = RunDirectory(directory).record()
    return {
        "seconds": round(seconds, 1),
        "tokens_per_second": round(child.report()["tokens_per_second"]),
        "threads": record["threads"]["last"],
        "backend": record["backend"]["name"],
    }


def main() -> None:
    """Measure, print, and compare with the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--limit", type=float, default=2.5, help="largest ratio of the times; default: 2.5"
    )
    parser.add_argument(
        "-o", dest="overrides", action="append", default=[], help="override of the demo's config"
    )
    options = parser.parse_args()
    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="arb-busy-") as folder:
        alone = measured(Path(folder) / "alone", options.overrides)
        with busy_loops(cores):
            beside = measured(Path(folder) / "beside", options.overrides)
    ratio = round(beside["seconds"] / alone["seconds"], 2)
    result = {
        "machine": machine_facts(),
        "busy_loops": cores,
        "alone": alone,
        "beside": beside,
        "ratio": ratio,
    }
    print(json.dumps(result, indent=1))
    if ratio > options.limit:
        sys.exit(f"{ratio} times as long beside busy loops; the limit is {options.limit}")


if __name__ == "__main__":
    main()
