"""One model in several formats: every format gives the same model back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from arb_ternary.ternary.models import ternary_modules
from arb_ternary_interchange.gguf.exporter import GgufExporter
from arb_ternary_interchange.gguf.importer import GgufImporter
from arb_ternary_interchange.huggingface.exporter import HfExporter
from arb_ternary_interchange.huggingface.importer import HfImporter
from arb_ternary_interchange.options import GgufConfig, HfExportConfig, ImportConfig
from arb_ternary_text.models.config import DecoderConfig

METADATA = {"name": "a-run", "step": 1, "model": {}, "versions": {}, "tokenizer": {"kind": "bytes"}}


def comparable(config: DecoderConfig) -> DecoderConfig:
    """Return a config with what its architecture decides, as formats write it out."""
    return evolve(
        config,
        head_dim=config.key_features,
        activation=config.feed_forward_activation,
        tie_embeddings=config.tied,
    )


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "arcee", "bitnet"])
def test_a_model_comes_back_the_same_from_either_format(
    tmp_path: Path, architecture: str, make_decoder: Any, built: Any
) -> None:
    sizes = {"width": 256, "feed_forward": 512, "group_size": "tensor", "scale_rule": "frozen"}
    model = make_decoder(architecture, **sizes)
    HfExporter(HfExportConfig(layout="packed")).export(model, tmp_path / "hf", METADATA)
    GgufExporter(GgufConfig()).export(model, tmp_path / "model.gguf", METADATA)
    found = [
        HfImporter(ImportConfig()).load(tmp_path / "hf"),
        GgufImporter(ImportConfig()).load(tmp_path / "model.gguf"),
    ]
    expected = {name: module.trits() for name, module in ternary_modules(model)}
    for imported in found:
        back = built(imported)
        for name, module in ternary_modules(back):
            assert torch.equal(module.trits(), expected[name]), name
        assert imported.attachments["tokenizer"] == {"kind": "bytes"}
        # GGUF holds it as float32
        assert back.config.norm_eps == pytest.approx(model.config.norm_eps)
        assert evolve(back.config, norm_eps=1e-6, rotary_base=10000.0) == comparable(model.config)
