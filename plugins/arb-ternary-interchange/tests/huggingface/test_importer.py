"""Folders read back: exported ones bit for bit, and those of transformers with the same logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arb_ternary.ternary.module import TernaryModule
from arb_ternary_interchange.huggingface.packing import pack
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder

Make = Callable[..., Decoder]
Export = Callable[..., Path]
Divergence = Callable[[torch.Tensor, torch.Tensor], float]

IDS = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(3))
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
}


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    result = model.eval()(IDS)
    return result if isinstance(result, torch.Tensor) else result.logits


def ternary(model: Decoder) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return trits and exponents of every ternary matrix, with an exponent for each trit."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, TernaryModule):
            spread = module.exponent.repeat_interleave(module.shape.group_size, dim=1)
            found[name] = module.trits(), spread[:, : module.shape.in_features]
    return found


@settings(max_examples=25, deadline=None)
@given(
    group=st.sampled_from([32, 64, 128, 256, "row", "tensor"]),
    architecture=st.sampled_from(["llama", "qwen3", "arcee", "bitnet"]),
    layout=st.sampled_from(["packed", "dense_w1a8", "dense"]),
    width=st.sampled_from([32, 64, 96, 160, 288]),
    hidden=st.sampled_from([32, 100, 384]),
    tied=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_an_export_comes_back_bit_for_bit(
    tmp_path_factory: Any,
    group: Any,
    architecture: Any,
    layout: str,
    width: int,
    hidden: int,
    tied: bool,
    seed: int,
    load: Any,
) -> None:
    from arb_ternary_interchange.huggingface.exporter import HfExporter
    from arb_ternary_interchange.options import HfExportConfig

    torch.manual_seed(seed)
    one = group == "tensor" or layout == "packed"
    config = DecoderConfig(
        width=width,
        layers=1,
        heads=2,
        kv_heads=1,
        feed_forward=hidden,
        max_length=16,
        architecture=architecture,
        group_size="tensor" if one else group,
        scale_rule="frozen" if one else "residual",
        tie_embeddings=True if architecture == "bitnet" else tied,
        logit_scale=-1,
    )
    model = Decoder(config, 256)
    for module in model.modules():
        if isinstance(module, TernaryModule):
            trits = module.trits()
            trits[:, ::16] = trits[:, -1] = 1  # a group of zeros has no exponent in a dense file
            shape = (1, 1) if one and module is not model.embedding else module.exponent.shape
            exponent = (
                torch.randint(-9, 9, shape, dtype=torch.int8)
                .expand(module.exponent.shape)
                .contiguous()
            )
            module.set_trits(trits, exponent)
    folder = tmp_path_factory.mktemp("hf") / "out"
    HfExporter(HfExportConfig(layout=layout)).export(
        model, folder, {"tokenizer": {"kind": "bytes"}}
    )
    back, found = load(folder)
    expected = ternary(model)
    there = ternary(back)
    assert there.keys() == expected.keys()
    for name, (trits, exponent) in expected.items():
        assert torch.equal(there[name][0], trits), name
        assert torch.equal(there[name][1], exponent), name
    assert (found.notes, back.config.logit_scale, back.config.float_parts) == ((), -1, ())
    assert found.attachments == {"tokenizer": {"kind": "bytes"}}
    assert found.vocabulary_size == 256


def test_the_same_folder_comes_out_again(
    tmp_path: Path, make_decoder: Make, export: Export, load: Any
) -> None:
    options = {
        "group_size": "tensor",
        "scale_rule": "frozen",
        "linear_scales": True,
        "query_key_value_bias": True,
    }
    model = make_decoder(
        architecture="llama", float_parts=("embedding", "norms"), rotary_scaling=2.0, **options
    )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if ".biases." in name or name.endswith(("norm.weight", ".scale")):
            torch.nn.init.uniform_(tensor, 0.8, 1.4)
    first = export(model, tmp_path / "first", layout="packed")
    back, found = load(first, scales="float")
    assert found.notes == ()
    second = export(back, tmp_path / "second", layout="packed")
    config = json.loads((first / "config.json").read_text())
    assert json.loads((second / "config.json").read_text()) == config
    before = safetensors.torch.load_file(first / "model.safetensors")
    after = safetensors.torch.load_file(second / "model.safetensors")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.allclose(after[name].double(), tensor.double(), rtol=1e-6, atol=0), name


def test_float_weights_become_trits_when_asked(
    tmp_path: Path, make_decoder: Make, export: Export, load: Any
) -> None:
    model = make_decoder(architecture="llama", float_parts=("embedding", "head", "linears"))
    folder = export(model, tmp_path / "out", layout="dense")
    kept, _ = load(folder)
    assert torch.equal(kept.head.weight, model.head.weight)
    changed, _ = load(folder, float_sources="ternary")
    assert "linears" not in changed.config.float_parts
    dense = model.blocks[0].feed_forward.up.weight.detach()
    trits = changed.blocks[0].feed_forward.up.trits()
    # of the same sign, unless zero
    assert float((trits.sign() * dense.sign()).clamp(min=0).mean()) > 0.5


def bitnet_folder(folder: Path, linear_class: str) -> Path:
    """Write a folder with the structure of BitNet-2B-4T: random float scales and gains, packed
    here.
    """
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {
        "model.embed_tokens.weight": 0.1 * normal(256, 64),
        "model.norm.weight": 1 + 0.1 * normal(64),
    }
    shapes = {
        "q": (64, 64),
        "k": (32, 64),
        "v": (32, 64),
        "o": (64, 64),
        "gate": (96, 64),
        "up": (96, 64),
    }
    shapes["down"] = (64, 96)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name, size in (
            ("input_layernorm", 64),
            ("post_attention_layernorm", 64),
            ("self_attn.attn_sub_norm", 64),
            ("mlp.ffn_sub_norm", 96),
        ):
            tensors[f"{prefix}{name}.weight"] = 1 + 0.2 * normal(size)
        for name, shape in shapes.items():
            weight = normal(*shape) / shape[1] ** 0.5
            magnitude = weight.abs().mean()
            trits = (weight / magnitude).round().clamp(-1, 1).to(torch.int8)
            path = f"{prefix}{'self_attn' if len(name) == 1 else 'mlp'}.{name}_proj.weight"
            tensors[path] = pack(trits)
            tensors[f"{path}_scale"] = (
                magnitude if linear_class == "autobitlinear" else 1 / magnitude
            ).view(1)
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["BitNetForCausalLM"],
        "model_type": "bitnet",
        **SIZES,
        "hidden_act": "relu2",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "quantization_config": {"quant_method": "bitnet", "linear_class": linear_class},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def dequantised(folder: Path, target: Path) -> Path:
    """Write the float model of a packed folder."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    divides = config.pop("quantization_config")["linear_class"] == "bitlinear"
    for name in [name for name in tensors if name.endswith("_scale")]:
        scale = tensors.pop(name)
        packed = tensors[name.removesuffix("_scale")]
        trits = torch.cat([((packed >> 2 * i) & 3).to(torch.float32) - 1 for i in range(4)])
        tensors[name.removesuffix("_scale")] = trits / scale if divides else trits * scale
    target.mkdir()
    safetensors.torch.save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.usefixtures("eager")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "linear_class", ["bitlinear", pytest.param("autobitlinear", marks=pytest.mark.slow)]
)
def test_a_bitnet_with_float_scales_computes_the_same(
    tmp_path: Path, divergence: Divergence, linear_class: str, load: Any
) -> None:
    from transformers import AutoModelForCausalLM

    folder = bitnet_folder(tmp_path / "packed", linear_class)
    theirs = logits(AutoModelForCausalLM.from_pretrained(folder))
    exact = logits(AutoModelForCausalLM.from_pretrained(dequantised(folder, tmp_path / "dense")))
    for scales in ("fold", "float"):
        model, found = load(folder, scales=scales)
        assert found.notes == ()
        assert model.config.architecture == "bitnet"
        assert divergence(theirs, logits(model)) <= 2e-4
        unrounded, _ = load(folder, {"activations": "float"}, scales=scales)
        assert float((logits(unrounded) - exact).abs().max()) < 1e-5
    rounded, found = load(folder, scales="round")
    assert "the largest relative error is" in found.notes[0]
    assert rounded.config.stored_eps is False


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4, "hidden_act": "relu2"}),
        (
            "Llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
        ),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        ),
        ("Qwen3", {"head_dim": 32}),
        ("Qwen2", {}),
        ("Arcee", {}),
        ("Mistral", {"sliding_window": 32}),
        ("BitNet", {"tie_word_embeddings": True}),
    ],
)
def test_float_models_of_transformers_compute_the_same(
    tmp_path: Path, name: str, options: Any, load: Any
) -> None:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options}, initializer_range=0.1)
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for path, parameter in theirs.named_parameters():
            if parameter.dim() == 1:
                parameter.uniform_(*((-0.5, 0.5) if path.endswith("bias") else (0.5, 1.5)))
    theirs.save_pretrained(tmp_path / "out", max_shard_size="100KB")
    model, found = load(tmp_path / "out")
    assert found.notes == ()
    assert float((logits(model) - logits(theirs)).abs().max()) < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.filterwarnings("ignore")
def test_online_bitnet_is_imported_as_it_computes(
    tmp_path: Path, divergence: Divergence, load: Any
) -> None:
    """The master weights of BitNet-2B-4T are published in this form."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BitNetConfig(**SIZES, tie_word_embeddings=True, initializer_range=0.1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "out")
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    found["quantization_config"] = {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "online",
    }
    (tmp_path / "out" / "config.json").write_text(json.dumps(found))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    model, _ = load(tmp_path / "out")
    assert "linears" not in model.config.float_parts
    assert divergence(logits(theirs), logits(model)) <= 2e-4


def test_tokenizers_come_back(
    tmp_path: Path, make_decoder: Make, export: Export, load: Any
) -> None:
    from tokenizers import Tokenizer, models

    words = {
        "kind": "file",
        "definition": Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, "?")).to_str(),
    }
    padded = {"kind": "padded", "tokenizer": words, "vocabulary_size": 7}  # the model has more ids
    for number, (size, attached) in enumerate(((256, {"kind": "bytes"}), (3, words), (7, padded))):
        model = make_decoder(vocabulary_size=size, architecture="llama")
        _, found = load(export(model, tmp_path / str(number), attached))
        assert found.attachments["tokenizer"] == attached
    _, found = load(export(model, tmp_path / "none"))
    assert found.attachments["tokenizer"] == {"kind": "ids", "vocabulary_size": 7}
