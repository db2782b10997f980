"""Devices of the processes that a launcher has started."""

from __future__ import annotations

import pytest
import torch

from arb_ternary.errors import ConfigError, EnvironmentProblem
from arb_ternary_distributed.launch import device_for
from arb_ternary_train.launcher import LaunchedProcess


def test_several_processes_share_no_device_but_the_cpu() -> None:
    here = LaunchedProcess(1, 2, 1, "node0", 1, 0, True)
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
        device_for("cuda", LaunchedProcess(6, 8, 2, "node0", 1, 0, True))
    monkeypatch.setattr("arb_ternary_distributed.launch.resolve_device", torch.device)
    assert device_for("cuda", LaunchedProcess(5, 8, 1, "node0", 1, 0, True)) == torch.device(
        "cuda:1"
    )
