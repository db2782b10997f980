"""Folders that decoders are exported to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from arb_ternary.errors import ConfigError, UsageProblem
from arb_ternary_text.models.decoder import Decoder

Make = Callable[..., Decoder]
Export = Callable[..., Path]

TENSOR = {"group_size": "tensor", "scale_rule": "frozen"}


def dense(trits: torch.Tensor, exponent: torch.Tensor, group: int) -> np.ndarray:
    spread = np.repeat(exponent.numpy().astype(np.float64), group, axis=1)[:, : trits.shape[1]]
    return trits.numpy() * 2.0**spread


@pytest.mark.parametrize(
    ("architecture", "model_type", "name", "act"),
    [
        ("llama", "llama", "LlamaForCausalLM", "silu"),
        ("qwen3", "qwen3", "Qwen3ForCausalLM", "silu"),
        ("arcee", "arcee", "ArceeForCausalLM", "relu2"),
        ("bitnet", "bitnet", "BitNetForCausalLM", "silu"),
    ],
)
def test_config_json_says_what_transformers_reads(
    tmp_path: Path,
    make_decoder: Make,
    export: Export,
    architecture: str,
    model_type: str,
    name: str,
    act: str,
) -> None:
    model = make_decoder(architecture=architecture, rotary_base=50000.0, norm_eps=1e-5)
    folder = export(model, tmp_path / "out", layout="dense")
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": act,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "tie_word_embeddings": architecture == "bitnet",
        "torch_dtype": "float32",
    }
    assert {key: config[key] for key in expected} == expected
    assert "quantization_config" not in config
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_packed_weights_are_codes_and_one_scale(
    tmp_path: Path, make_decoder: Make, export: Export
) -> None:
    model = make_decoder(architecture="llama", residual_scale=-1, logit_scale=2, **TENSOR)
    folder = export(model, tmp_path / "out", layout="packed")
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    assert json.loads((folder / "config.json").read_text())["quantization_config"] == {
        "quant_method": "bitnet",
        "linear_class": "bitlinear",
        "quantization_mode": "offline",
        "modules_to_not_convert": [],
    }
    key = model.blocks[1].attention.key
    stored = tensors["model.layers.1.self_attn.k_proj.weight"].numpy()
    trits = np.concatenate([((stored >> 2 * i) & 3).astype(np.int8) - 1 for i in range(4)])
    assert np.array_equal(trits, key.trits().numpy())
    assert tensors["model.layers.1.self_attn.k_proj.weight_scale"].tolist() == [
        2.0 ** -int(key.exponent[0, 0])
    ]
    down = model.blocks[0].feed_forward.down  # with the residual scale, 1/2
    assert tensors["model.layers.0.mlp.down_proj.weight_scale"].tolist() == [
        2.0 ** (1 - int(down.exponent[0, 0]))
    ]
    assert tensors["lm_head.weight"].dtype == torch.uint8
    assert tensors["model.norm.weight"].tolist() == [4.0] * 64  # with the logit scale
    embedding = model.embedding
    assert np.array_equal(
        tensors["model.embed_tokens.weight"].numpy(),
        dense(embedding.trits(), embedding.exponent, 64),
    )


def test_dense_weights_are_trits_times_powers_of_two(
    tmp_path: Path, make_decoder: Make, export: Export
) -> None:
    model = make_decoder(architecture="qwen3", group_size=32)
    up = model.blocks[0].feed_forward.up
    up.exponent += torch.randint(-3, 4, up.exponent.shape, dtype=torch.int8)
    expected = dense(up.trits(), up.exponent, 32)
    for layout, dtype in (("dense", torch.float32), ("dense_w1a8", torch.bfloat16)):
        folder = export(model, tmp_path / layout, layout=layout)
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        stored = tensors["model.layers.0.mlp.up_proj.weight"]
        assert {tensor.dtype for name, tensor in tensors.items() if not name.endswith("scale")} == {
            dtype
        }
        assert np.array_equal(stored.double().numpy(), expected)
        scale = tensors.get("model.layers.0.mlp.up_proj.weight_scale")
        assert (None if scale is None else scale.tolist()) == (None if layout == "dense" else [1.0])
        config = json.loads((folder / "config.json").read_text())
        assert config.get("quantization_config", {}).get("linear_class") == (
            None if layout == "dense" else "autobitlinear"
        )


def test_other_scales_than_powers_of_two_are_weight_scales(
    tmp_path: Path, make_decoder: Make, export: Export
) -> None:
    model = make_decoder(architecture="llama", linear_scales=True, **TENSOR)
    query = model.blocks[0].attention.query
    query.scale.fill_(0.3)
    name = "model.layers.0.self_attn.q_proj"
    magnitude = 0.3 * 2.0 ** int(query.exponent[0, 0])
    for layout, weight, scale in (
        ("packed", None, 1 / magnitude),
        ("dense_w1a8", magnitude / 0.3, 0.3),
    ):
        tensors = safetensors.torch.load_file(
            export(model, tmp_path / layout, layout=layout) / "model.safetensors"
        )
        assert tensors[f"{name}.weight_scale"].tolist() == pytest.approx([scale], rel=1e-6)
        if weight is not None:
            assert float(tensors[f"{name}.weight"].max()) == weight
    tensors = safetensors.torch.load_file(
        export(model, tmp_path / "dense", layout="dense") / "model.safetensors"
    )
    assert float(tensors[f"{name}.weight"].max()) == pytest.approx(magnitude, rel=1e-6)


def test_factors_of_rows_are_in_dense_weights_only(
    tmp_path: Path, make_decoder: Make, export: Export
) -> None:
    model = make_decoder(architecture="llama", row_scales=True, **TENSOR)
    query = model.blocks[0].attention.query
    query.row_scale.data.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(1))
    tensors = safetensors.torch.load_file(
        export(model, tmp_path / "dense", layout="dense") / "model.safetensors"
    )
    factors = query.row_scale.detach().half().double().unsqueeze(1).numpy()
    expected = factors * dense(query.trits(), query.exponent, query.shape.group_size)
    assert np.array_equal(
        tensors["model.layers.0.self_attn.q_proj.weight"].double().numpy(), expected
    )
    with pytest.raises(ConfigError, match="packed has one scale per matrix, and the rows of"):
        export(model, tmp_path / "packed", layout="packed")


def test_packed_needs_one_exponent_and_says_what_to_do(
    tmp_path: Path, make_decoder: Make, export: Export
) -> None:
    model = make_decoder(architecture="llama", group_size=32)
    exponent = model.blocks[1].feed_forward.gate.exponent
    first = int(exponent[0, 0])
    exponent[3, 1] += 2
    with pytest.raises(
        ConfigError, match=f"groups of blocks.1.feed_forward.gate have exponents from {first} to"
    ) as e:
        export(model, tmp_path / "out", layout="packed")
    assert "dense_w1a8" in e.value.hint
    assert "group_size: tensor" in e.value.hint
    assert list(tmp_path.iterdir()) == []


def test_packed_takes_rows_by_fours(tmp_path: Path, make_decoder: Make, export: Export) -> None:
    model = make_decoder(architecture="llama", feed_forward=98, **TENSOR)
    with pytest.raises(ConfigError, match=r"rows by fours, and blocks.0.feed_forward.gate has 98"):
        export(model, tmp_path / "out", layout="packed")
    model = make_decoder(vocabulary_size=257, architecture="llama", **TENSOR)
    folder = export(model, tmp_path / "out", layout="packed")  # a head of 257 rows stays as it is
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["modules_to_not_convert"] == ["lm_head"]
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    assert tensors["lm_head.weight"].dtype == torch.float32


def test_float_linears_are_dense_only(tmp_path: Path, make_decoder: Make, export: Export) -> None:
    model = make_decoder(architecture="llama", float_parts=("linears",))
    with pytest.raises(ConfigError, match="layout: packed is for ternary linears"):
        export(model, tmp_path / "out", layout="packed")
    assert (export(model, tmp_path / "out") / "model.safetensors").exists()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config


def test_biases_make_a_llama_a_qwen2_and_others_get_one_more(
    tmp_path: Path, make_decoder: Make, export: Export
) -> None:
    for architecture, model_type in (
        ("llama", "qwen2"),
        ("qwen3", "qwen3"),
        ("arcee", "arcee"),
        ("bitnet", "bitnet"),
    ):
        model = make_decoder(architecture=architecture, query_key_value_bias=True)
        folder = export(model, tmp_path / architecture, layout="dense")
        config = json.loads((folder / "config.json").read_text())
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        assert config["model_type"] == model_type
        assert tensors["model.layers.1.self_attn.v_proj.bias"].shape == (32,)
        if model_type == "qwen2":
            assert "model.layers.1.self_attn.o_proj.bias" not in tensors
        else:
            assert config["attention_bias"] is True
            assert tensors["model.layers.1.self_attn.o_proj.bias"].tolist() == [0.0] * 64


def test_rotary_options_are_written(tmp_path: Path, make_decoder: Make, export: Export) -> None:
    folder = export(make_decoder(architecture="llama", rotary_scaling=4.0), tmp_path / "a")
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 4.0,
    }
    factors = tuple(1.0 + i for i in range(8))
    model = make_decoder(architecture="llama", rotary_scaling=2.0, rotary_factors=factors)
    scaling = json.loads((export(model, tmp_path / "b") / "config.json").read_text())[
        "rope_scaling"
    ]
    assert scaling["short_factor"] == scaling["long_factor"] == [2.0 * factor for factor in factors]
    assert scaling["attention_factor"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": 2, "sub_norms": False, "activation": "swiglu"}, "experts: 2"),
        ({"architecture": None, "sub_norms": True}, "sub_norms|activation|tie_embeddings"),
        ({"causal": False, "sub_norms": False, "activation": "swiglu"}, "causal: false"),
        (
            {"architecture": "llama", "width": 66, "head_dim": 16},
            "wants 'width' to be a multiple of 'heads'",
        ),
    ],
)
def test_models_without_a_class_in_transformers_are_refused(
    tmp_path: Path, make_decoder: Make, export: Export, options: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        export(make_decoder(**options), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_only_decoders_are_exported(tmp_path: Path, export: Export) -> None:
    with pytest.raises(ConfigError, match="a Linear has no class in transformers"):
        export(nn.Linear(2, 2), tmp_path / "out")


def test_a_folder_appears_whole_or_not_at_all(
    tmp_path: Path, make_decoder: Make, export: Export
) -> None:
    model = make_decoder(architecture="llama")
    (tmp_path / ".out.writing").mkdir()
    (tmp_path / ".out.writing" / "left").write_text("by a run that was killed")
    (tmp_path / "out").mkdir()
    export(model, tmp_path / "out")  # an empty folder may be there
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out" / "left").exists()
    with pytest.raises(UsageProblem, match="exists already"):
        export(model, tmp_path / "out")


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (
            {"kind": "characters", "alphabet": "ab"},
            "'characters' has no form in transformers: an alphabet of single",
        ),
        (
            {"kind": "ids", "vocabulary_size": 3},
            "'ids' has no form in transformers: the data is token ids",
        ),
        ({"kind": "else"}, "'else' has no form in transformers"),
    ],
)
def test_a_tokenizer_without_a_form_there_is_an_error(
    tmp_path: Path, make_decoder: Make, export: Export, tokenizer: Any, message: str
) -> None:
    model = make_decoder(architecture="llama")
    with pytest.raises(ConfigError, match=message) as caught:
        export(model, tmp_path / "out", tokenizer)
    assert "-o tokenizer=false" in caught.value.hint
    assert not (tmp_path / "out").exists()
    folder = export(model, tmp_path / "out", tokenizer, tokenizer=False)
    assert not list(folder.glob("tokenizer*"))


def test_shards_and_metadata(tmp_path: Path, make_decoder: Make, export: Export) -> None:
    model = make_decoder(architecture="llama", width=256, feed_forward=512)
    folder = export(model, tmp_path / "out", layout="dense", shard_megabytes=1)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert all((folder / name).stat().st_size < 1.1e6 for name in files)
    with safetensors.safe_open(folder / files[0], "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    assert json.loads(metadata["arb_ternary"]) == {
        "name": "a-run",
        "step": 3,
        "model": {"name": "decoder"},
        "versions": {},
    }
