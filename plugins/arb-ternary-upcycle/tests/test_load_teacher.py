"""The phase ``load_teacher``: sources of a teacher, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from arb_ternary.errors import ConfigError, DataError
from arb_ternary_interchange.decoder.weights import TernaryWeight, exported_weights
from arb_ternary_interchange.export import export_model
from arb_ternary_interchange.safetensors.exporter import write_export
from arb_ternary_train.restore import load_run
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_upcycle.float_model import FloatModel, write_float_model
from arb_ternary_upcycle.stages import find_stage
from arb_ternary_upcycle.teacher import read_teacher

TOKENS = torch.arange(80).view(2, 40) * 37 % 256


def load(source: Path | str, **options: Any) -> dict[str, Any]:
    return {"name": "load_teacher", "teacher": str(source), **options}


@pytest.fixture
def float_run(tmp_path: Path, run_config: Callable[..., Any]) -> Path:
    """A run of a float model, trained for three steps."""
    parts = ["embedding", "head", "norms", "linears"]
    phase = {
        "name": "standard",
        "steps": 3,
        "batch_size": 4,
        "block_size": 32,
        "eval_every": 0,
        "lr": 0.01,
    }
    config = run_config(
        phase, float_parts=parts, activations="float", group_size=128, optimizer="adamw"
    )
    train(config, RunRequest(directory=tmp_path / "float"))
    return tmp_path / "float"


def test_run_is_a_teacher(tmp_path: Path, run_config: Callable[..., Any], float_run: Path) -> None:
    report = train(run_config(load(float_run, max_nll=9.0)), RunRequest(directory=tmp_path / "run"))
    stage = FloatModel(tmp_path / "run/stages/teacher")
    model = load_run(float_run).model
    with torch.no_grad():
        assert torch.allclose(stage.decoder()(TOKENS), model(TOKENS), atol=1e-6)
    assert stage.tokenizer == {"kind": "bytes"}
    # A probe of 2,048 held-out tokens in samples of 64, said again.
    train_data = run_config(load(float_run)).data.build()
    samples = torch.cat([batch.data for batch in train_data.held_out(1, 64, 32)])
    with torch.no_grad():
        expected = F.cross_entropy(model(samples[:, :-1]).flatten(0, 1), samples[:, 1:].flatten())
    (phase,) = report.phases
    assert phase["teacher_nll"] == pytest.approx(float(expected), abs=1e-5)
    assert phase["teacher_perplexity"] == pytest.approx(math.exp(float(expected)), rel=1e-5)
    assert report.validation_loss is None  # the student has not been touched


def test_scaled_ternary_run_is_a_teacher(tmp_path: Path, run_config: Callable[..., Any]) -> None:
    options = {
        "residual_scale": -1,
        "logit_scale": -2,
        "activations": "float",
        "learned_norms": True,
    }
    phase = {"name": "standard", "steps": 1, "batch_size": 2, "block_size": 16, "eval_every": 0}
    train(run_config(phase, **options), RunRequest(directory=tmp_path / "ternary"))
    teacher = read_teacher(str(tmp_path / "ternary"), "float32")
    inside = [
        {f"blocks.{number}.{name}": value for name, value in tensors.items()}
        for number, tensors in enumerate(teacher.blocks())
    ]
    stage = write_float_model(
        tmp_path / "stage", teacher.config, 256, None, [*inside, teacher.ends()]
    )
    with torch.no_grad():
        assert torch.allclose(stage.decoder()(TOKENS), teacher.model(TOKENS), atol=1e-5)


@pytest.mark.parametrize(("name", "options"), [("gguf", ["type=f32"]), ("safetensors", [])])
def test_imported_model_is_a_teacher(
    tmp_path: Path, float_run: Path, name: str, options: list[str]
) -> None:
    if name == "gguf":
        pytest.importorskip("arb_ternary_interchange.gguf")
    file = tmp_path / f"teacher.{name}"
    export_model(float_run, file, name, options)
    teacher = read_teacher(str(file), "float32")
    model = load_run(float_run).model
    with torch.no_grad():
        assert torch.allclose(teacher.model(TOKENS), model(TOKENS), atol=1e-5)
    assert teacher.tokenizer == {"kind": "bytes"}


def test_bfloat16_rounds_each_weight_once(
    tmp_path: Path, run_config: Callable[..., Any], llama: Path
) -> None:
    config = run_config(load(llama, dtype="bfloat16", probe_tokens=0))
    train(config, RunRequest(directory=tmp_path / "run"))
    found = FloatModel(tmp_path / "run/stages/teacher").weights()
    for name, value in exported_weights(read_teacher(str(llama), "float32").model):
        assert not isinstance(value, TernaryWeight)
        assert torch.equal(found[name], value.bfloat16().float()), name


def test_reading_leaves_global_generators(llama: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    read_teacher(str(llama), "float32")
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize(
    ("options", "limit"),
    [({"max_nll": 0.5}, "0.5000, max_nll"), ({"max_perplexity": 2.0, "max_nll": 99.0}, "0.6931")],
)
def test_teacher_with_high_loss_is_refused(
    tmp_path: Path,
    run_config: Callable[..., Any],
    llama: Path,
    options: dict[str, float],
    limit: str,
) -> None:
    with pytest.raises(DataError, match=f"nats per token of held-out text; the limit is {limit}"):
        train(run_config(load(llama, **options)), RunRequest(directory=tmp_path / "run"))


def test_default_limit_is_the_unigram_entropy(
    tmp_path: Path, run_config: Callable[..., Any], llama: Path
) -> None:
    config = run_config(load(llama))
    entropy = config.data.build().baselines(64)["unigram_entropy"]
    with pytest.raises(
        DataError, match=rf"the limit is {entropy:.4f}, which the frequencies of tokens give"
    ):
        train(config, RunRequest(directory=tmp_path / "run"))
    with pytest.raises(DataError, match="no complete stage"):  # so that no later phase takes it
        find_stage(type("Run", (), {"directory": tmp_path / "run"}), None, ("teacher",))


def test_exact_limit_passes(tmp_path: Path, run_config: Callable[..., Any], llama: Path) -> None:
    first = train(run_config(load(llama, max_nll=99.0)), RunRequest(directory=tmp_path / "one"))
    nll = first.phases[0]["teacher_nll"]
    train(run_config(load(llama, max_nll=nll)), RunRequest(directory=tmp_path / "two"))


def test_other_shapes_are_refused(
    tmp_path: Path, run_config: Callable[..., Any], llama: Path
) -> None:
    config = run_config(
        load(llama), layers=3, feed_forward=64, max_length=128, tie_embeddings=False
    )
    with pytest.raises(ConfigError, match="3 of its options differ") as caught:
        train(config, RunRequest(directory=tmp_path / "run"))
    assert "layers: 3, the teacher's is 2" in caught.value.what
    assert caught.value.hint == "Set under `model`: layers: 2, feed_forward: 48, max_length: 64"
    assert not (tmp_path / "run/stages").exists()


def test_other_tokenizer_is_refused_and_the_teachers_is_written(
    tmp_path: Path, run_config: Callable[..., Any], float_run: Path
) -> None:
    from attrs import evolve

    config = run_config(load(float_run))
    characters = evolve(config.data.options, tokenizer="characters")
    config = evolve(config, data=evolve(config.data, options=characters))
    with pytest.raises(
        ConfigError, match=r"its tokenizer is not that of .*: .* begins with \["
    ) as caught:
        train(config, RunRequest(directory=tmp_path / "run"))
    assert "teacher-tokenizer.json" in caught.value.hint
    assert '"kind": "bytes"' in (tmp_path / "run/stages/teacher-tokenizer.json").read_text()


class Killed(BaseException):
    """The process ends here."""


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize("stage", ["teacher", "prepared"])
def test_killed_stage_phase_ends_with_the_same_bytes(
    tmp_path: Path,
    run_config: Callable[..., Any],
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
) -> None:
    config = run_config(load(llama, max_nll=99.0), "fold_rotate")
    train(config, RunRequest(directory=tmp_path / "whole"))

    def kill(file: Path, tensors: Any, metadata: Any) -> Any:
        if file.parent.name != stage:
            return write_export(file, tensors, metadata)
        next(iter(tensors.parts()))
        file.parent.mkdir(parents=True)
        file.with_name(f".{file.name}.writing").write_bytes(b"half a file")
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("arb_ternary_upcycle.float_model.write_export", kill)
        with pytest.raises(Killed):
            train(config, RunRequest(directory=tmp_path / "cut"))
    train(config, RunRequest(directory=tmp_path / "cut", resume="auto"))
    for name in ("teacher", "prepared"):
        stages = tmp_path / "cut/stages", tmp_path / "whole/stages"
        assert files_of(stages[0] / name) == files_of(stages[1] / name)
    for name in ("metrics.jsonl", "result.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_finished_phase_is_not_repeated(
    tmp_path: Path, run_config: Callable[..., Any], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(load(llama, max_nll=99.0), "fold_rotate")
    with monkeypatch.context() as patch:
        patch.setattr("arb_ternary_upcycle.fold_rotate.find_stage", _stop)
        with pytest.raises(Killed):
            train(config, RunRequest(directory=tmp_path / "cut"))
        patch.undo()
        patch.setattr("arb_ternary_upcycle.load_teacher.read_teacher", _stop)
        report = train(config, RunRequest(directory=tmp_path / "cut", resume="auto"))
    assert report.phases[0]["teacher_nll"] > 0


def _stop(*_: Any, **__: Any) -> None:
    raise Killed
