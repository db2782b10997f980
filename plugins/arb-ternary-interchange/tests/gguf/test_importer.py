"""Models that are exported and imported again, and the description by ``arb inspect``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary_interchange.gguf.importer import GgufImporter
from arb_ternary_interchange.options import ImportConfig
from arb_ternary_text.models.decoder import Decoder

Make = Callable[..., Decoder]
Export = Callable[..., Path]

ARCHITECTURES = ["llama", "qwen3", "arcee", "bitnet"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("group", [64, 128, "row"])
def test_a_model_comes_back_bit_for_bit(
    make_decoder: Make, export: Export, architecture: str, group: Any, load: Any
) -> None:
    model = make_decoder(architecture, group_size=group)
    for name, buffer in model.named_buffers():
        if name.endswith(".exponent"):
            buffer += torch.randint(-2, 3, buffer.shape, dtype=torch.int8)
    path = export(model)
    again, found = load(path)
    assert found.notes == ()
    assert found.model["group_size"] == group
    assert found.attachments == {"tokenizer": {"kind": "bytes"}}
    assert found.data == {"name": "shakespeare", "tokenizer": "bytes"}
    before = model.state_dict()
    after = again.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if not name.endswith(("votes", "origin")):
            assert torch.equal(tensor, after[name]), name
    assert export(again, name="again").read_bytes() == export(model, name="again").read_bytes()


def test_a_logit_scale_comes_back(make_decoder: Make, export: Export, load: Any) -> None:
    _, found = load(export(make_decoder("llama", logit_scale=-3)))
    assert found.model["logit_scale"] == -3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_imported_model_computes_what_llama_cpp_does(
    make_decoder: Make, export: Export, llama_cpp: Any, ours: Any, architecture: str, load: Any
) -> None:
    model = make_decoder(
        architecture, linear_scales=True, float_parts=("embedding", "head", "norms")
    )
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(getattr(module, "scale", None), torch.Tensor):
            module.scale.uniform_(0.5, 2, generator=generator)
    path = export(model, "tq2_0")
    text = "To be, or not to be"
    wanted = ours(model, text.encode(), "float")
    for scales in ("fold", "float"):
        again, _ = load(path, scales=scales)
        torch.testing.assert_close(ours(again, text.encode(), "float"), wanted, atol=2e-5, rtol=0)


def test_float_sources_become_trits(make_decoder: Make, export: Export, load: Any) -> None:
    model = make_decoder("llama", float_parts=("embedding", "head", "linears", "norms"))
    again, found = load(export(model, "f32"), float_sources="ternary")
    assert "linears" not in found.model.get("float_parts", [])
    assert int(again.blocks[0].attention.query.trits().abs().sum()) > 0


def test_inspect_is_plain_json(make_decoder: Make, export: Export) -> None:
    path = export(make_decoder("llama", linear_scales=False, tie_embeddings=True), "tq2_0")
    said = GgufImporter(ImportConfig()).inspect(path)
    assert json.loads(json.dumps(said)) == said
    assert {
        key: said[key]
        for key in ("format", "architecture", "vocabulary_size", "unmapped", "scales")
    } == {
        "format": "gguf",
        "architecture": "llama",
        "vocabulary_size": 256,
        "unmapped": [],
        "scales": ["TQ2_0: float16, one for 256 weights of a row"],
    }
    assert said["tokenizer"] == {"model": "gpt2", "pre": "gpt-2", "tokens": 256}
    matrices = 256 * 256 + 2 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256)
    assert said["parameters"] == matrices + 5 * 256
    assert said["bits_per_weight"] == pytest.approx(
        (matrices * 2.0625 + 5 * 256 * 32) / said["parameters"]
    )
    assert said["tensors"][0] == {
        "name": "token_embd.weight",
        "shape": [256, 256],
        "type": "TQ2_0",
        "bytes": 16896,
    }
    assert said["metadata"]["tokenizer.ggml.tokens"]["length"] == 256
    assert said["metadata"]["tokenizer.ggml.merges"] == {
        "items": "string",
        "length": 0,
        "first": [],
    }


def test_inspect_lists_a_model_that_is_not_imported(tmp_path: Path) -> None:
    import gguf
    import numpy as np

    path = tmp_path / "f.gguf"
    writer = gguf.GGUFWriter(path, "gemma")
    writer.add_tensor("token_embd.weight", np.zeros((3, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    importer = GgufImporter(ImportConfig())
    assert importer.recognises(path)
    assert not importer.recognises(tmp_path)
    said = importer.inspect(path)
    assert said["architecture"] == "gemma"
    assert said["unmapped"] == [
        f"{path}: the architecture is 'gemma'\nImported are llama, qwen3, arcee, bitnet."
    ]
