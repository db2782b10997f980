"""Small runs and teachers for the tests of upcycling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from arb_ternary.config.yaml_document import Document
from arb_ternary.plugins.manager import manager
from arb_ternary_text.data.shakespeare import ShakespeareConfig, build, load_text
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.config import RunConfig
from arb_ternary_train.loading import structure_run
from arb_ternary_upcycle.float_model import (
    FloatModel,
    float_config,
    neutral_tensors,
    write_float_model,
)

#: Options of a small student that a teacher of ``small`` fits.
STUDENT: dict[str, Any] = {
    "name": "decoder",
    "architecture": "llama",
    "width": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "feed_forward": 48,
    "max_length": 64,
    "group_size": "row",
}


@pytest.fixture
def small() -> DecoderConfig:
    """Options of a float Llama of two blocks, width 32, with two query heads for each key head."""
    return float_config(DecoderConfig(**{k: v for k, v in STUDENT.items() if k != "name"}))


def _write_stage(path: Path, model: Decoder, **options: Any) -> FloatModel:
    tensors = [neutral_tensors(model)]
    return write_float_model(
        path, model.config, model.vocabulary_size, {"kind": "bytes"}, tensors, **options
    )


@pytest.fixture(scope="session")
def write_stage() -> Callable[..., FloatModel]:
    """Write a float decoder into a stage folder, with options of ``write_float_model``."""
    return _write_stage


@pytest.fixture
def context(tmp_path: Path) -> Any:
    """The parts of a run that phases read: directory, seed, device and data."""
    return SimpleNamespace(
        directory=tmp_path / "run",
        seed=0,
        device=torch.device("cpu"),
        data=build(ShakespeareConfig()),
        note=lambda _text: None,
    )


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the beginning of the built-in text, which is read quickly."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(load_text("train")[:40_000])
    return file


@pytest.fixture
def run_config(text: Path) -> Callable[..., RunConfig]:
    """Make the config of a run of some phases; further options go to the student."""

    def make(
        *phases: dict[str, Any] | str, optimizer: Any = "scaled_votes", **options: Any
    ) -> RunConfig:
        content = {
            "name": "upcycled",
            "data": {"name": "text", "path": str(text)},
            "model": {**STUDENT, **options},
            "optimizer": optimizer,
            "phases": [{"name": phase} if isinstance(phase, str) else phase for phase in phases],
        }
        return structure_run(Document(content, source="test"), manager().registry).config

    return make


@pytest.fixture
def save_model() -> Callable[..., Path]:
    """Save a random model of transformers with the sizes of ``small``; see ``_save``."""
    return _save


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with a random Llama of transformers."""
    return _save(tmp_path / "llama")


def _save(folder: Path, kind: str = "Llama", **options: Any) -> Path:
    """Save a random ``Llama``, ``Qwen2`` (with biases) or ``Qwen3`` (with norms of heads)."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(
        **{
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "vocab_size": 256,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "initializer_range": 0.2,
            **options,
        }
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(folder)
    return folder
