"""Steps of a whole ternary model, at a size that a test can wait for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from click.testing import CliRunner

from arb_ternary.errors import ArbError
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_bench import memory as resident
from arb_ternary_bench.steps import large_model
from arb_ternary_bench.steps.large_model import MODELS, LargeRun, build_model, run_large_model
from arb_ternary_bench.study import main
from arb_ternary_train.audit import audit


def tiny(**changes: Any) -> LargeRun:
    return LargeRun(**{"model": MODELS["tiny"], "backend": "torch", "steps": 4, **changes})


def test_seven_billion_are_llama_2_7b_without_norms() -> None:
    # 6,738,415,616 parameters as published, of which 65 norms of 4096.
    assert MODELS["7b"].weights() == 6_738_415_616 - 65 * 4096
    assert MODELS["1b"].weights() == 1_100_048_384 - 45 * 2048


@pytest.mark.parametrize("group", [32, "row"])
def test_the_model_is_pure_and_has_the_weights_that_its_sizes_say(group: Any) -> None:
    model = build_model(tiny(group_size=group))
    counted = audit(model)
    assert counted.pure
    assert counted.parameters == MODELS["tiny"].weights()
    assert len(model.blocks) == model.config.layers == 3


def test_every_block_has_random_trits_of_its_own_and_a_stream_of_its_own() -> None:
    model = build_model(tiny())
    modules = ternary_modules(model)
    weights = {module.trits().numpy().tobytes() for _, module in modules}
    assert len(weights) == len(modules) == 3 * 7 + 2
    for _, module in modules:
        assert set(module.trits().unique().tolist()) == {-1, 0, 1}
    assert len({int(module.control[2]) for _, module in modules}) == len(modules)
    assert len({module.votes.data_ptr() for _, module in modules}) == len(modules)


def test_no_tensor_is_larger_than_one_matrix_while_the_blocks_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    largest = 0
    empty = torch.empty

    def watched(*size: Any, **options: Any) -> torch.Tensor:
        nonlocal largest
        made = empty(*size, **options)
        largest = max(largest, made.numel())
        return made

    monkeypatch.setattr(torch, "empty", watched)
    build_model(tiny())
    assert 0 < largest <= 256 * 64


def test_steps_are_real_and_their_figures_complete() -> None:
    said: list[str] = []
    result = run_large_model(tiny(), say=said.append)
    assert (result["pure"], result["float_parameters"]) == (True, 0)
    assert len(result["steps"]) == 4
    assert result["steps"][0]["flips"] == 0  # the first step knows no magnitudes
    assert sum(step["flips"] for step in result["steps"]) > 0
    assert all(4 < step["loss"] < 8 for step in result["steps"])  # log(256) = 5.55
    # 8 bits of votes, 2 of weight, 16 / 64 of exponents, and what a small matrix adds.
    assert 1.28 < result["bytes_per_parameter"] < 1.8
    assert result["others"] == {
        "float32 AdamW (4 + 4 + 8)": 16 * result["parameters"],
        "bfloat16 with 8-bit Adam (2 + 2 + 2)": 6 * result["parameters"],
    }
    assert result["peak_bytes"] >= result["built_peak_bytes"] > 0
    assert any("step:" in line for line in said)


def test_integer_gradients_train_too() -> None:
    assert run_large_model(tiny(gradients="int8"))["gradients"] == "int8"


def test_a_model_that_does_not_fit_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(large_model, "available_bytes", lambda: 4 << 30)
    monkeypatch.setattr(large_model, "build_model", lambda *_: pytest.fail("it was made"))
    with pytest.raises(
        ArbError, match=r"7b with 32 layers takes about 8.9 GiB; 4.0 GiB are available"
    ) as caught:
        run_large_model(tiny(model=MODELS["7b"]))
    assert "layers=4" in caught.value.hint


def test_a_model_whose_steps_cast_no_votes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Idle(large_model.ScaledVotes):
        def __init__(self, modules: Any, **options: Any) -> None:
            super().__init__(modules, **{**options, "lr": 1e-12, "clip": 1e-12})

    monkeypatch.setattr(large_model, "ScaledVotes", Idle)
    monkeypatch.setattr(Idle, "step", lambda self, **_: self.skip_update())
    with pytest.raises(ArbError, match="2 steps cast no vote"):
        run_large_model(tiny(steps=2))


def test_the_study_prints_figures_and_what_others_need(tmp_path: Path) -> None:
    changes = ("model=tiny", "layers=1", "steps=2", "backend=torch", "group_size=row")
    arguments = ["large_model", "--out", str(tmp_path)]
    for change in changes:
        arguments += ["-o", change]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.stderr or done.exception
    assert "73,728 parameters, of which float 0" in done.stdout
    assert "peak resident memory" in done.stdout
    other = "| float32 AdamW (4 + 4 + 8) would hold, before activations | 0.00 | 16.000 |"
    assert other in (tmp_path / "table.md").read_text()
    assert json.loads((tmp_path / "result.json").read_text())["group_size"] == "row"


def test_resident_memory_grows_with_what_is_held() -> None:
    before = resident.resident_bytes()
    # Above 32 MiB glibc maps memory anew, whatever is free in its heap.
    held = torch.ones(64 << 20, dtype=torch.uint8)
    assert resident.resident_bytes() - before > 48 << 20
    assert resident.peak_bytes() >= resident.resident_bytes() - (1 << 20)
    del held
    available = resident.available_bytes()
    assert available is None or available > 0


def test_where_the_system_does_not_tell_the_peak_stands_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(resident, "_STATUS", tmp_path / "none")
    monkeypatch.setattr(resident, "_MEMORY", tmp_path / "none")
    assert resident.resident_bytes() == resident.peak_bytes() > 10 << 20
    assert resident.available_bytes() is None


def test_fewer_layers_are_a_smaller_model() -> None:
    assert evolve(MODELS["7b"], layers=1).weights() == 464_519_168
