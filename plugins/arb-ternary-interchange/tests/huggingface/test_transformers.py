"""Exported folders in transformers: the same logits, the same tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary_interchange.huggingface.packing import pack
from arb_ternary_interchange.huggingface.rotary_scaling import llama3_factors
from arb_ternary_text.models.decoder import Decoder

Make = Callable[..., Decoder]
Export = Callable[..., Path]
Divergence = Callable[[torch.Tensor, torch.Tensor], float]

IDS = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(3))
FIRST = "qwen3"
ARCHITECTURES = [
    FIRST,
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "arcee", "bitnet")),
]

pytestmark = [
    pytest.mark.usefixtures("eager"),
    # Warnings of transformers about its own code.
    pytest.mark.filterwarnings("ignore"),
]


def logits(folder: Path, **options: Any) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    with torch.no_grad():
        result: torch.Tensor = model.eval()(IDS).logits.float()
    return result


@torch.no_grad()
def ours(model: Decoder) -> torch.Tensor:
    return model(IDS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dense_logits_are_those_of_the_float_model(
    tmp_path: Path, make_decoder: Make, export: Export, as_float: Any, architecture: str
) -> None:
    model = make_decoder(architecture=architecture, residual_scale=-1, logit_scale=-2)
    folder = export(model, tmp_path / "out", layout="dense")
    assert float((logits(folder) - ours(as_float(model))).abs().max()) < 1e-4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_logits_in_both_linear_classes_are_those_of_int8(
    tmp_path: Path, make_decoder: Make, export: Export, divergence: Divergence, architecture: str
) -> None:
    model = make_decoder(architecture=architecture, group_size="tensor", scale_rule="frozen")
    folder = export(model, tmp_path / "out", layout="packed")
    assert divergence(ours(model), logits(folder)) <= 2e-4
    # The same file multiplied instead of divided: its scales are inverted.
    import safetensors.torch

    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    inverted = {
        name: 1 / tensor if name.endswith("weight_scale") else tensor
        for name, tensor in tensors.items()
    }
    safetensors.torch.save_file(inverted, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["linear_class"] = "autobitlinear"
    (folder / "config.json").write_text(json.dumps(config))
    assert divergence(ours(model), logits(folder)) <= 2e-4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dense_ternary_logits_are_those_of_int8_with_any_groups(
    tmp_path: Path, make_decoder: Make, export: Export, divergence: Divergence, architecture: str
) -> None:
    model = make_decoder(architecture=architecture, group_size=32)
    for module in model.modules():
        if hasattr(module, "exponent") and module.exponent.shape[0] > 1:
            module.exponent += torch.randint(-1, 2, module.exponent.shape, dtype=torch.int8)
    folder = export(model, tmp_path / "out", layout="dense_w1a8", dtype="float32")
    assert divergence(ours(model), logits(folder)) <= 2e-4


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("packed", None), ("dense_w1a8", None), ("dense_w1a8", "float32")],
)
def test_dtypes_load_unless_the_card_says_otherwise(
    tmp_path: Path,
    make_decoder: Make,
    export: Export,
    divergence: Divergence,
    layout: str,
    dtype: str | None,
) -> None:
    model = make_decoder(architecture="llama", group_size="tensor", scale_rule="frozen")
    folder = export(model, tmp_path / "out", layout=layout, dtype=dtype)
    card = (folder / "README.md").read_text()
    assert f"`{layout}`" in card
    assert 'from_pretrained(folder, dtype="auto")' in card
    assert divergence(ours(model), logits(folder, dtype="auto")) <= 2e-4
    if "Other dtypes fail in the first forward pass" in card:
        assert "in bfloat16, the\ndtype of the file" in card
        with pytest.raises(RuntimeError, match="same dtype"):
            logits(folder, dtype=torch.float32)
    else:
        assert "Any other `dtype` works too" in card
        for other in (torch.float32, torch.bfloat16):
            assert divergence(ours(model), logits(folder, dtype=other)) <= 2e-4


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "arcee", "bitnet"])
def test_biases_and_rotary_factors_are_computed_there_too(
    tmp_path: Path, make_decoder: Make, export: Export, as_float: Any, architecture: str
) -> None:
    for options in ({"rotary_factors": tuple(1 + 0.5 * i for i in range(8))}, {}):
        model = make_decoder(
            architecture=architecture, query_key_value_bias=True, rotary_scaling=2.0, **options
        )
        for name, parameter in model.named_parameters():
            if ".biases." in name:
                torch.nn.init.normal_(parameter)
        folder = export(model, tmp_path / f"out{len(options)}", layout="dense")
        assert float((logits(folder) - ours(as_float(model))).abs().max()) < 1e-4


@pytest.mark.slow
def test_float_parts_gains_and_shards_load(
    tmp_path: Path, make_decoder: Make, export: Export, as_float: Any
) -> None:
    parts = ("embedding", "head", "norms", "linears")
    for options in ({"float_parts": parts}, {"learned_norms": True, "tie_embeddings": True}):
        model = make_decoder(architecture="llama", width=256, feed_forward=512, **options)
        folder = export(model, tmp_path / f"out{len(options)}", layout="dense", shard_megabytes=1)
        assert (folder / "model.safetensors.index.json").exists()
        assert float((logits(folder) - ours(as_float(model))).abs().max()) < 1e-4


def test_bytes_are_their_own_ids(tmp_path: Path, make_decoder: Make, export: Export) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = export(
        make_decoder(architecture="llama"), tmp_path / "out", {"kind": "bytes"}, layout="dense"
    )
    texts = [
        bytes(range(128)).decode(),
        "Grüße, 世界! 🌍 \u0301a",
        "  two  spaces\r\n\ttabs",
        "",
        "a" * 3000,
    ]
    for tokenizer in (
        AutoTokenizer.from_pretrained(folder),
        PreTrainedTokenizerFast.from_pretrained(folder),
    ):
        assert tokenizer.model_max_length == 32
        for text in texts:
            assert tokenizer(text)["input_ids"] == list(text.encode())
            assert tokenizer.decode(list(text.encode())) == text


@pytest.mark.slow
def test_packing_and_llama3_scaling_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.integrations.bitnet import pack_weights
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    trits = torch.randint(-1, 2, (12, 7))
    assert torch.equal(pack(trits.to(torch.int8)), pack_weights(trits.clone()))
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **scaling},
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    factors = llama3_factors(128, 500000.0, factor=32.0, low=1.0, high=4.0, length=8192)
    plain = 500000.0 ** -(torch.arange(0, 128, 2).double() / 128)
    assert torch.allclose(plain / torch.tensor(factors).double(), frequencies.double(), rtol=1e-5)
