"""Environment variables of launchers, and the world that follows from them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from arb_ternary.cli.main import main
from arb_ternary.errors import UsageProblem
from arb_ternary.plugins.discovery import install_command
from arb_ternary_train.launcher import (
    VARIABLES,
    LaunchedProcess,
    launched_process,
    require_single_process,
)
from arb_ternary_train.restarts import RestartMemory, restart_memory
from arb_ternary_train.world import SingleProcess, World, init_world

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
}


@pytest.fixture(autouse=True)
def _none_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def launched(monkeypatch: pytest.MonkeyPatch, **variables: str) -> LaunchedProcess | None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return launched_process()


def test_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert launched(monkeypatch, **TORCHRUN, **more) == LaunchedProcess(
        3, 4, 1, "node0", 1234, 2, True
    )


def test_srun_with_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": "1",
        "MASTER_ADDR": "node0",
    }
    assert launched(monkeypatch, **variables) == LaunchedProcess(3, 4, 1, "node0", 29500, 0, False)


def test_srun_without_an_address_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched(monkeypatch, SLURM_PROCID="3", SLURM_NTASKS="4") is None


@pytest.mark.parametrize(
    "variables", [{}, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "node0"}]
)
def test_one_process_is_alone(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    launched(monkeypatch, **variables)
    with init_world("cpu") as world:
        assert isinstance(world, SingleProcess)


def test_several_processes_need_the_plugin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launched(monkeypatch, **TORCHRUN)
    monkeypatch.setitem(sys.modules, "arb_ternary_distributed", None)
    config = tmp_path / "run.yaml"
    config.write_text(
        "data: shakespeare\nmodel: {name: decoder, width: 32, layers: 1, heads: 2}\n"
        "optimizer: scaled_votes\nphases: [{name: standard, steps: 2}]\n"
    )
    assert main(["train", str(config), "--run-dir", str(tmp_path / "run")]) == 3
    said = capsys.readouterr().err
    assert "4 processes were started together, and the plugin" in said
    assert install_command("arb-ternary-distributed") in said
    assert not (tmp_path / "run").exists()


def test_one_process_of_a_launcher_needs_no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, **{**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"})
    monkeypatch.setitem(sys.modules, "arb_ternary_distributed", None)
    with init_world("cpu") as world:
        assert (world.rank, world.size, world.is_main) == (0, 1, True)


def test_a_single_process_agrees_with_itself() -> None:
    world: World = SingleProcess()
    assert world.broadcast("a") == world.run_on_main(lambda: "a") == world.stop_reason("a") == "a"
    assert world.gather("a") == ["a"]
    world.barrier()


def test_a_restarted_process_remembers_its_runs() -> None:
    store = dist.HashStore()
    found = []
    for attempt in range(2):
        memory = RestartMemory(store, attempt)
        for run in ("first", "second"):
            found.append(memory.begin_run())
            memory.store_directory(f"{run} of attempt {attempt}")
    assert found == ["", "", "first of attempt 0", "second of attempt 0"]


def test_nothing_is_remembered_without_a_launcher() -> None:
    memory = RestartMemory()
    memory.store_directory("runs/first")
    assert memory.begin_run() is None


def test_the_memory_is_in_the_store_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launched(
        monkeypatch,
        RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    found = []
    for attempt in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        restart_memory.cache_clear()  # as in a new process
        memory = restart_memory()
        found.append((memory.restarts, memory.begin_run()))
        memory.store_directory(f"runs/begun-{attempt}")
    restart_memory.cache_clear()
    assert found == [(0, ""), (1, "runs/begun-0")]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"RANK": ""}, "RANK: it is not set, and WORLD_SIZE is"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE: it is not set, and RANK is"),
        ({"RANK": "4"}, "RANK: 4, of 4 processes"),
        ({"RANK": "three"}, "RANK: 'three' is not a whole number"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR: it is not set, and 4 processes"),
    ],
)
def test_variables_that_contradict_each_other(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], named: str
) -> None:
    with pytest.raises(UsageProblem, match=named):
        launched(monkeypatch, **{**TORCHRUN, **changes})


def test_a_command_of_one_process_refuses_several(monkeypatch: pytest.MonkeyPatch) -> None:
    require_single_process("arb run --dry-run")
    launched(monkeypatch, **TORCHRUN)
    with pytest.raises(UsageProblem, match="--dry-run: 4 processes were started"):
        require_single_process("arb run --dry-run")
