"""The model ``bitnet_of``: BitNet linears in any model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary.errors import ConfigError
from arb_ternary_qat.bitnet import BitLinear, absmean_ternary, is_of_head, make_bit_linears
from arb_ternary_testing.component import make_choice
from arb_ternary_text.models.config import FLOAT_PARTS
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.parts import FloatLinear
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train

SMALL: dict[str, Any] = {
    "name": "decoder",
    "width": 32,
    "layers": 2,
    "heads": 2,
    "max_length": 16,
    "float_parts": list(FLOAT_PARTS),
}


class Windows(FloatLinear):
    """A linear over every two neighbours, as a convolution is one over patches."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # nn.Linear's own name
        return self.product(input.unfold(-1, self.in_features, 1))


def test_subclass_keeps_its_forward() -> None:
    layer = Windows(2, 3)
    holder = torch.nn.ModuleDict({"body": layer})
    weight = layer.weight
    x = torch.randn(4, 5)
    assert make_bit_linears(holder) == 1
    assert isinstance(layer, BitLinear)
    assert isinstance(layer, Windows)
    assert layer.weight is weight
    trits, gamma = absmean_ternary(weight)
    patches = torch.stack([x[:, i : i + 2] for i in range(4)], dim=1)
    torch.testing.assert_close(layer(x), F.linear(patches, trits * gamma))
    assert make_bit_linears(holder) == 0


@pytest.mark.parametrize(
    ("name", "is_head"),
    [("head", True), ("classes.head", True), ("head.1.up", True), ("blocks.0.header", False)],
)
def test_heads_are_found_by_name(name: str, is_head: bool) -> None:
    assert is_of_head(name) is is_head


def bytes_of(folder: Path, name: str, model: dict[str, Any]) -> tuple[bytes, ...]:
    config = {
        "name": name,
        "data": {"name": "text", "path": str(folder / "text.txt"), "tokenizer": "bytes"},
        "model": model,
        "optimizer": "adamw",
        "phases": [
            {"name": "standard", "steps": 3, "batch_size": 2, "block_size": 16, "eval_every": 1}
        ],
    }
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 30)
    (folder / f"{name}.yaml").write_text(dump_yaml(config))
    directory = folder / name
    train(
        load_config(folder / f"{name}.yaml").config,
        RunRequest(directory=directory, backend="torch", reporter=Silent),
    )
    last = sorted((directory / "checkpoints").glob("step-*"))[-1]
    return (last / "model.safetensors").read_bytes(), (directory / "metrics.jsonl").read_bytes()


def test_of_a_float_decoder_it_equals_bitnet(tmp_path: Path) -> None:
    ours = bytes_of(tmp_path, "ours", {"name": "bitnet_of", "model": SMALL})
    assert ours == bytes_of(tmp_path, "theirs", {**SMALL, "name": "bitnet"})


def test_linears_are_ternary_and_the_head_is_not() -> None:
    model = make_choice("model", "bitnet_of", {"model": {**SMALL, "experts": 2}}).build(50)
    assert type(model) is Decoder
    linears = {
        name: type(module)
        for name, module in model.named_modules()
        if isinstance(module, FloatLinear)
    }
    assert linears.pop("head") is FloatLinear
    assert linears
    assert set(linears.values()) == {BitLinear}


def test_model_without_float_linears_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"'float_parts' of 'model' must name linears.* use model decoder alone"
    ):
        make_choice("model", "bitnet_of", {"model": {**SMALL, "float_parts": ["head"]}})
    twice = make_choice("model", "bitnet_of", {"model": {**SMALL, "name": "bitnet"}})
    with pytest.raises(ConfigError, match="'bitnet' has no float linear outside its head"):
        twice.build(50)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("phases.0.block_size=17", "17 exceeds the context of the model: max_length is 16"),
        ("optimizer=scaled_votes", "'scaled_votes' cannot train float parameters"),
        ("model.model.group_size=32", r"model\.model\.group_size: has no effect"),
    ],
)
def test_options_answer_for_the_inner_model(tmp_path: Path, override: str, said: str) -> None:
    config = {
        "data": "shakespeare",
        "model": {"name": "bitnet_of", "model": SMALL},
        "optimizer": "adamw",
        "phases": [{"name": "standard", "steps": 2, "batch_size": 2, "block_size": 16}],
    }
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    load_config(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=said):
        load_config(tmp_path / "run.yaml", [override])


def test_exact_run_sets_options_of_the_inner_model(tmp_path: Path) -> None:
    inner = {**SMALL, "float_parts": ["linears", "norms"]}
    config = {
        "exact": True,
        "data": "shakespeare",
        "model": {"name": "bitnet_of", "model": inner},
        "optimizer": "split",
        "phases": [{"name": "standard", "steps": 2, "batch_size": 2, "block_size": 16}],
    }
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    made = load_config(tmp_path / "run.yaml").config.model.options.model.options
    assert (made.activations, made.gradients) == ("int8", "int8")
    with pytest.raises(
        ConfigError, match=r"model\.model\.activations: 'float' contradicts exact: true"
    ):
        load_config(tmp_path / "run.yaml", ["model.model.activations=float"])


def test_initial_weights_equal_the_float_model() -> None:
    torch.manual_seed(3)
    ours = make_choice("model", "bitnet_of", {"model": SMALL}).build(50).state_dict()
    torch.manual_seed(3)
    theirs = (
        make_choice("model", "decoder", {k: v for k, v in SMALL.items() if k != "name"})
        .build(50)
        .state_dict()
    )
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
