"""SIGKILL at random moments, inside candidates, rollbacks and what is written of them: resumed, the
bytes are the same.

The runs are children of a helper that has imported everything. A moment is counted, not timed:
before and after every micro-batch, restored snapshot and line that a decision writes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arb_ternary_orchestrator.report import read_decisions

HELPER = """
import json, os, signal, sys
import torch
import torch._dynamo
torch.set_num_threads(1)
import arb_ternary_text.models.decoder
import arb_ternary_train.optim.split
import arb_ternary_votes.scaled_votes
import arb_ternary_train.optim.adamw
import arb_ternary_train.standard
import arb_ternary_orchestrator.policy
from pathlib import Path
from arb_ternary_orchestrator.branches import _try_out
from arb_ternary_orchestrator import branches
from arb_ternary_orchestrator.report import DecisionLog
from arb_ternary_orchestrator.policy import Orchestrator
from arb_ternary_train.loading import load_config
from arb_ternary_train.loop import TrainingLoop
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_train.loop_state import Snapshot

loss = TrainingLoop.loss
def disturbed(self, batch, masked, output):
    value = loss(self, batch, masked, output)
    if value.requires_grad and self.microbatches == 18:
        value = value * 10.0
    if self.microbatches == 24:  # the probe fails as well, as with broken weights
        value = value * float("nan")
    return value
TrainingLoop.loss = disturbed

def run(order):
    seen, where = [], ["plain"]
    def tick():
        seen.append(where[-1])
        if len(seen) == order["moment"]:
            os.kill(os.getpid(), signal.SIGKILL)
    def ticking(cls, name):
        inner = getattr(cls, name)
        def wrapped(*arguments, **options):
            tick()
            result = inner(*arguments, **options)
            tick()
            return result
        setattr(cls, name, wrapped)
    def within(owner, name, what):
        inner = getattr(owner, name)
        def wrapped(*arguments, **options):
            where.append(what)
            try:
                return inner(*arguments, **options)
            finally:
                where.pop()
        setattr(owner, name, wrapped)
    for cls, name in ((TrainingLoop, "train_step"), (Snapshot, "restore"), (Snapshot, "save"),
        (DecisionLog, "decided")):
        ticking(cls, name)
    within(branches, "_try_out", "branch")
    within(Orchestrator, "_roll_back", "rollback")
    train(
        load_config(order["config"]).config,
        RunRequest(directory=Path(order["directory"]), resume="auto", reporter=Silent),
    )
    Path(order["directory"] + ".moments").write_text(json.dumps(seen))

print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            run(json.loads(line))
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""

#: Compares after step 8, rolls back after the 18th and the 24th micro-batch, and compares again.
POLICY = {
    "name": "orchestrator",
    "decision_interval": 8,
    "hysteresis": 8,
    "eval_horizon": 4,
    "strategies": ["configured", "aggressive_adamw"],
    "safety_strategy": "conservative_adamw",
    "max_overhead": 0.9,
    "snapshot_every": 4,
}

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")]


class Helper:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HELPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._line() == "ready"

    def run(self, config: Path, directory: Path, moment: int | None = None) -> int:
        """Start or resume a run, kill it at a moment, and return its wait status."""
        assert self.process.stdin is not None
        order = {"config": str(config), "directory": str(directory), "moment": moment}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def helper() -> Iterator[Helper]:
    made = Helper()
    yield made
    made.close()


def files_in(directory: Path) -> dict[str, bytes]:
    found = [
        directory / "metrics.jsonl",
        *directory.glob("checkpoints/**/*"),
        *directory.glob("snapshots/**/*"),
    ]
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(found)
        if path.is_file()
    }


def decisions_in(directory: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in each.items() if key != "seconds"}
        for each in read_decisions(directory)
    ]


@pytest.mark.parametrize("memory", [None, 0], ids=["in memory", "on the disk"])
def test_run_killed_twenty_times_ends_with_the_same_bytes(
    memory: int | None, helper: Helper, tiny: Any
) -> None:
    config = tiny.folder / "killed.yaml"
    override = f"phases.0.policy={json.dumps({**POLICY, 'snapshot_memory': memory})}"
    from arb_ternary.config.fields import to_plain
    from arb_ternary.config.yaml_document import dump_yaml

    config.write_text(
        dump_yaml(to_plain(tiny.config("phases.0.steps=36", "checkpoint.every=3", override)))
    )
    whole = tiny.folder / "whole"
    assert helper.run(config, whole) == 0
    assert [each["reason"] for each in decisions_in(whole)].count("safety") == 2
    moments: list[str] = json.loads(Path(f"{whole}.moments").read_text())
    generator = random.Random(time.time_ns())
    # A resumed run has the moments of the whole run only before the first kill.
    wanted = [generator.randrange(1, len(moments) + 1) for _ in range(8)]
    for what in ("branch", "rollback"):
        among = [index + 1 for index, where in enumerate(moments) if where == what]
        wanted += [generator.choice(among) for _ in range(6)]
    for serial, moment in enumerate(wanted):
        directory = tiny.folder / f"killed{serial}"
        status = helper.run(config, directory, moment)
        assert os.WIFSIGNALED(status), (moment, status)
        assert os.WTERMSIG(status) == signal.SIGKILL, (moment, status)
        again = helper.run(config, directory, generator.randrange(1, 60))
        if again != 0:
            assert os.WTERMSIG(again) == signal.SIGKILL, (moment, again)
            assert helper.run(config, directory) == 0
        assert files_in(directory) == files_in(whole), (
            f"killed at moment {moment}, a {moments[moment - 1]}"
        )
        assert decisions_in(directory) == decisions_in(whole)
