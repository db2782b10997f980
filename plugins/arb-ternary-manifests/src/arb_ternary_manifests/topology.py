"""A manifest's topology: its layers, and whether they are a decoder.

A decoder is ``embedding, blocks, norm, head``, and a block is two residual updates::

    StackedTopology
      NestedTopology (repeat)
        ResidualTopology: RMSNormLayer, AttentionLayer
        ResidualTopology: RMSNormLayer, SwiGLULayer (or GLULayer, MoELayer)
      RMSNormLayer
      LinearLayer

Embedding, feed-forward layers, the last norm and the head may be left out: the decoder has them
anyway, and what the topology does not say about them is not decided here. Anything else is a fault
at its path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from attrs import asdict, evolve, frozen

from arb_ternary.config.errors import Fault, Faulty, Path
from arb_ternary.config.structure import structure_with_faults
from arb_ternary.config.yaml_document import Document
from arb_ternary.errors import nearest
from arb_ternary.plugins.manager import manager
from arb_ternary_manifests.layers import (
    FEED_FORWARD,
    LAYERS,
    NEAREST,
    AttentionLayer,
    DropoutLayer,
    EmbeddingLayer,
    LinearLayer,
    RMSNormLayer,
)

_TOPOLOGIES: Final = (
    "StackedTopology",
    "SequentialTopology",
    "NestedTopology",
    "ResidualTopology",
)
#: More blocks than any decoder has: a bound against a mistyped number.
_MAX_BLOCKS: Final = 4096


@frozen
class Layer:
    """The options of a layer, and its path in the manifest."""

    options: Any
    path: Path


@frozen
class Residual:
    """``x + layer(norm(x))``."""

    norm: Layer
    layer: Layer


#: Attention of a block, and its feed-forward layer; None if the topology has none.
Block = tuple[Residual, Residual | None]
Part = Layer | Residual


@frozen
class Network:
    """The layers of a decoder; ``norm``, ``head`` and ``embedding`` are None if left out."""

    blocks: tuple[Block, ...]
    norm: Layer | None
    head: Layer | None
    embedding: Layer | None

    def layers(self) -> Iterator[Layer]:
        """Yield every layer in order, the layers of repeated blocks again for each block."""
        if self.embedding is not None:
            yield self.embedding
        for block in self.blocks:
            for residual in block:
                if residual is not None:
                    yield residual.norm
                    yield residual.layer
        for layer in (self.norm, self.head):
            if layer is not None:
                yield layer


def structure_section(cls: type[Any], section: Any, path: Path) -> Any:
    """Structure ``section`` as ``cls``.

    Raises:
        Faulty: it does not fit; paths begin with ``path``.
    """
    if not isinstance(section, Mapping):
        raise Faulty(Fault(path, "must be a mapping"))
    result, faults = structure_with_faults(cls, Document(dict(section)), manager().registry)
    if faults or result is None:
        raise Faulty(*(evolve(fault, path=(*path, *fault.path)) for fault in faults))
    return result


def read_network(topology: Any, path: Path) -> Network:
    """Read the decoder that ``topology``, found at ``path``, describes.

    Raises:
        Faulty: it is no decoder; each fault has its path.
    """
    parts, faults = _read(topology, path)
    if faults:
        raise Faulty(*faults)
    rest = _without_dropout(parts)
    embedding = _take_layer(rest, EmbeddingLayer)
    blocks: list[Block] = []
    while (attention := _take_residual(rest, (AttentionLayer,))) is not None:
        blocks.append((attention, _take_residual(rest, FEED_FORWARD)))
    norm = _take_layer(rest, RMSNormLayer)
    head = _take_layer(rest, LinearLayer)
    if rest:
        raise Faulty(_out_of_place(rest[0]))
    if not blocks:
        text = "has no block: a ResidualTopology of RMSNormLayer and AttentionLayer"
        raise Faulty(Fault(path, text))
    _check_equal_blocks(blocks)
    return Network(tuple(blocks), norm, head, embedding)


def _without_dropout(parts: list[Part]) -> list[Part]:
    """Leave out dropout layers, which drop nothing."""
    return [
        part
        for part in parts
        if isinstance(part, Residual) or not isinstance(part.options, DropoutLayer)
    ]


def _take_layer(rest: list[Part], cls: type[Any]) -> Layer | None:
    """Remove the first part and return it if it is a layer of ``cls``."""
    first = rest[0] if rest else None
    if isinstance(first, Layer) and isinstance(first.options, cls):
        del rest[0]
        return first
    return None


def _take_residual(rest: list[Part], classes: tuple[type[Any], ...]) -> Residual | None:
    """Remove the first part and return it if it is a residual update by a layer of ``classes``."""
    first = rest[0] if rest else None
    if isinstance(first, Residual) and isinstance(first.layer.options, classes):
        del rest[0]
        return first
    return None


def _out_of_place(part: Part) -> Fault:
    layer = part if isinstance(part, Layer) else part.layer
    return Fault(
        layer.path,
        f"the decoder has no {type(layer.options).__name__} here: blocks of attention and "
        f"feed-forward layer, each in a ResidualTopology behind an RMSNormLayer, then an "
        f"RMSNormLayer and a LinearLayer",
    )


# --- reading


def _read(section: Any, path: Path) -> tuple[list[Part], list[Fault]]:
    """Return the layers and residual updates of a topology or a layer, in order, and its faults."""
    kind = section.get("type") if isinstance(section, Mapping) else None
    if not isinstance(kind, str):
        return [], [Fault(path, "must be a layer or a topology, with its 'type'")]
    keys = {key: value for key, value in section.items() if key != "type"}
    if kind in _TOPOLOGIES:
        return _read_topology(kind, keys, path)
    if kind not in LAYERS:
        return [], [_unknown_type(kind, (*path, "type"))]
    try:
        return [Layer(structure_section(LAYERS[kind], keys, path), path)], []
    except Faulty as error:
        return [], list(error.faults)


def _read_topology(kind: str, keys: dict[str, Any], path: Path) -> tuple[list[Part], list[Fault]]:
    repeat = keys.pop("repeat", 1) if kind == "NestedTopology" else 1
    layers = keys.pop("layers", None)
    faults = [Fault((*path, key), f"unknown key; a {kind} has none of this name") for key in keys]
    if type(repeat) is not int or not 1 <= repeat <= _MAX_BLOCKS:
        text = f"must be a whole number from 1 to {_MAX_BLOCKS}, not {repeat!r}"
        faults.append(Fault((*path, "repeat"), text))
        repeat = 1
    if not isinstance(layers, list | tuple) or not layers:
        return [], [*faults, Fault((*path, "layers"), "must be a list of layers")]

    parts: list[Part] = []
    for index, layer in enumerate(layers):
        found, wrong = _read(layer, (*path, "layers", index))
        parts += found
        faults += wrong
    if kind == "ResidualTopology" and not faults:
        return _read_residual(parts, path)
    if len(parts) * repeat > 3 * _MAX_BLOCKS:
        return [], [*faults, Fault((*path, "repeat"), f"makes more than {_MAX_BLOCKS} blocks")]
    return parts * repeat, faults


def _read_residual(parts: list[Part], path: Path) -> tuple[list[Part], list[Fault]]:
    match _without_dropout(parts):
        case [Layer() as norm, Layer() as layer] if isinstance(
            norm.options, RMSNormLayer
        ) and isinstance(layer.options, (AttentionLayer, *FEED_FORWARD)):
            return [Residual(norm, layer)], []
    text = "must be an RMSNormLayer, then an AttentionLayer or a feed-forward layer (SwiGLULayer)"
    return [], [Fault((*path, "layers"), text)]


def _unknown_type(kind: str, path: Path) -> Fault:
    close = NEAREST.get(kind) or nearest(kind, [*LAYERS, *_TOPOLOGIES])
    text = (
        f"the decoder has no {kind}; it is made of {', '.join(_TOPOLOGIES)} and of "
        f"{', '.join(LAYERS)}"
    )
    return Fault(path, text, f"The nearest type is {close}." if close else "")


def _check_equal_blocks(blocks: list[Block]) -> None:
    """Check that every block is like the first: the decoder has one set of options for all."""
    first_attention, first_feed_forward = blocks[0]
    for attention, feed_forward in blocks[1:]:
        if (feed_forward is None) != (first_feed_forward is None):
            text = "one block has a feed-forward layer and another has none"
            raise Faulty(Fault(attention.layer.path, text))
        _check_equal(attention.layer, first_attention.layer)
        if feed_forward is not None and first_feed_forward is not None:
            _check_equal(feed_forward.layer, first_feed_forward.layer)


def _check_equal(layer: Layer, first: Layer) -> None:
    if layer.options == first.options:
        return
    own = type(layer.options).__name__
    other = type(first.options).__name__
    if own != other:
        text = f"a {own}, and the first block has a {other}: all blocks of the decoder are alike"
        raise Faulty(Fault(layer.path, text))
    for key, value in asdict(layer.options).items():
        before = getattr(first.options, key)
        if value != before:
            text = (
                f"is {value}, and {before} in the first block: all blocks of the decoder are alike"
            )
            raise Faulty(Fault((*layer.path, key), text))
