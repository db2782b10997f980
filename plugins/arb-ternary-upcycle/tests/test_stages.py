"""Float models on disk, and how the newest stage is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from arb_ternary.errors import ComponentError, DataError
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.directory import RunDirectory
from arb_ternary_upcycle.calibration import calibration_tokens
from arb_ternary_upcycle.float_model import (
    FloatModel,
    float_config,
    neutral_tensors,
    write_float_model,
)
from arb_ternary_upcycle.stages import find_stage
from arb_ternary_upcycle.teacher import read_teacher
from arb_ternary_upcycle.teacher_module import Teacher


@pytest.fixture
def model(small: DecoderConfig) -> Decoder:
    torch.manual_seed(0)
    return Decoder(small, 256)


TOKENS = torch.arange(24).view(2, 12) * 7 % 256


def test_block_by_block_equals_the_decoder(
    tmp_path: Path, model: Decoder, write_stage: Callable[..., FloatModel]
) -> None:
    write_stage(tmp_path / "stage", model)
    stored = FloatModel(tmp_path / "stage")
    teacher = Teacher(stored, 0, torch.device("cpu"))
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(teacher(TOKENS), model(TOKENS))
        assert torch.equal(stored.decoder()(TOKENS), model(TOKENS))
    assert not any(parameter.requires_grad for parameter in stored.block(0).parameters())


def test_weights_have_neutral_names(
    tmp_path: Path, model: Decoder, write_stage: Callable[..., FloatModel]
) -> None:
    stored = write_stage(tmp_path / "stage", model)
    assert torch.equal(
        stored.block_weights(1)["attention.key"],
        model.state_dict()["blocks.1.attention.key.weight"],
    )
    assert stored.weights().keys() == neutral_tensors(model).keys()
    assert set(stored.ends()) == {"embedding", "final_norm", "head"}


def test_bfloat16_stage_is_nearest_to_each_weight(
    tmp_path: Path, model: Decoder, write_stage: Callable[..., FloatModel]
) -> None:
    stored = write_stage(tmp_path / "stage", model, dtype="bfloat16")
    wide = neutral_tensors(model)
    narrow = stored.weights()
    assert all(torch.equal(narrow[name], wide[name].bfloat16().float()) for name in wide)
    files = sum(file.stat().st_size for file in (tmp_path / "stage").glob("*.safetensors"))
    assert files < 2.2 * sum(value.numel() for value in wide.values())


def test_equal_stage_is_not_written_again(
    tmp_path: Path, model: Decoder, write_stage: Callable[..., FloatModel]
) -> None:
    whole = write_stage(tmp_path / "whole", model, origin={"seed": 1})
    file = tmp_path / "whole" / "model.safetensors"
    before = file.stat().st_mtime_ns
    assert write_stage(tmp_path / "whole", model, origin={"seed": 1}).digest == whole.digest
    assert file.stat().st_mtime_ns == before
    assert write_stage(tmp_path / "whole", model, origin={"seed": 2}).digest != whole.digest


def test_stage_is_an_export_that_can_be_imported(
    tmp_path: Path, model: Decoder, write_stage: Callable[..., FloatModel]
) -> None:
    stage = write_stage(tmp_path / "stage", model, dtype="bfloat16")
    teacher = read_teacher(str(tmp_path / "stage" / "model.safetensors"), "float32")
    with torch.no_grad():
        assert torch.equal(teacher.model(TOKENS), stage.decoder()(TOKENS))


def test_wrong_tensors_are_refused(tmp_path: Path, model: Decoder) -> None:
    tensors = {**neutral_tensors(model), "blocks.0.attention.key": torch.zeros(3, 3)}
    with pytest.raises(ComponentError, match=r"blocks\.0\.attention\.key\.weight: .* announced"):
        write_float_model(tmp_path / "stage", model.config, 256, None, [tensors])
    del tensors["blocks.0.attention.key"]
    with pytest.raises(ComponentError, match=r"not written: blocks\.0\.attention\.key"):
        write_float_model(tmp_path / "stage", model.config, 256, None, [tensors])
    with pytest.raises(DataError, match="no complete float model"):
        FloatModel(tmp_path / "stage")


def test_find_stage_searches_earlier_runs(
    tmp_path: Path, model: Decoder, write_stage: Callable[..., FloatModel]
) -> None:
    first = tmp_path / "first"
    context: Any = SimpleNamespace(directory=tmp_path / "second")
    with pytest.raises(DataError, match="no complete stage teacher or prepared"):
        find_stage(context, None, ("prepared", "teacher"))
    for run, origin in ((first, None), (context.directory, str(first))):
        record = {
            "init_from": origin,
            "backend": {"name": "torch"},
            "data": {"name": "text"},
            "threads": {"loops": {}},
            "versions": {},
            "vocabulary_size": 256,
        }
        RunDirectory(run).create("", record, {})
    write_stage(first / "stages" / "teacher", model)
    assert find_stage(context, None, ("prepared", "teacher")).path == first / "stages" / "teacher"
    write_stage(first / "stages" / "prepared", model)
    assert find_stage(context, None, ("teacher", "prepared")).path.name == "prepared"
    assert find_stage(context, None, ("teacher",)).path.name == "teacher"
    assert find_stage(context, first, ("teacher", "prepared", "surgery")).path.name == "prepared"
    folder = first / "stages" / "teacher"
    assert find_stage(context, folder, ("surgery",)).path == folder
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError) as caught:
        find_stage(context, None, ("teacher",))
    assert "`load_teacher`" in caught.value.hint


def test_every_part_of_a_float_config_is_float() -> None:
    config = DecoderConfig(
        architecture="qwen3", group_size=32, residual_scale=-1, vote_bits=4, learned_norms=True
    )
    made = float_config(config)
    assert set(made.float_parts) == {"embedding", "head", "norms", "linears"}
    assert (made.activations, made.residual_scale, made.inner_gains, made.architecture) == (
        "float",
        0,
        True,
        "qwen3",
    )


def test_calibration_draws_each_sample_once(context: Any) -> None:
    tokens = calibration_tokens(context, tokens=100, block_size=32, seed=3)
    assert tokens.shape == (4, 32)
    assert torch.equal(tokens, calibration_tokens(context, tokens=100, block_size=32, seed=3))
    assert not torch.equal(tokens, calibration_tokens(context, tokens=100, block_size=32, seed=4))
    length = len(context.data.train) // 32 * 32
    windows = {bytes(row) for row in context.data.train[:length].reshape(-1, 32)}
    assert all(bytes(sample) in windows for sample in tokens.tolist())
    assert len({tuple(sample) for sample in tokens.tolist()}) == 4
    with pytest.raises(DataError, match="too few for 9,999,999 tokens"):
        calibration_tokens(context, tokens=9_999_999, block_size=32, seed=0)
