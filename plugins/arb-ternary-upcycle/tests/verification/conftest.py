"""A teacher on disk, students, and the parts of a run that checks read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from arb_ternary_text.data.masking import build_causal
from arb_ternary_text.data.shakespeare import load_text
from arb_ternary_text.data.source import StreamSource
from arb_ternary_text.data.tokenizers import ByteTokenizer, encode_stream
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_upcycle.float_model import FloatModel


@pytest.fixture
def teacher(small: DecoderConfig) -> Decoder:
    """Random weights with distinct logits."""
    torch.manual_seed(5)
    return Decoder(small, 256).eval()


@pytest.fixture
def student(small: DecoderConfig, teacher: Decoder) -> Decoder:
    """The teacher with small changes to its weights."""
    torch.manual_seed(6)
    model = Decoder(small, 256)
    model.load_state_dict(teacher.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    return model


@pytest.fixture(scope="session")
def text() -> StreamSource:
    """The built-in validation text as bytes."""
    ids = encode_stream(ByteTokenizer(), load_text("validation"))
    return StreamSource("shakespeare", ByteTokenizer(), ids, ids)


@pytest.fixture
def run(
    tmp_path: Path,
    teacher: Decoder,
    text: StreamSource,
    write_stage: Callable[..., FloatModel],
) -> Callable[..., Any]:
    """Make a run of a given model with the stage ``teacher``."""
    write_stage(tmp_path / "run" / "stages" / "teacher", teacher)

    def make(model: torch.nn.Module, **changes: Any) -> Any:
        facts = {
            "directory": tmp_path / "run",
            "seed": 0,
            "step": 7,
            "device": torch.device("cpu"),
            "data": text,
            "masking": build_causal(None),
            "vocabulary_size": 256,
            "evaluation_shape": (3, 24),
            "shape_to_evaluate": (3, 24),
            "model": model,
        }
        return SimpleNamespace(**{**facts, **changes})

    return make


@pytest.fixture
def report() -> Callable[..., Any]:
    def read(context: Any, label: str) -> Any:
        return json.loads((context.directory / "verify" / f"{label}.json").read_text())

    return read
