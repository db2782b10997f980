"""Where a process stands among several, by what launchers set."""

from __future__ import annotations

from itertools import count

import pytest
import torch
import torch.distributed as dist

from arb_ternary.cli.main import main
from arb_ternary.errors import ConfigError, EnvironmentProblem, UsageProblem
from arb_ternary_train.ranks.environment import VARIABLES, Place, place_in_environment
from arb_ternary_train.ranks.launch import device_for, joined
from arb_ternary_train.ranks.world import Alone

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


def place(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Place | None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return place_in_environment()


def test_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert place(monkeypatch, **TORCHRUN, **more) == Place(3, 4, 1, "node0", 1234, 2, True)


def test_srun_with_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": "1",
        "MASTER_ADDR": "node0",
    }
    assert place(monkeypatch, **variables) == Place(3, 4, 1, "node0", 29500, 0, False)


def test_srun_without_an_address_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place(monkeypatch, SLURM_PROCID="3", SLURM_NTASKS="4") is None


@pytest.mark.parametrize(
    "variables", [{}, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "node0"}]
)
def test_one_process_is_alone(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    assert place(monkeypatch, **variables) is None
    with joined("cpu") as world:
        assert isinstance(world, Alone)


def test_the_last_of_several_processes_finds_what_they_had_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = []
    for attempt in range(2):
        left = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
        }
        elastic = {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }
        assert place(monkeypatch, **left, **elastic) is None
        # as in a new process
        monkeypatch.setattr("arb_ternary_train.ranks.launch._worlds", count())
        with joined("cpu") as world:
            found.append((world.size, world.restarts, world.kept()))
            world.keep(f"runs/begun-{attempt}")
    assert found == [(1, 0, ""), (1, 1, "runs/begun-0")]


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
        place(monkeypatch, **{**TORCHRUN, **changes})


def test_a_manifest_runs_in_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place(monkeypatch, **TORCHRUN)
    assert main(["run", "manifest.yaml"]) == 2
    assert "arb run: 4 processes were started together" in capsys.readouterr().err


def test_several_processes_share_no_device_but_the_cpu() -> None:
    here = Place(1, 2, 1, "node0", 1, 0, True)
    assert device_for("cpu", here).type == "cpu"
    for name in ("cuda:0", "mps"):
        with pytest.raises(ConfigError, match=f"device: {name}: 2 processes"):
            device_for(name, here)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        EnvironmentProblem,
        match="rank 6 is process 2 on its machine, counted from 0, and 2 GPUs are",
    ):
        device_for("cuda", Place(6, 8, 2, "node0", 1, 0, True))
    monkeypatch.setattr("arb_ternary_train.ranks.launch.resolve_device", torch.device)
    assert device_for("cuda", Place(5, 8, 1, "node0", 1, 0, True)) == torch.device("cuda:1")
