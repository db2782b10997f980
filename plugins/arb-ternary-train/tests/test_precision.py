from __future__ import annotations

import pytest
import torch
from torch import nn

from arb_ternary.errors import ConfigError, EnvironmentProblem
from arb_ternary_train.precision import autocast_for, resolve_device, scaler_for, set_compute_dtype

CPU = torch.device("cpu")


def test_a_gpu_that_is_not_there_is_an_environment_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentProblem, match="device cuda: ") as refused:
        resolve_device("cuda")
    assert refused.value.exit_code == 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert resolve_device("cuda") == torch.device("cuda:1")
    assert resolve_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(EnvironmentProblem, match="device cuda:2: there are 2 GPUs"):
        resolve_device("cuda:2")


def test_metal_that_is_not_there_is_an_environment_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(EnvironmentProblem, match="device mps"):
        resolve_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_device("mps").type == "mps"


def test_autocast_in_bfloat16_works_on_a_cpu() -> None:
    with autocast_for(CPU, True, "bfloat16", ternary=True)():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with autocast_for(CPU, False, "bfloat16", ternary=True)():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_float16_is_refused_where_it_cannot_work() -> None:
    with pytest.raises(
        ConfigError, match="amp_dtype: float16 needs loss scaling, which works on cuda, not on cpu"
    ):
        autocast_for(CPU, True, "float16", ternary=False)
    with pytest.raises(ConfigError, match="ternary modules cast votes before"):
        autocast_for(torch.device("cuda"), True, "float16", ternary=True)
    with pytest.raises(ConfigError, match="dtype: float16 training does not work on cpu"):
        set_compute_dtype(nn.Linear(2, 2), "float16", CPU)


def test_only_float16_needs_a_scaler() -> None:
    assert not scaler_for(CPU, True, "bfloat16").is_enabled()
    assert not scaler_for(CPU, False, "float16").is_enabled()


def test_a_model_may_set_its_own_dtype() -> None:
    class Own(nn.Linear):
        def set_dtype(self, dtype: torch.dtype) -> None:
            self.asked = dtype

    own = Own(2, 2)
    plain = nn.Linear(2, 2)
    set_compute_dtype(own, "bfloat16", CPU)
    set_compute_dtype(plain, "bfloat16", CPU)
    assert own.asked == torch.bfloat16
    assert own.weight.dtype == torch.float32
    assert plain.weight.dtype == torch.bfloat16
