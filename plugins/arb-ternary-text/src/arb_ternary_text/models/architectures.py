"""Architectures that other programs compute too, as presets of the decoder's options.

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
    """What an architecture decides.

    Attributes:
        activation: of the feed-forward layer.
        variants: other activations that the architecture has by its published models.
        tied: the head is the embedding; None = as the option says, by default not.
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

#: What a decoder without ``architecture`` is where its options say nothing.
DEFAULT: Final = Preset("relu2", sub_norms=True)


def preset_of(architecture: Architecture | None) -> Preset:
    """What ``architecture`` decides; None = the decoder's own defaults."""
    return DEFAULT if architecture is None else PRESETS[architecture]


def departures(config: DecoderConfig, architecture: Architecture) -> Iterator[tuple[str, str]]:
    """Each option in which a decoder is not of ``architecture``, and what it would have to be."""
    preset = PRESETS[architecture]
    kind = config.feed_forward_activation
    if kind != preset.activation and kind not in preset.variants:
        yield "activation", preset.activation
    if config.has_sub_norms != preset.sub_norms:
        yield "sub_norms", _plain(preset.sub_norms)
    if config.has_query_key_norm != preset.query_key_norm:
        yield "query_key_norm", _plain(preset.query_key_norm)
    if preset.tied is not None and config.tied != preset.tied:
        yield "tie_embeddings", _plain(preset.tied)
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
    """The architecture from which a decoder departs in the fewest options, and :func:`departures`
    from it.

    With ``having``, of those only that have this option as the decoder has it; None where no
    architecture has.
    """
    found = {architecture: list(departures(config, architecture)) for architecture in PRESETS}
    if having is not None:
        found = {each: wrong for each, wrong in found.items() if having not in dict(wrong)}
    if not found:
        return None, []
    best = min(found, key=lambda architecture: len(found[architecture]))
    return best, found[best]


def _plain(value: bool) -> str:
    return "true" if value else "false"
