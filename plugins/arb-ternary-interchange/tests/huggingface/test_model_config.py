"""``config.json``, and the options of the decoder that come from it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.errors import DataError
from arb_ternary_interchange.huggingface.model_config import ModelConfig, read_model_config
from arb_ternary_interchange.huggingface.rotary_scaling import llama3_factors

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 256,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config.json"


def read(path: Path, **changes: Any) -> ModelConfig:
    path.write_text(json.dumps({**LLAMA, **changes}))
    return read_model_config(path)


def test_defaults_are_those_of_transformers(path: Path) -> None:
    config = read(path)
    assert dict(config.options) == {
        "width": 64,
        "layers": 2,
        "heads": 4,
        "kv_heads": 4,
        "head_dim": 16,
        "feed_forward": 96,
        "activation": "swiglu",
        "max_length": 2048,
        "norm_eps": 1e-6,
        "tie_embeddings": False,
        "activations": "float",
        "rotary_base": 10000.0,
    }
    assert (config.architecture, config.biases, config.quantization, config.notes) == (
        "llama",
        False,
        None,
        (),
    )
    bitnet = read(path, model_type="bitnet", quantization_config={"quant_method": "bitnet"})
    assert (bitnet.architecture, bitnet.options["activation"]) == ("bitnet", "reglu2")
    assert (bitnet.options["norm_eps"], bitnet.options["rotary_base"]) == (1e-5, 500000.0)
    assert bitnet.options["activations"] == "int8"
    assert bitnet.quantization is not None
    assert (bitnet.quantization.divides, bitnet.quantization.float_modules) == (True, None)


@pytest.mark.parametrize(
    ("changes", "architecture", "expected"),
    [
        ({"model_type": "qwen3", "head_dim": 32}, "qwen3", {"head_dim": 32}),
        ({"model_type": "qwen2"}, "llama", {"query_key_value_bias": True}),
        (
            {"model_type": "arcee", "hidden_act": "relu2"},
            "arcee",
            {"activation": "relu2", "norm_eps": 1e-5},
        ),
        ({"model_type": "bitnet", "hidden_act": "silu"}, "bitnet", {"activation": "swiglu"}),
        ({"hidden_act": "relu2"}, "llama", {"activation": "reglu2"}),
        ({"attention_bias": True}, "llama", {"query_key_value_bias": True}),
        ({"model_type": "mistral", "sliding_window": None}, "llama", {"max_length": 2048}),
        ({"rope_theta": 500000}, "llama", {"rotary_base": 500000.0}),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}},
            "llama",
            {"rotary_base": 7e5},
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, "llama", {"rotary_scaling": 4.0}),
        (
            {"num_key_value_heads": 2, "tie_word_embeddings": True},
            "llama",
            {"kv_heads": 2, "tie_embeddings": True},
        ),
    ],
)
def test_options_of_the_decoder_are_read(
    path: Path, changes: Any, architecture: str, expected: Any
) -> None:
    config = read(path, **changes)
    assert config.architecture == architecture
    assert {key: config.options.get(key) for key in expected} == expected


def test_a_sliding_window_limits_the_length(path: Path) -> None:
    mistral = read(path, model_type="mistral", max_position_embeddings=32768)
    assert mistral.options["max_length"] == 4096  # transformers' default window
    assert "sliding window of 4096" in mistral.notes[0]
    qwen = {"model_type": "qwen3", "sliding_window": 100, "max_position_embeddings": 500}
    assert read(path, **qwen).options["max_length"] == 500
    assert read(path, **qwen, use_sliding_window=True).options["max_length"] == 100
    assert (
        read(path, model_type="mistral", sliding_window=5000, max_position_embeddings=500).notes
        == ()
    )


def test_own_code_is_noted_and_not_run(path: Path) -> None:
    config = read(path, auto_map={"AutoModelForCausalLM": "evil.Model"})
    assert config.notes == ("The folder's own code ('auto_map') is not used: the decoder's is.",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2"},
            "'model_type' must be one of llama, mistral, qwen2, qwen3, arcee, bitnet; it is 'gpt2'",
        ),
        ({"model_type": ["llama"]}, "'model_type' must be one of"),
        ({"hidden_size": None}, "'hidden_size' must be a whole number"),
        ({"hidden_size": True}, "'hidden_size' must be a whole number"),
        ({"hidden_size": 1 << 40}, "'hidden_size' must be a whole number from 1 to"),
        ({"hidden_size": "64"}, "it is '64'"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' must be a whole number from 1 to 4096"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers'"),
        ({"num_attention_heads": 5}, "must be a divisor of 'hidden_size', 64"),
        ({"num_key_value_heads": 3}, "must be a divisor of 'num_attention_heads', 4"),
        ({"num_key_value_heads": 8}, "'num_key_value_heads' must be a whole number from 1 to 4"),
        ({"head_dim": 15}, "'head_dim' must be even"),
        ({"hidden_act": "gelu"}, "'hidden_act' must be one of silu, swish, relu2; it is 'gelu'"),
        ({"model_type": "arcee", "hidden_act": "silu"}, "'hidden_act' must be one of relu2"),
        ({"rms_norm_eps": 0}, "'rms_norm_eps' must be a number from"),
        ({"rms_norm_eps": math.nan}, "'rms_norm_eps' must be a number from"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings' must be true or false"),
        ({"vocab_size": 0}, "'vocab_size' must be a whole number"),
        ({"rope_theta": 10**400}, "'rope_theta' must be a number"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4}},
            "must be one of default, linear, llama3, longrope",
        ),
        (
            {"rope_scaling": {"type": "dynamic"}},
            "'type' must be one of default, linear, llama3, longrope",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "'rope_scaling': 'factor' must be a number"),
        ({"rope_scaling": [1]}, "'rope_scaling' must be an object"),
        ({"layer_types": ["linear_attention"]}, "'layer_types' must be full_attention or sliding"),
        ({"partial_rotary_factor": 0.5}, "the decoder rotates whole heads"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "'quant_method' must be one of bitnet; it is 'gptq'",
        ),
        (
            {"quantization_config": {"quant_method": "bitnet", "linear_class": "x"}},
            "must be one of bitlinear, autobit",
        ),
        (
            {"quantization_config": {"quant_method": "bitnet", "use_rms_norm": True}},
            "'use_rms_norm' must be false",
        ),
        (
            {"quantization_config": {"quant_method": "bitnet", "modules_to_not_convert": [3]}},
            "'modules_to_not_convert' must be a list of strings",
        ),
    ],
)
def test_faults_name_file_and_key(path: Path, changes: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        read(path, **changes)
    assert caught.value.what.startswith(f"{path}: ")
    assert message in caught.value.what
    assert len(str(caught.value)) < 600


def test_a_file_that_is_no_config_is_an_error(path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_model_config(path)
    path.write_bytes(b"\xff")
    with pytest.raises(DataError, match="is not UTF-8: byte 0"):
        read_model_config(path)
    path.write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(DataError, match="larger than 1048576 bytes"):
        read_model_config(path)


def test_factors_of_llama3_follow_the_wavelength() -> None:
    # Llama 3.1: wavelengths below 8192 / 4 positions stay, those above 8192 turn 8 times slower.
    factors = llama3_factors(128, 500000.0, factor=8.0, low=1.0, high=4.0, length=8192)
    for plane, factor in enumerate(factors):
        wavelength = 2 * math.pi * 500000.0 ** (plane / 64)
        if wavelength < 2048:
            assert factor == 1.0
        elif wavelength > 8192:
            assert factor == 8.0
        else:
            smooth = (8192 / wavelength - 1) / 3
            assert 1 / factor == pytest.approx((1 - smooth) / 8 + smooth)
    assert {1.0, 8.0} < set(factors)


def test_listed_factors_must_not_depend_on_the_length(path: Path) -> None:
    longrope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 7 + [2.0],
        "long_factor": [1.0] * 7 + [2.0],
        "attention_factor": 1.0,
    }
    config = read(path, rope_scaling=longrope)
    assert config.options["rotary_factors"] == (1.0,) * 7 + (2.0,)
    for changes, message in (
        ({"long_factor": [1.0] * 8}, "'long_factor' must be as 'short_factor'"),
        ({"attention_factor": None}, "'attention_factor' must be 1.0"),
        ({"short_factor": [1.0]}, "'short_factor' must be a list of 8 numbers"),
    ):
        with pytest.raises(DataError, match=message):
            read(path, rope_scaling={**longrope, **changes})
