"""The ``config.json`` of an exported decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from arb_ternary.errors import ConfigError
from arb_ternary_interchange.decoder.architecture import architecture_of
from arb_ternary_interchange.huggingface.rotary_scaling import written_rotary
from arb_ternary_text.models.config import DecoderConfig

_CLASSES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "arcee": "ArceeForCausalLM",
    "bitnet": "BitNetForCausalLM",
}
_ACTIVATIONS: Final = {"swiglu": "silu", "reglu2": "relu2", "relu2": "relu2"}


def config_json(config: DecoderConfig, vocabulary_size: int, dtype: str) -> dict[str, Any]:
    """Return what transformers has to know of a decoder, in keys of its versions 4 and 5.

    Raises:
        ConfigError: no class of transformers computes it.
    """
    architecture: str = architecture_of(config, reglu2=True)
    if architecture in {"llama", "arcee"} and config.width % config.heads:
        raise ConfigError(
            f"model: transformers' {architecture} wants 'width' to be a multiple of 'heads'; "
            f"{config.heads} does not divide {config.width}",
            "Train with query_key_norm: true (qwen3), or with a width that is one.",
        )
    biases = config.query_key_value_bias
    model_type = "qwen2" if biases and architecture == "llama" else architecture
    written = {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        "vocab_size": vocabulary_size,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_heads,
        "head_dim": config.key_features,
        "hidden_act": _ACTIVATIONS[config.feed_forward_activation],
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "use_cache": True,
        "torch_dtype": dtype,
        **written_rotary(config.rotary_base, config.rotary_scaling, config.rotary_factors),
    }
    if model_type == "qwen2":
        written["use_sliding_window"] = False
    else:
        written["attention_bias"] = biases
    if model_type in {"llama", "arcee"}:
        written["mlp_bias"] = False
    return written


def quantization_json(layout: str, float_modules: Sequence[str]) -> Mapping[str, Any]:
    """Return the ``quantization_config`` of a layout with BitNet linears.

    Packed weights go to the class ``bitlinear``, which divides by the scale. It keeps them packed
    in memory and multiplies integers, and converters to other formats divide whatever the class
    says. Dense weights go to ``autobitlinear``, the only class that takes them.
    """
    return {
        "quant_method": "bitnet",
        "linear_class": "bitlinear" if layout == "packed" else "autobitlinear",
        "quantization_mode": "offline",
        "modules_to_not_convert": list(float_modules),
    }
