"""The keys of a model's sizes and options in the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from arb_ternary.errors import ConfigError
from arb_ternary_interchange.gguf.tensor_types import (
    BF16,
    F16,
    F32,
    Q2_0,
    Q4_0,
    Q8_0,
    TQ1_0,
    TQ2_0,
    TensorType,
)
from arb_ternary_interchange.gguf.values import Kind, Scalar, Value
from arb_ternary_text.models.config import DecoderConfig

#: A key of this program: the option ``group_size`` of the decoder as text, which an import reads.
GROUP_SIZE: Final = "arb_ternary.group_size"

#: llama.cpp's numbers of files by the type of most of their weights (``llama_ftype``).
_FILE_TYPES: Final = {F32: 0, F16: 1, Q4_0: 2, Q8_0: 7, BF16: 32, TQ1_0: 36, TQ2_0: 37, Q2_0: 41}

#: Version of the quantised types.
_QUANTISATION: Final = 2

#: Architectures whose graphs in llama.cpp take factors of the planes of rotation.
_WITH_ROPE_FACTORS: Final = frozenset({"llama", "arcee"})


def model_keys(
    config: DecoderConfig, architecture: str, vocabulary_size: int, name: str
) -> dict[str, Value]:
    """Return all keys that describe the model, except for ``general.file_type``."""
    whole = {
        "context_length": config.max_length,
        "embedding_length": config.width,
        "block_count": config.layers,
        "feed_forward_length": config.hidden,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.key_heads,
        "attention.key_length": config.key_features,
        "attention.value_length": config.key_features,
        "rope.dimension_count": config.key_features,
        "vocab_size": vocabulary_size,
    }
    real = {
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rotary_base,
    }
    keys: dict[str, Value] = {
        "general.architecture": Scalar(Kind.STRING, architecture),
        "general.type": Scalar(Kind.STRING, "model"),
        "general.name": Scalar(Kind.STRING, name),
        "general.quantization_version": Scalar(Kind.UINT32, _QUANTISATION),
        **{f"{architecture}.{key}": Scalar(Kind.UINT32, value) for key, value in whole.items()},
        **{f"{architecture}.{key}": Scalar(Kind.FLOAT32, value) for key, value in real.items()},
    }
    if config.ternary_linears:
        keys[GROUP_SIZE] = Scalar(Kind.STRING, str(config.group_size))
    if config.rotary_scaling != 1:
        keys[f"{architecture}.rope.scaling.type"] = Scalar(Kind.STRING, "linear")
        keys[f"{architecture}.rope.scaling.factor"] = Scalar(Kind.FLOAT32, config.rotary_scaling)
    return keys


def check_options(config: DecoderConfig, architecture: str) -> None:
    """Raise ConfigError if llama.cpp's graph of ``architecture`` has no place for an option of the
    decoder.
    """
    missing = []
    if config.rotary_factors is not None and architecture not in _WITH_ROPE_FACTORS:
        missing.append("rotary_factors")
    if config.query_key_value_bias and architecture == "bitnet":
        missing.append("query_key_value_bias")
    for option in missing:
        raise ConfigError(
            f"model: {option} has no place in llama.cpp's graph of {architecture}",
            f"The nearest preset that has one is `architecture: llama`; or leave {option} out.",
        )


def file_type(weights: Mapping[TensorType, int]) -> Value:
    """Return ``general.file_type`` of a file with these numbers of weights by type."""
    return Scalar(Kind.UINT32, _FILE_TYPES[max(weights, key=lambda kind: weights[kind])])
