"""The study of a training step: what takes part, how it is compared, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from click.testing import CliRunner
from torch import nn

from arb_ternary.errors import ArbError
from arb_ternary_bench.kernels.gpu import WaitingClock
from arb_ternary_bench.kernels.timing import Timing, Variant
from arb_ternary_bench.steps.child import measure_memory, respond
from arb_ternary_bench.steps.trainees import (
    FLOAT_TRAINEES,
    BitLinear,
    StepShape,
    Trainee,
    build_trainee,
    trainee_names,
)
from arb_ternary_bench.studies import step as bench_module
from arb_ternary_bench.studies.step import TABLE, StepOptions, step_rows
from arb_ternary_bench.study import Session, main

LINEAR = StepShape(out_features=48, in_features=64, rows=16, group_size=32)
BLOCK = StepShape(out_features=96, in_features=64, rows=256, group_size=32, block=True)
EAGER = trainee_names(["torch"], compiled=False)
MIB = 1 << 20


@pytest.mark.parametrize("shape", [LINEAR, BLOCK], ids=["linear", "block"])
@pytest.mark.parametrize("name", EAGER)
def test_every_way_changes_weights_and_frees_gradients(name: str, shape: StepShape) -> None:
    trainee = build_trainee(name, shape)
    before = trainee.fingerprint()
    for _ in range(3):
        trainee.step()
    assert trainee.fingerprint() != before
    assert all(parameter.grad is None for parameter in trainee.model.parameters())


@pytest.mark.parametrize("shape", [LINEAR, BLOCK], ids=["linear", "block"])
def test_all_train_the_same_number_of_weights(shape: StepShape) -> None:
    wanted = 48 * 64 if shape is LINEAR else 4 * 64 * 64 + 3 * 64 * 96
    assert {build_trainee(name, shape).weights() for name in EAGER} == {wanted}


def test_bytes_a_weight_are_those_of_the_published_ways() -> None:
    wide = evolve(LINEAR, out_features=512, in_features=1024)
    held = {name: build_trainee(name, wide) for name in EAGER}
    for trainee in held.values():
        trainee.step()
    each = {name: trainee.state_bytes() / trainee.weights() for name, trainee in held.items()}
    assert each["bfloat16"] == pytest.approx(8.0, abs=0.01)
    assert each["bfloat16 autocast"] == each["BitLinear QAT"] == pytest.approx(16.0, abs=0.01)
    # 8 bits of votes, 2 of weight, 16 / 32 of exponents; magnitudes of O(N + K) on top.
    assert each["torch"] == pytest.approx(1.3125, abs=0.02)


def test_bitlinear_is_the_published_formula() -> None:
    torch.manual_seed(0)
    layer = BitLinear(8, 4)
    x = torch.randn(3, 8, requires_grad=True)
    grad = torch.randn(3, 4)
    layer(x).backward(grad)
    w = layer.weight.detach()
    mean = w.abs().mean()
    ternary = mean * (w / mean).round().clamp(-1, 1)
    scale = x.detach().abs().amax(dim=1, keepdim=True) / 127
    rounded = scale * (x.detach() / scale).round()
    torch.testing.assert_close(layer(x), rounded @ ternary.t())
    torch.testing.assert_close(x.grad, grad @ ternary)
    torch.testing.assert_close(layer.weight.grad, grad.t() @ rounded)


def test_a_block_takes_whole_sequences() -> None:
    with pytest.raises(ArbError, match="whole sequences of 128 tokens; 200 are none"):
        build_trainee("bfloat16", evolve(BLOCK, rows=200))


def test_memory_is_that_of_a_process_of_its_own() -> None:
    wide = evolve(LINEAR, out_features=2048, in_features=1024)
    memory = measure_memory("bfloat16 autocast", wide, 1)
    held = memory["peak_bytes"] - memory["base_bytes"]
    assert 16 * 2 * MIB <= held < 16 * 2 * MIB + 48 * MIB


def test_a_process_that_fails_shows_its_own_message() -> None:
    with pytest.raises(ArbError, match="ended with 1") as caught:
        measure_memory("bfloat16", evolve(BLOCK, rows=200), 1)
    assert "whole sequences" in caught.value.hint


def test_the_child_reports_what_it_was_asked_for() -> None:
    shape = {"out_features": 48, "in_features": 64, "rows": 16, "group_size": 32, "block": False}
    before = torch.get_num_threads()
    try:
        memory = respond({"name": "torch", "shape": shape, "threads": 1})
    finally:
        torch.set_num_threads(before)
    assert 0 < memory["base_bytes"] <= memory["peak_bytes"]


class Fixed:
    """A trainee of fixed size."""

    def __init__(self, weights: int, state: int) -> None:
        self._weights = weights
        self._state = state

    def weights(self) -> int:
        return self._weights

    def state_bytes(self) -> int:
        return self._state


def figures(**times: tuple[float, float, int]) -> list[dict[str, Any]]:
    """Rows of ways whose least time, median and peak MiB beyond 100 are given; underscores stand
    for blanks.
    """
    named = {name.replace("_", " "): each for name, each in times.items()}
    trainees: Any = {name: Fixed(1000, 1300) for name in named}
    timings = {name: Timing(least, median, 5) for name, (least, median, _) in named.items()}
    memory = {
        name: {"base_bytes": 100 * MIB, "peak_bytes": (100 + own) * MIB}
        for name, (*_, own) in named.items()
    }
    return step_rows(trainees, timings, memory, tokens=64)


def test_ratios_are_the_baselines_over_the_rows() -> None:
    rows_ = figures(
        cpu=(1.0, 2.0, 10),
        bfloat16=(4.0, 5.0, 50),
        bfloat16_autocast=(3.0, 6.0, 80),
        BitLinear_QAT=(8.0, 8.0, 90),
    )
    cpu = rows_[0]
    assert cpu["speedup"] == pytest.approx({"bfloat16": 3.0, "qat": 8.0, "qat_compiled": None})
    assert cpu["tokens_per_second"] == pytest.approx(32.0)
    assert cpu["state_bytes_per_weight"] == pytest.approx(1.3)
    assert [row["role"] for row in rows_] == ["ternary", "float", "float", "float"]


def run(**changes: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "outputs": 48,
        "inputs": 64,
        "tokens": 16,
        "group_size": 32,
        "backends": ("torch",),
        "compiled": False,
        "seconds": 1e-3,
    }
    return bench_module.run(StepOptions(**{**options, **changes}), Session(Path()))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {"base_bytes": 100 * MIB, "peak_bytes": 101 * MIB}
    monkeypatch.setattr(bench_module, "measure_memory", lambda name, shape, threads: memory)


@pytest.mark.usefixtures("in_this_process")
def test_baseline_without_a_working_compiler_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(model: nn.Module) -> nn.Module:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", failing)
    result = run(compiled=True)
    assert result["excluded"] == [
        {"name": "BitLinear QAT compiled", "reason": "RuntimeError: no compiler here"}
    ]
    assert "BitLinear QAT compiled is left out: RuntimeError: no compiler here" in TABLE.markdown(
        result
    )


@pytest.mark.usefixtures("in_this_process")
def test_a_way_that_trains_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def idle(name: str, shape: StepShape) -> Trainee:
        return evolve(build_trainee(name, shape), step=lambda: None)

    monkeypatch.setattr(bench_module, "build_trainee", idle)
    with pytest.raises(ArbError, match="torch: 3 steps left every weight and vote as it was"):
        run()


def test_names_are_backends_and_the_float_ways() -> None:
    assert trainee_names(["a", "b"], compiled=True) == [
        "a",
        "a int8 gradients",
        "b",
        "b int8 gradients",
        *FLOAT_TRAINEES,
    ]


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("block", [False, True], ids=["linear", "block"])
def test_the_study_runs_from_end_to_end(block: bool, tmp_path: Path) -> None:
    changes = ["outputs=96", "inputs=64", "tokens=128", "group_size=row", "seconds=0.001"]
    changes += ["compiled=false", "backends=[torch]", "threads=1", f"block={str(block).lower()}"]
    arguments = ["step", "--out", str(tmp_path), "--json"]
    for change in changes:
        arguments += ["-o", change]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.stderr or done.exception
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert (result["study"], result["shape"]["block"]) == ("step", block)
    assert [row["name"] for row in result["rows"]] == EAGER
    assert {len(row) for row in TABLE.rows(result)} == {len(TABLE.columns)}
    assert (tmp_path / "table.md").read_text().startswith("| training |")


# --- on another device


@pytest.mark.parametrize("shape", [LINEAR, BLOCK], ids=["linear", "block"])
@pytest.mark.parametrize("name", EAGER)
def test_what_is_trained_is_on_the_device_asked_for(
    name: str, shape: StepShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.nn.Module.to
    wanted = []

    def to(module: nn.Module, *arguments: Any, **options: Any) -> nn.Module:
        wanted.append(arguments)
        return real(module, *arguments, **options)

    monkeypatch.setattr(torch.nn.Module, "to", to)
    build_trainee(name, evolve(shape, device="cpu:0")).step()
    assert ("cpu:0",) in wanted


class FakeGpu:
    """Takes note of the order in which calls are made and waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        monkeypatch.setattr(
            torch.cuda, "synchronize", lambda device: self.seen.append(f"wait for {device}")
        )
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * MIB)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7 * MIB)
        monkeypatch.setattr(
            bench_module, "check_device", lambda device: self.seen.append(f"check {device}")
        )
        monkeypatch.setattr(bench_module, "gpu_facts", lambda device: {"name": "a GPU"})


def test_a_step_on_a_gpu_is_waited_for_before_and_after() -> None:
    seen: list[str] = []
    clock = WaitingClock(lambda: seen.append("wait"))
    assert clock(Variant(name="step", call=lambda _: seen.append("step")), 0) > 0
    assert seen == ["wait", "step", "wait"]


@pytest.mark.usefixtures("in_this_process")
def test_on_a_gpu_the_bench_checks_it_waits_for_it_and_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeGpu(monkeypatch)
    result = run(device="cpu:0")
    assert gpu.seen[0] == "check cpu:0"
    timed = sum(row["steps"] for row in result["rows"])
    assert gpu.seen.count("wait for cpu:0") >= 2 * timed
    assert result["shape"]["device"] == "cpu:0"
    assert result["machine"]["gpu"] == {"name": "a GPU"}
    assert "and update. a GPU, " in TABLE.markdown(result)
    assert "Peak memory is of the tensors on the GPU" in TABLE.markdown(result)


def test_memory_on_a_gpu_is_that_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu(monkeypatch)
    shape = {"out_features": 48, "in_features": 64, "rows": 16, "group_size": 32, "device": "cpu:0"}
    memory = respond({"name": "torch", "shape": shape, "threads": torch.get_num_threads()})
    assert memory == {"base_bytes": 3 * MIB, "peak_bytes": 7 * MIB}


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(ArbError, match="'gpu' is not a device of this bench"):
        run(device="gpu")
