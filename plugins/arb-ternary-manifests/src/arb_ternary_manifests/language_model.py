"""The system ``language_model`` of manifests: from its ``config`` to a decoder's section."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

from attrs import evolve, frozen

from arb_ternary.config.choice import ModelChoice
from arb_ternary.config.errors import Fault, Faulty, Path
from arb_ternary.config.options import option, positive
from arb_ternary_manifests.layers import AttentionLayer, LinearLayer, MoELayer, RMSNormLayer
from arb_ternary_manifests.topology import Network, read_network, structure_section

_MODEL: Final = "model"
_TOPOLOGY: Final = (_MODEL, "topology")
#: Options of decoupled attention by the keys of a layer.
_DECOUPLED_FLAGS: Final = {
    "tie_qk": "tie_query_key",
    "null_attn": "null_key_value",
    "decoupled_gate": "attention_gate",
}


@frozen(kw_only=True)
class _Embedder:
    type: Literal["token"] = option("token", "what is embedded")
    d_model: int = option(help="features of the residual stream", validator=positive)
    vocab_size: int | None = option(None, "number of token ids")


@frozen(kw_only=True)
class _Transformer:
    type: Literal["TransformerModel"] = option(help="the only model that has a topology")
    topology: Mapping[str, Any] = option(help="its layers")
    embedder: _Embedder | None = option(None, "its embedding")
    tied_embeddings: bool | None = option(
        None, "whether the head is the embedding; null = as the decoder's options say"
    )


@frozen(kw_only=True)
class _Config:
    model: Mapping[str, Any] = option(
        help="a TransformerModel with its topology, or options of the decoder"
    )
    decoder: Mapping[str, Any] = option(
        factory=dict, help="options of the decoder that a topology cannot express"
    )


@frozen(kw_only=True)
class _Section:
    model: ModelChoice = option(help="the network")


def model_choice(section: Mapping[str, Any]) -> ModelChoice:
    """Return the model that a ``model:`` section names.

    Raises:
        Faulty: the section is not a model; paths begin with ``model``.
    """
    choice: _Section = structure_section(_Section, {_MODEL: dict(section)}, ())
    return choice.model


def decoder_section(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``model:`` section of a config of ``arb train``.

    ``config`` is one of

    * options of the decoder, also under ``model``,
    * ``model: {type: TransformerModel, topology: {...}}``, see
      :mod:`~arb_ternary_manifests.topology`, with further options of the decoder under ``decoder``,
    * nothing at all.

    Embedding, head and norms are float (norms only if ``learned_norms`` does not decide about their
    gains) unless ``float_parts`` says otherwise: rate, decay and clipping of a manifest's
    ``train:`` are those of float parameters.

    A decoder from a topology has no sub-norms and has gated feed-forward layers. What the topology
    leaves out (``feed_forward``, ``norm_eps``, ``rotary_base``, ``max_length`` and others) is left
    out of the result too: a student of a teacher takes it from the teacher. ``rotary_dim`` of
    decoupled attention is the size of a head, so that a teacher's frequencies can be kept.

    Raises:
        Faulty: ``config`` is not a decoder; paths are those inside ``config``.
    """
    if _MODEL not in config:
        return _checked(_with_float_parts(config), lambda path: path)
    read = structure_section(_Config, config, ())
    if "type" not in read.model and "topology" not in read.model:
        if read.decoder:
            text = "has no effect together with options under 'model'; write all of them there"
            raise Faulty(Fault(("decoder",), text))
        return _checked(_with_float_parts(read.model), lambda path: (_MODEL, *path))

    transformer = structure_section(_Transformer, read.model, (_MODEL,))
    network = read_network(transformer.topology, _TOPOLOGY)
    options = dict(_options(network, transformer))
    for key in options.keys() & read.decoder.keys():
        raise Faulty(Fault(("decoder", key), "the topology says it already; leave it out here"))

    def source(path: Path) -> Path:
        return ("decoder", *path) if path and path[0] in read.decoder else _TOPOLOGY

    return _checked(_with_float_parts({**options, **read.decoder}), source)


def _with_float_parts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of a decoder whose embedding, head and norms are float by default."""
    section = {"name": "decoder", **options}
    if section["name"] != "decoder" or "float_parts" in options:
        return section
    parts = ["embedding", "head"]
    if "learned_norms" not in options:
        parts.append("norms")
    return {**section, "float_parts": parts}


def _checked(section: dict[str, Any], source: Callable[[Path], Path]) -> dict[str, Any]:
    """Return ``section`` if it is the section of a model.

    Raises:
        Faulty: it is not; ``source`` gives the path of each fault.
    """
    try:
        model_choice(section)
    except Faulty as error:
        placed = [evolve(fault, path=source(fault.path[1:])) for fault in error.faults]
        raise Faulty(*placed) from error
    return section


# --- from layers to options


def _options(network: Network, transformer: _Transformer) -> Iterator[tuple[str, Any]]:
    first, feed_forward = network.blocks[0]
    attention: AttentionLayer = first.options
    _check_widths(network, transformer, attention.d_model)
    _check_vocabulary(network, transformer)
    yield "width", attention.d_model
    yield "layers", len(network.blocks)
    yield from _attention_options(attention, first.path)
    yield "sub_norms", False
    yield "activation", "swiglu"
    if feed_forward is not None:
        layer = feed_forward.options
        yield "feed_forward", layer.d_ff
        if isinstance(layer, MoELayer):
            yield "experts", layer.num_experts
            yield "experts_per_token", layer.top_k
    yield from _norm_options(network)
    if transformer.tied_embeddings is not None:
        if transformer.tied_embeddings and network.head is not None:
            text = "a tied head is the embedding: leave out the LinearLayer"
            raise Faulty(Fault((_MODEL, "tied_embeddings"), text))
        yield "tie_embeddings", transformer.tied_embeddings


def _norm_options(network: Network) -> Iterator[tuple[str, Any]]:
    norms = [each for each in network.layers() if isinstance(each.options, RMSNormLayer)]
    for key, name in (("eps", "norm_eps"), ("elementwise_affine", "learned_norms")):
        value = getattr(norms[0].options, key)
        for norm in norms:
            if getattr(norm.options, key) != value:
                text = f"must be {value}, as in the first norm: the decoder has one"
                raise Faulty(Fault((*norm.path, key), text))
        if value is not None:
            yield name, value


def _attention_options(layer: AttentionLayer, path: Path) -> Iterator[tuple[str, Any]]:
    heads = layer.n_heads
    kv_heads = layer.n_kv_heads
    yield "heads", heads
    if layer.mode == "gqa" and kv_heads is None:
        raise Faulty(Fault(path, "mode gqa needs 'n_kv_heads', the key and value heads"))
    if layer.mode == "standard" and kv_heads not in (None, heads):
        text = f"must be n_heads, {heads}, in mode standard; for {kv_heads} use mode gqa"
        raise Faulty(Fault((*path, "n_kv_heads"), text))
    if kv_heads is not None:
        yield "kv_heads", kv_heads
    if layer.attn_dim is not None and layer.head_dim is not None:
        raise Faulty(Fault((*path, "head_dim"), "says what 'attn_dim' says; give one of them"))
    if layer.attn_dim is not None:
        yield "head_dim", _per_head(layer, "attn_dim", path, multiple=1)
    elif layer.head_dim is not None:
        yield "head_dim", layer.head_dim
    yield from _decoupled_options(layer, path)
    if layer.rope_base is not None:
        yield "rotary_base", layer.rope_base
    yield "causal", layer.is_causal
    if layer.local_window is not None:
        yield "sliding_window", layer.local_window


def _decoupled_options(layer: AttentionLayer, path: Path) -> Iterator[tuple[str, Any]]:
    if layer.mode != "decoupled":
        for key in ("sem_dim", "geo_dim", *_DECOUPLED_FLAGS):
            if getattr(layer, key):
                text = f"has no effect in mode {layer.mode}; use mode decoupled"
                raise Faulty(Fault((*path, key), text))
        return
    yield "attention", "decoupled"
    yield "sem_dim", _per_head(layer, "sem_dim", path, multiple=1)
    # Rotary positions rotate pairs of features.
    geo_dim = _per_head(layer, "geo_dim", path, multiple=2)
    yield "geo_dim", geo_dim
    head_dim = layer.head_dim or (layer.attn_dim or layer.d_model) // layer.n_heads
    if head_dim % 2 == 0 and head_dim >= geo_dim:
        yield "rotary_dim", head_dim
    for key, name in _DECOUPLED_FLAGS.items():
        if getattr(layer, key):
            yield name, True


def _per_head(layer: AttentionLayer, key: str, path: Path, *, multiple: int) -> int:
    """Return a number of features, given for all heads together, for one head."""
    value = getattr(layer, key)
    if value is None:
        raise Faulty(Fault(path, f"mode decoupled needs '{key}', of all heads together"))
    unit = multiple * layer.n_heads
    if value % unit:
        low = value // unit * unit
        near = " or ".join(str(size) for size in (low, low + unit) if size)
        number = "an even number" if multiple == 2 else "a whole number"
        text = (
            f"counts all heads together and must be {number} for each of {layer.n_heads}: "
            f"{near}, not {value}"
        )
        raise Faulty(Fault((*path, key), text))
    return int(value) // layer.n_heads


def _check_widths(network: Network, transformer: _Transformer, width: int) -> None:
    found: list[tuple[Path, int]] = []
    for layer in dict.fromkeys(network.layers()):
        key = "d_in" if isinstance(layer.options, LinearLayer) else "d_model"
        found.append(((*layer.path, key), getattr(layer.options, key)))
    if transformer.embedder is not None:
        found.append(((_MODEL, "embedder", "d_model"), transformer.embedder.d_model))
    text = f"must be {width}, as in the first AttentionLayer: the residual stream has one width"
    faults = [Fault(path, text) for path, value in found if value != width]
    if faults:
        raise Faulty(*faults)


def _check_vocabulary(network: Network, transformer: _Transformer) -> None:
    """Check that written numbers of token ids agree; the decoder takes the number from the data."""
    sizes: list[tuple[Path, int | None]] = []
    if transformer.embedder is not None:
        sizes.append(((_MODEL, "embedder", "vocab_size"), transformer.embedder.vocab_size))
    if network.embedding is not None:
        path = network.embedding.path
        if transformer.embedder is not None:
            text = "the model has an embedder already; leave one of the two out"
            raise Faulty(Fault(path, text))
        sizes.append(((*path, "vocab_size"), network.embedding.options.vocab_size))
    if network.head is not None:
        sizes.append(((*network.head.path, "d_out"), network.head.options.d_out))
    written = [(path, size) for path, size in sizes if size is not None]
    for path, size in written[1:]:
        if size != written[0][1]:
            raise Faulty(Fault(path, f"is {size} token ids, and the embedding has {written[0][1]}"))
