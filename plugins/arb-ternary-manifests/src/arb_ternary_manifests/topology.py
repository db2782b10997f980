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
    """A layer of a topology.

    Attributes:
        options: the layer's keys, an object of a class of ``layers``.
        path: its path in the manifest.
        norm: the norm before it, if it is a residual update ``x + layer(norm(x))``; None otherwise.
    """

    options: Any
    path: Path
    norm: Layer | None = None


#: Attention of a block, and its feed-forward layer; None if the topology has none.
Block = tuple[Layer, Layer | None]


@frozen
class Network:
    """The layers of a decoder; ``norm``, ``head`` and ``embedding`` are None if left out."""

    blocks: tuple[Block, ...]
    norm: Layer | None
    head: Layer | None
    embedding: Layer | None

    def layers(self) -> Iterator[Layer]:
        """Yield every layer and norm, those of repeated blocks again for each block."""
        inner = [layer for block in self.blocks for layer in block]
        for layer in (self.embedding, *inner, self.norm, self.head):
            if layer is not None:
                yield layer
                if layer.norm is not None:
                    yield layer.norm


def structure_section(cls: type[Any], section: Any, path: Path) -> Any:
    """Structure ``section`` as ``cls``.

    Raises:
        Faulty: it does not fit; paths begin with ``path``.
    """
    if not isinstance(section, Mapping):
        raise Faulty(Fault(path, "must be a mapping"))
    result, faults = structure_with_faults(cls, Document(dict(section)), manager().registry)
    if faults or result is None:
        placed = [evolve(fault, path=(*path, *fault.path)) for fault in faults]
        raise Faulty(*placed)
    return result


def read_network(topology: Any, path: Path) -> Network:
    """Read the decoder that ``topology``, found at ``path``, describes.

    Raises:
        Faulty: it is not a decoder; each fault has its path.
    """
    rest, faults = _read(topology, path)
    if faults:
        raise Faulty(*faults)
    embedding = _take(rest, EmbeddingLayer)
    blocks: list[Block] = []
    while (attention := _take(rest, AttentionLayer, residual=True)) is not None:
        blocks.append((attention, _take(rest, *FEED_FORWARD, residual=True)))
    norm = _take(rest, RMSNormLayer)
    head = _take(rest, LinearLayer)
    if rest:
        text = (
            f"the decoder has no {type(rest[0].options).__name__} here: blocks of attention and "
            f"feed-forward layer, each in a ResidualTopology behind an RMSNormLayer, then an "
            f"RMSNormLayer and a LinearLayer"
        )
        raise Faulty(Fault(rest[0].path, text))
    if not blocks:
        text = "has no block: a ResidualTopology of RMSNormLayer and AttentionLayer"
        raise Faulty(Fault(path, text))
    _check_equal_blocks(blocks)
    return Network(tuple(blocks), norm, head, embedding)


def _take(rest: list[Layer], *classes: type[Any], residual: bool = False) -> Layer | None:
    """Remove the first layer and return it if it is what is expected; otherwise return None."""
    if not rest or not isinstance(rest[0].options, classes):
        return None
    if residual != (rest[0].norm is not None):
        return None
    return rest.pop(0)


# --- reading


def _read(section: Any, path: Path) -> tuple[list[Layer], list[Fault]]:
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


def _read_topology(kind: str, keys: dict[str, Any], path: Path) -> tuple[list[Layer], list[Fault]]:
    repeat = keys.pop("repeat", 1) if kind == "NestedTopology" else 1
    layers = keys.pop("layers", None)
    faults = [Fault((*path, key), f"unknown key; a {kind} has none of this name") for key in keys]
    if type(repeat) is not int or not 1 <= repeat <= _MAX_BLOCKS:
        text = f"must be a whole number from 1 to {_MAX_BLOCKS}, not {repeat!r}"
        faults.append(Fault((*path, "repeat"), text))
        repeat = 1
    if not isinstance(layers, list | tuple) or not layers:
        return [], [*faults, Fault((*path, "layers"), "must be a list of layers")]

    parts: list[Layer] = []
    for index, layer in enumerate(layers):
        found, wrong = _read(layer, (*path, "layers", index))
        parts += found
        faults += wrong
    if kind == "ResidualTopology" and not faults:
        return _read_residual(parts, path)
    if len(parts) * repeat > 3 * _MAX_BLOCKS:
        return [], [*faults, Fault((*path, "repeat"), f"makes more than {_MAX_BLOCKS} blocks")]
    return parts * repeat, faults


def _read_residual(parts: list[Layer], path: Path) -> tuple[list[Layer], list[Fault]]:
    if len(parts) == 2 and parts[0].norm is parts[1].norm is None:
        norm, layer = parts
        updates = isinstance(layer.options, (AttentionLayer, *FEED_FORWARD))
        if isinstance(norm.options, RMSNormLayer) and updates:
            return [evolve(layer, norm=norm)], []
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
            raise Faulty(Fault(attention.path, text))
        _check_equal(attention, first_attention)
        if feed_forward is not None and first_feed_forward is not None:
            _check_equal(feed_forward, first_feed_forward)


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
