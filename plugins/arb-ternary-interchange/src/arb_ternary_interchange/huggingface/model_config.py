"""A ``config.json``, checked value by value and translated into options of the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from arb_ternary_interchange.huggingface.json_file import Values, read_object
from arb_ternary_interchange.huggingface.known import (
    HARMLESS_OF_CONFIG,
    NEUTRAL_OF_CONFIG,
    note_of,
    unknown_keys,
)
from arb_ternary_interchange.huggingface.rotary_scaling import read_rotary

# Bounds against numbers that no model has; allocations are also limited by the sizes of the files.
_MAX_LAYERS: Final = 4096
_MAX_FEATURES: Final = 1 << 24
_MAX_LENGTH: Final = 1 << 30


@frozen
class _Family:
    """A ``model_type`` and its differences from Llama.

    Attributes:
        architecture: the decoder's architecture.
        gated: whether the feed-forward layer has a gate.
        hidden_act: default of ``hidden_act``.
        bias: default of ``attention_bias``; None = the family has biases of queries, keys and
            values and no such key.
        window: default of ``sliding_window``.
        rope_theta: default of ``rope_theta``.
        norm_eps: default of ``rms_norm_eps``.
    """

    architecture: str = "llama"
    gated: bool = True
    hidden_act: str = "silu"
    bias: bool | None = False
    window: int | None = None
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6


_FAMILIES: Final[Mapping[str, _Family]] = {
    "llama": _Family(),
    "mistral": _Family(window=4096),
    "qwen2": _Family(bias=None),
    "qwen3": _Family("qwen3"),
    "arcee": _Family("arcee", gated=False, hidden_act="relu2", norm_eps=1e-5),
    "bitnet": _Family("bitnet", hidden_act="relu2", rope_theta=500000.0, norm_eps=1e-5),
}


@frozen
class Quantization:
    """The BitNet quantisation of transformers, ``quantization_config``.

    Attributes:
        divides: whether outputs are divided by ``weight_scale`` (the class ``bitlinear``) or
            multiplied by it (``autobitlinear``).
        online: whether weights are float and made ternary in every forward pass: ``round(w / mean
            |w|)`` times ``mean |w|``.
        float_modules: modules that stay float, by the names that transformers compares; None = its
            default, the head.
    """

    divides: bool
    online: bool
    float_modules: tuple[str, ...] | None

    @property
    def description(self) -> str:
        """The scales in words, for ``arb inspect``."""
        if self.online:
            return "mean |w| of each matrix, in every pass (autobitlinear, online)"
        if self.divides:
            return "one per matrix, divided by (bitlinear)"
        return "one per matrix, multiplied with (autobitlinear)"


@frozen
class ModelConfig:
    """A model as its ``config.json`` describes it.

    Attributes:
        path: the file.
        model_type: the family, as transformers calls it.
        architecture: architecture of the decoder that computes the same.
        options: options of that decoder.
        vocabulary_size: rows of the embedding.
        biases: whether queries, keys and values have biases.
        output_bias: whether the output projection has one too.
        hidden_biases: whether the linears of the feed-forward layers have biases.
        quantization: how linears are quantised; None = they are not.
        notes: what is left out, one sentence each.
    """

    path: Path
    model_type: str
    architecture: str
    options: Mapping[str, Any]
    vocabulary_size: int
    biases: bool
    output_bias: bool
    hidden_biases: bool
    quantization: Quantization | None
    notes: tuple[str, ...]


def read_model_config(path: Path) -> ModelConfig:
    """Read a ``config.json``.

    Raises:
        DataError: a value is missing, of another type, out of its range, or asks for what the
            decoder does not compute; file and key come first.
    """
    config = Values(str(path), read_object(path))
    model_type = config.word(
        "model_type",
        tuple(_FAMILIES),
        hint="These architectures are read; of others no code is run, so their weights have no "
        "meaning here.",
    )
    family = _FAMILIES[model_type]
    quantization = _read_quantization(config.within("quantization_config"))
    notes = []
    length = config.integer("max_position_embeddings", 1, _MAX_LENGTH, 2048)
    window = _window(config, model_type, family)
    if window is not None and window < length:
        notes.append(
            f"The sliding window of {window} tokens is left out: max_length is {window}, within "
            f"which it hides none."
        )
        length = window
    if "auto_map" in config:
        notes.append("The folder's own code ('auto_map') is not used: the decoder's is.")

    sizes = _sizes(config)
    options: dict[str, Any] = {
        **sizes,
        "activation": _activation(config, family),
        "max_length": length,
        "norm_eps": config.number("rms_norm_eps", 1e-12, 1.0, family.norm_eps),
        "tie_embeddings": config.boolean("tie_word_embeddings", False),
        "activations": "float" if quantization is None else "int8",
        **read_rotary(config, sizes["head_dim"], family.rope_theta),
    }
    # Mistral's class has neither of the two keys.
    biases = family.bias is None
    if family.bias is not None and model_type != "mistral":
        biases = config.boolean("attention_bias", family.bias)
    if biases:
        options["query_key_value_bias"] = True
    has_mlp_bias_key = model_type in {"llama", "arcee"}
    vocabulary_size = config.integer("vocab_size", 1, _MAX_FEATURES)
    hidden_biases = has_mlp_bias_key and config.boolean("mlp_bias", False)
    unknown = unknown_keys(config.unused(), HARMLESS_OF_CONFIG, NEUTRAL_OF_CONFIG)
    notes += note_of(f"Keys of config.json that a {model_type} does not use here", unknown)
    return ModelConfig(
        path=path,
        model_type=model_type,
        architecture=family.architecture,
        options=options,
        vocabulary_size=vocabulary_size,
        biases=biases,
        output_bias=biases and family.bias is not None,
        hidden_biases=hidden_biases,
        quantization=quantization,
        notes=tuple(notes),
    )


def _sizes(config: Values) -> dict[str, int]:
    width = config.integer("hidden_size", 1, _MAX_FEATURES)
    heads = config.integer("num_attention_heads", 1, _MAX_FEATURES)
    if "head_dim" not in config and width % heads:
        raise config.wrong(
            "num_attention_heads",
            f"a divisor of 'hidden_size', {width}, if there is no 'head_dim'",
        )
    head_dim = config.integer("head_dim", 2, _MAX_FEATURES, width // heads)
    if head_dim % 2:
        raise config.wrong("head_dim", "even, for the rotary embedding")
    kv_heads = config.integer("num_key_value_heads", 1, heads, heads)
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of 'num_attention_heads', {heads}")
    return {
        "width": width,
        "layers": config.integer("num_hidden_layers", 1, _MAX_LAYERS),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "feed_forward": config.integer("intermediate_size", 1, _MAX_FEATURES),
    }


def _activation(config: Values, family: _Family) -> str:
    known = ("silu", "swish", "relu2") if family.gated else ("relu2",)
    word = config.word("hidden_act", known, family.hidden_act)
    if not family.gated:
        return "relu2"
    return "reglu2" if word == "relu2" else "swiglu"


def _window(config: Values, model_type: str, family: _Family) -> int | None:
    """Return the positions that a position attends to; None = all before it."""
    kinds = config.words("layer_types") or ()
    if not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise config.wrong("layer_types", "full_attention or sliding_attention in every layer")
    if model_type.startswith("qwen"):
        if not config.boolean("use_sliding_window", False):
            return None
        return config.integer("sliding_window", 1, _MAX_LENGTH, 4096)
    is_null = "sliding_window" in config.found and config.found["sliding_window"] is None
    if model_type != "mistral" or is_null:
        return None
    return config.integer("sliding_window", 1, _MAX_LENGTH, family.window)


def _read_quantization(config: Values | None) -> Quantization | None:
    """Read the ``quantization_config``; None if there is none.

    Raises:
        DataError: it is another than BitNet's, or has a norm in every linear.
    """
    if config is None:
        return None
    config.word("quant_method", ("bitnet",), hint="Only BitNet's packed linears are ternary.")
    linear_class = config.word("linear_class", ("bitlinear", "autobitlinear"), "bitlinear")
    divides = linear_class == "bitlinear"
    mode = config.word("quantization_mode", ("offline", "online"), "offline")
    if config.boolean("use_rms_norm", False):
        raise config.wrong("use_rms_norm", "false: the decoder's linears have no norm of their own")
    # A bitlinear has packed weights in either mode.
    online = mode == "online" and not divides
    return Quantization(divides, online, config.words("modules_to_not_convert"))
