"""What of a training step on several ranks is exchange, with and without sending votes while
backward runs.

    python plugins/arb-ternary-bench/studies/overlap.py --out
    plugins/arb-ternary-bench/results/overlap.json

A decoder of 6 layers and width 384 (10.7 million ternary weights in 42 matrices) is trained for
some steps by real processes under torchrun, over gloo, one thread each, two micro-batches of 256
tokens a step, votes of three levels: by one process, by ranks that send votes while backward goes
on, and by ranks that send them after it. A step's time is the median; what its exchange takes is
the time that rank 0 spends in it, packing, waiting and settling, of which settling is a step's in
any case. The load before each run is told with the result.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final
from unittest.mock import PropertyMock, patch

from arb_ternary.environment import for_child
from arb_ternary_bench.compare import machine_facts

CONFIG: Final = """
name: overlap
seed: 1
threads: 1
data: {{name: shakespeare, tokenizer: bytes}}
model: {{name: decoder, width: 384, layers: 6, heads: 6, max_length: 64}}
optimizer: {{name: scaled_votes, vote_levels: 3}}
phases:
  - {{name: standard, steps: {steps}, batch_size: 4, block_size: 64, eval_every: 0,
      gradient_accumulation_steps: 2}}
checkpoint: {{every: 0}}
"""
CASES: Final = {
    "one process": (1, True),
    "2 ranks, overlapped": (2, True),
    "2 ranks, after backward": (2, False),
}


def in_child(folder: Path, overlapped: bool) -> None:
    """Train, and write how long each step and its exchange took on this rank."""
    from arb_ternary_train.loading import load_config
    from arb_ternary_train.loop import TrainingLoop
    from arb_ternary_train.progress import Silent
    from arb_ternary_train.ranks.dealing import Dealt
    from arb_ternary_train.ranks.delivery import Delivery
    from arb_ternary_train.ranks.exchange import OwnerRows
    from arb_ternary_train.runner import RunRequest, train

    steps: list[dict[str, float]] = []
    spent = 0.0
    depth = 0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            nonlocal spent, depth
            start = time.perf_counter()
            depth = depth + 1
            result = call(*arguments)
            depth -= 1
            if not depth:
                spent += time.perf_counter() - start
            return result

        return counted

    draw = TrainingLoop.draw

    def one_turn(loop: TrainingLoop) -> Any:
        nonlocal spent
        start = time.perf_counter()
        spent = 0.0
        drawn = draw(loop)
        steps.append(
            {
                "turn": time.perf_counter() - start,
                "exchange": spent,
                "steps": float(drawn.report is not None),
            }
        )
        return drawn

    with (
        patch.object(TrainingLoop, "draw", one_turn),
        patch.object(OwnerRows, "collect", timed(OwnerRows.collect)),
        patch.object(OwnerRows, "flush", timed(OwnerRows.flush)),
        patch.object(OwnerRows, "share", timed(OwnerRows.share)),
        patch.object(Delivery, "_poll", timed(Delivery._poll)),
        patch.object(Dealt, "_may_watch", new_callable=PropertyMock, return_value=overlapped),
    ):
        train(
            load_config(folder / "run.yaml").config,
            RunRequest(directory=folder / "run", reporter=Silent),
        )
    if os.environ.get("RANK", "0") == "0":
        (folder / "told.json").write_text(json.dumps(steps), encoding="utf-8")


def measured(ranks: int, overlapped: bool, steps: int) -> dict[str, float]:
    """Milliseconds of a step and of its exchange, the median over all but the first three steps."""
    with tempfile.TemporaryDirectory(prefix="arb-overlap-") as name:
        folder = Path(name)
        (folder / "run.yaml").write_text(CONFIG.format(steps=steps), encoding="utf-8")
        launcher = (
            ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks)] if ranks > 1 else []
        )
        child = [__file__, "--child", name, *([] if overlapped else ["--after"])]
        load = os.getloadavg()[0]
        subprocess.run(
            [sys.executable, *launcher, *child], env=for_child(OMP_NUM_THREADS="1"), check=True
        )
        told = json.loads((folder / "told.json").read_text(encoding="utf-8"))
    # In one process a step has as many turns as micro-batches.
    whole = []
    turn = 0.0
    exchange = 0.0
    for each in told:
        turn = turn + each["turn"]
        exchange = exchange + each["exchange"]
        if each["steps"]:
            whole.append((turn, exchange))
            turn = exchange = 0.0
    step, spent = (1000 * median(column) for column in zip(*whole[3:], strict=True))
    return {
        "step_ms": step,
        "exchange_ms": spent,
        "exchange_share": spent / step,
        "load_before": load,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=23)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--after", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        in_child(given.child, not given.after)
        return
    cases = {
        name: measured(ranks, overlapped, given.steps)
        for name, (ranks, overlapped) in CASES.items()
    }
    result = {
        "command": "python plugins/arb-ternary-bench/studies/overlap.py",
        "machine": machine_facts(),
        "cases": cases,
    }
    text = json.dumps(result, indent=2) + "\n"
    print(text)
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
