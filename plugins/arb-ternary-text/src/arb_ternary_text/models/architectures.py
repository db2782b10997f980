"""Architectures that other programs run too, as presets of the decoder's options.

| preset | feed-forward | sub-norms | norms of queries and keys | head |
|---|---|---|---|---|
| ``llama`` | swiglu | no | no | own or tied |
| ``qwen3`` | swiglu | no | yes | own or tied |
| ``arcee`` | relu2 | no | no | own or tied |
| ``bitnet`` | swiglu (reglu2 in BitNet b1.58 2B4T) | yes | no | tied |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

from attrs import field, frozen

if TYPE_CHECKING:
    from arb_ternary_text.models.config import DecoderConfig

Activation = Literal["relu2", "swiglu", "reglu2"]
Architecture = Literal["llama", "qwen3", "arcee", "bitnet"]


@frozen
class Preset:
    """The options that an architecture decides.

    Attributes:
        activation: non-linearity of the feed-forward layer.
        sub_norms: whether there are sub-norms.
        query_key_norm: whether queries and keys are normalised.
        tied: whether the head is the embedding; None = as the option says, by default not.
        variants: other activations that published models of the architecture have.
    """

    activation: Activation
    sub_norms: bool = False
    query_key_norm: bool = False
    tied: bool | None = None
    variants: frozenset[Activation] = field(factory=frozenset)


PRESETS: Final[Mapping[Architecture, Preset]] = MappingProxyType(
    {
        "llama": Preset("swiglu", variants=frozenset({"reglu2"})),
        "qwen3": Preset("swiglu", query_key_norm=True, variants=frozenset({"reglu2"})),
        "arcee": Preset("relu2"),
        "bitnet": Preset("swiglu", sub_norms=True, tied=True, variants=frozenset({"reglu2"})),
    }
)

#: The defaults of a decoder without ``architecture``.
DEFAULT: Final = Preset("relu2", sub_norms=True)


def preset_of(architecture: Architecture | None) -> Preset:
    """Return what ``architecture`` decides; for None the decoder's own defaults."""
    return DEFAULT if architecture is None else PRESETS[architecture]


def departures(config: DecoderConfig, architecture: Architecture) -> Iterator[tuple[str, str]]:
    """Yield each option that differs from ``architecture``, and the value it would need."""
    preset = PRESETS[architecture]
    kind = config.feed_forward_activation
    if kind != preset.activation and kind not in preset.variants:
        yield "activation", preset.activation
    if config.has_sub_norms != preset.sub_norms:
        yield "sub_norms", _yaml(preset.sub_norms)
    if config.has_query_key_norm != preset.query_key_norm:
        yield "query_key_norm", _yaml(preset.query_key_norm)
    if preset.tied is not None and config.tied != preset.tied:
        yield "tie_embeddings", _yaml(preset.tied)
    if architecture == "bitnet" and config.heads * config.value_features != config.width:
        yield "head_dim", "width / heads"
    if config.attention != "standard":
        yield "attention", "standard"
    if config.experts:
        yield "experts", "0"
    if config.sliding_window is not None:
        yield "sliding_window", "null"
    if not config.causal:
        yield "causal", "true"
    if config.embedding_scale_rule == "correlation":
        yield "embedding_scale_rule", "residual or frozen"


def nearest_preset(
    config: DecoderConfig, having: str | None = None
) -> tuple[Architecture | None, list[tuple[str, str]]]:
    """Return the architecture with the fewest :func:`departures`, and these.

    Args:
        config: the decoder's options.
        having: consider only architectures with this option as the decoder has it. The result is
            None if there is no such architecture.
    """
    found = {architecture: list(departures(config, architecture)) for architecture in PRESETS}
    if having is not None:
        found = {each: others for each, others in found.items() if having not in dict(others)}
    if not found:
        return None, []
    best = min(found, key=lambda architecture: len(found[architecture]))
    return best, found[best]


def _yaml(value: bool) -> str:
    return "true" if value else "false"
