"""One model in several formats: what one plugin writes, another program or plugin reads as the same
model.
"""

from __future__ import annotations

from pathlib import Path

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
from arb_ternary_text.models.decoder import Decoder

METADATA = {"name": "a-run", "step": 1, "model": {}, "versions": {}, "tokenizer": {"kind": "bytes"}}


def decoder(architecture: str) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig(
        width=256,
        layers=2,
        heads=4,
        kv_heads=2,
        feed_forward=512,
        max_length=64,
        architecture=architecture,  # type: ignore[arg-type]
        group_size="tensor",
        scale_rule="frozen",
    )
    return Decoder(config, 256).eval()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("type_", ["f32", "tq1_0", "tq2_0"])
def test_transformers_loads_a_llama_from_gguf(tmp_path: Path, type_: str) -> None:
    from transformers import AutoModelForCausalLM

    model = decoder("llama")
    GgufExporter(GgufConfig(type=type_)).export(model, tmp_path / "model.gguf", METADATA)  # type: ignore[arg-type]
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    ).eval()
    unrounded = Decoder(evolve(model.config, activations="float"), 256).eval()
    unrounded.load_state_dict(model.state_dict())
    ids = torch.randint(0, 256, (2, 64))
    with torch.no_grad():
        assert float((theirs(ids).logits.float() - unrounded(ids)).abs().max()) < 1e-4


def comparable(config: DecoderConfig) -> DecoderConfig:
    """With what a format says where the config leaves it to its architecture."""
    return evolve(
        config,
        head_dim=config.key_features,
        activation=config.feed_forward_activation,
        tie_embeddings=config.tied,
    )


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "arcee", "bitnet"])
def test_a_model_comes_back_the_same_from_either_format(tmp_path: Path, architecture: str) -> None:
    model = decoder(architecture)
    HfExporter(HfExportConfig(layout="packed")).export(model, tmp_path / "hf", METADATA)
    GgufExporter(GgufConfig()).export(model, tmp_path / "model.gguf", METADATA)
    found = [
        HfImporter(ImportConfig()).load(tmp_path / "hf"),
        GgufImporter(ImportConfig()).load(tmp_path / "model.gguf"),
    ]
    expected = {name: module.trits() for name, module in ternary_modules(model)}
    for imported in found:
        options = {name: value for name, value in imported.model.items() if name != "name"}
        back = Decoder(DecoderConfig(**options), imported.vocabulary_size)
        imported.fill(back)
        for name, module in ternary_modules(back):
            assert torch.equal(module.trits(), expected[name]), name
        assert imported.attachments["tokenizer"] == {"kind": "bytes"}
        # GGUF has it as float32
        assert back.config.norm_eps == pytest.approx(model.config.norm_eps)
        assert evolve(back.config, norm_eps=1e-6, rotary_base=10000.0) == comparable(model.config)
