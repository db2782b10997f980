"""What a ``config.json`` says of a model, checked value by value and said as options of the
decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from attrs import frozen

from arb_ternary_interchange.huggingface.json_file import Values, read_object
from arb_ternary_interchange.huggingface.quantization import Quantization, read_quantization
from arb_ternary_interchange.huggingface.rotary_scaling import read_rotary

# : Bounds against numbers that no model has; what is allocated is bounded by the files' sizes
# besides.
MAX_LAYERS: Final = 4096
_MAX_FEATURES: Final = 1 << 24
_MAX_LENGTH: Final = 1 << 30


@frozen
class _Family:
    """How a ``model_type`` differs from Llama.

    Attributes:
        architecture: of the decoder.
        gated: the feed-forward layer has a gate.
        bias: default of ``attention_bias``; None = the family has biases of q, k and v and no such
            key.
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


_FAMILIES: Final[Mapping[str, _Family]] = MappingProxyType(
    {
        "llama": _Family(),
        "mistral": _Family(window=4096),
        "qwen2": _Family(bias=None),
        "qwen3": _Family("qwen3"),
        "arcee": _Family("arcee", gated=False, hidden_act="relu2", norm_eps=1e-5),
        "bitnet": _Family("bitnet", hidden_act="relu2", rope_theta=500000.0, norm_eps=1e-5),
    }
)


@frozen
class ModelConfig:
    """A model as its ``config.json`` describes it.

    Attributes:
        path: the file.
        model_type: the family, in transformers' words.
        architecture: of the decoder that computes the same.
        options: of that decoder.
        vocabulary_size: rows of the embedding.
        biases: q, k and v have biases; of ``attention_bias``, the output projection too.
        output_bias: the output projection has one too.
        hidden_biases: the linears of the feed-forward layers have biases.
        quantization: how linears are packed; None = they are not.
        notes: what is left out, a sentence each.
        found: the whole file.
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
    found: Mapping[str, Any]

    @property
    def tied(self) -> bool:
        """The head is the embedding."""
        return bool(self.options["tie_embeddings"])


def read_model_config(path: Path) -> ModelConfig:
    """Read a ``config.json``.

    Raises:
        DataError: a value is missing, of another type, out of its range, or asks for what the
            decoder does not compute; file and key come first.
    """
    found = read_object(path)
    config = Values(str(path), found)
    model_type = config.word(
        "model_type",
        tuple(_FAMILIES),
        hint="These architectures are read; of others no code is run, so their weights have no "
        "meaning here.",
    )
    family = _FAMILIES[model_type]
    width = config.integer("hidden_size", 1, _MAX_FEATURES)
    heads = config.integer("num_attention_heads", 1, _MAX_FEATURES)
    if "head_dim" not in config and width % heads:
        raise config.wrong(
            "num_attention_heads",
            f"a divisor of 'hidden_size', {width}, where there is no 'head_dim'",
        )
    head_dim = config.integer("head_dim", 2, _MAX_FEATURES, width // heads)
    if head_dim % 2:
        raise config.wrong("head_dim", "even, for the rotary embedding")
    kv_heads = config.integer("num_key_value_heads", 1, heads, heads)
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of 'num_attention_heads', {heads}")
    tied = config.boolean("tie_word_embeddings", False)
    act = config.word(
        "hidden_act", ("silu", "swish", "relu2") if family.gated else ("relu2",), family.hidden_act
    )
    activation = "relu2" if not family.gated else "reglu2" if act == "relu2" else "swiglu"
    quantization = read_quantization(config.within("quantization_config"))
    length = config.integer("max_position_embeddings", 1, _MAX_LENGTH, 2048)
    window = _window(config, model_type, family)
    biases = config.boolean("attention_bias", False) if family.bias is not None else True
    notes = []
    if window is not None and window < length:
        notes.append(
            f"The sliding window of {window} tokens is left out: max_length is {window}, within "
            f"which it hides none."
        )
        length = window
    if "auto_map" in config:
        notes.append("The folder's own code ('auto_map') is not used: the decoder's is.")
    options: dict[str, Any] = {
        "width": width,
        "layers": config.integer("num_hidden_layers", 1, MAX_LAYERS),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "feed_forward": config.integer("intermediate_size", 1, _MAX_FEATURES),
        "activation": activation,
        "max_length": length,
        "norm_eps": config.number("rms_norm_eps", 1e-12, 1.0, family.norm_eps),
        "tie_embeddings": tied,
        "activations": "float" if quantization is None else "int8",
        **read_rotary(config, head_dim, family.rope_theta),
    }
    if biases:
        options["query_key_value_bias"] = True
    return ModelConfig(
        path=path,
        model_type=model_type,
        architecture=family.architecture,
        options=options,
        vocabulary_size=config.integer("vocab_size", 1, _MAX_FEATURES),
        biases=biases,
        output_bias=biases and family.bias is not None,
        hidden_biases=config.boolean("mlp_bias", False)
        if model_type in {"llama", "arcee"}
        else False,
        quantization=quantization,
        notes=tuple(notes),
        found=found,
    )


def _window(config: Values, model_type: str, family: _Family) -> int | None:
    """Positions that a position sees; None = all before it."""
    if model_type.startswith("qwen"):
        used = config.boolean("use_sliding_window", False)
        return config.integer("sliding_window", 1, _MAX_LENGTH, 4096) if used else None
    if model_type != "mistral" or (
        "sliding_window" in config.found and config.found["sliding_window"] is None
    ):
        return None
    return config.integer("sliding_window", 1, _MAX_LENGTH, family.window)
