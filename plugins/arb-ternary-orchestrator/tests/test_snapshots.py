"""Snapshots in memory and on disk, without influence on the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary_orchestrator import snapshots
from arb_ternary_orchestrator.snapshots import SnapshotMemory, free_memory
from arb_ternary_train.loop_state import LoopState, Snapshot

CPU = torch.device("cpu")

#: Compares after step 8, and rolls back.
BUSY = {
    "decision_interval": 8,
    "hysteresis": 8,
    "eval_horizon": 4,
    "strategies": ["configured", "aggressive_adamw"],
    "max_overhead": 0.9,
    "snapshot_every": 5,
}


def snapshot(value: float, size: int = 250) -> Snapshot:
    """Return a snapshot of ``4 * size`` bytes."""
    loop = LoopState(
        step=3,
        micro_batches=3,
        skipped=0,
        skipped_in_a_row=0,
        sampler={},
        optimizer={},
        scaler=None,
        in_flight={},
        runtime=None,
        rng={},
    )
    return Snapshot({"weight": torch.full((size,), value)}, loop)


def test_snapshots_above_the_budget_go_to_disk(tmp_path: Path, equal: Any) -> None:
    memory = SnapshotMemory(tmp_path, CPU, budget=2000)
    kept = [memory.keep(snapshot(float(value))) for value in range(3)]
    assert [each.path is None for each in kept] == [True, True, False]
    assert memory.used == 2000
    for value, each in enumerate(kept):
        equal(each.get().state_dict(), snapshot(float(value)).state_dict())
    kept[0].release()
    assert memory.keep(snapshot(9.0)).path is None
    kept[2].release()
    assert not list((tmp_path / "snapshots").iterdir())
    memory.keep(snapshot(9.0))
    memory.close()
    assert not list(tmp_path.iterdir())


def test_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    (tmp_path / "snapshots" / "7").mkdir(parents=True)
    SnapshotMemory(tmp_path, CPU, budget=0)
    assert not list(tmp_path.iterdir())


def test_default_budget_is_a_quarter_of_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "free_memory", lambda device: 8000)
    memory = SnapshotMemory(tmp_path, CPU, budget=None)
    assert [memory.keep(snapshot(0.0)).path is None for _ in range(3)] == [True, True, False]


def test_free_memory() -> None:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total = int(lines["MemTotal"].split()[0]) * 1024
    assert 0 < free_memory(CPU) <= total


def test_run_with_snapshots_on_disk_is_bitwise_equal(tiny: Any, equal: Any) -> None:
    options = ("phases.0.steps=16", *tiny.floats)
    in_memory = tiny.run("memory", *options, policy=BUSY)
    on_disk = tiny.run("disk", *options, policy={**BUSY, "snapshot_memory": 0})
    assert in_memory.decisions
    assert on_disk.decisions == in_memory.decisions
    assert on_disk.metrics == in_memory.metrics
    equal(on_disk.trained, in_memory.trained)
    equal(on_disk.policy, in_memory.policy)
    assert not (on_disk.directory.path / "snapshots").exists()


def test_progressive_phase_removes_snapshot_files(
    tiny: Any,
) -> None:
    """The phase saves its last checkpoint after the loop of its last stack."""
    pytest.importorskip("arb_ternary_progressive")
    phase = (
        "phases=[{name: progressive, steps_per_stack: 6, target_stacks: 1, train_first: true, "
        "batch_size: 2,"
        " block_size: 8, eval_every: 0, lr_schedule: constant}]"
    )
    run = tiny.run("run", phase, policy={"eval_horizon": 4, "snapshot_memory": 0})
    assert run.last.state["step"] == 6
    assert not (run.directory.path / "snapshots").exists()
    assert not run.policy["ring"]["moments"], "nothing goes back to them any more"
