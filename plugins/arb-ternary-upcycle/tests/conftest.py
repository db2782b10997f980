"""Small runs and models for the tests of upcycling."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from arb_ternary_text.data.shakespeare import ShakespeareConfig, build
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_upcycle.float_model import float_config


@pytest.fixture
def small() -> DecoderConfig:
    """Options of a float Llama of two blocks, width 32, with two query heads for each key head."""
    options: dict[str, Any] = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "feed_forward": 48}
    return float_config(DecoderConfig(architecture="llama", max_length=64, **options))


@pytest.fixture
def context(tmp_path: Any) -> Any:
    """As much of a run as a phase reads: directory, seed, device and data."""
    return SimpleNamespace(
        directory=tmp_path / "run",
        seed=0,
        device=torch.device("cpu"),
        data=build(ShakespeareConfig()),
        note=lambda _text: None,
    )
