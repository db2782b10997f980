"""A manifest's topology as a decoder: what is written, layer by layer, and whether it is one.

A decoder is ``embedding, blocks, norm, head``, and a block is two residual updates::

    StackedTopology
      NestedTopology (repeat)
        ResidualTopology: RMSNormLayer, AttentionLayer
        ResidualTopology: RMSNormLayer, SwiGLULayer (or GLULayer, MoELayer)
      RMSNormLayer
      LinearLayer

Embedding, feed-forward layers, the last norm and the head may be left out: the decoder has them
anyway, and what the topology does not say of them is not decided here. Everything else that is not
this is refused where it stands.
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
from arb_ternary_text.manifest.layers import (
    FEED_FORWARD,
    LAYERS,
    NEAREST,
    AttentionLayer,
    DropoutLayer,
    EmbeddingLayer,
    LinearLayer,
    RMSNormLayer,
)

_SEQUENCES: Final = ("StackedTopology", "SequentialTopology")
_TOPOLOGIES: Final = (*_SEQUENCES, "NestedTopology", "ResidualTopology")
#: More blocks than any decoder has; a bound against a mistyped number.
_MOST_BLOCKS: Final = 4096


@frozen
class Written:
    """A layer, and where it is written."""

    layer: Any
    path: Path


@frozen
class Residual:
    """``x + layer(norm(x))``."""

    norm: Written
    layer: Written


@frozen
class Network:
    """What is written of a decoder.

    Attributes:
        blocks: attention and feed-forward layer of each block; the latter None where none is
            written.
        norm, head, embedding: None where not written.
    """

    blocks: tuple[tuple[Residual, Residual | None], ...]
    norm: Written | None
    head: Written | None
    embedding: Written | None

    def layers(self) -> Iterator[Written]:
        """Every layer, in their order; those of equal blocks again and again."""
        residuals = (
            residual for block in self.blocks for residual in block if residual is not None
        )
        inner = (each for residual in residuals for each in (residual.norm, residual.layer))
        yield from (
            each for each in (self.embedding, *inner, self.norm, self.head) if each is not None
        )


def keys_of(cls: type[Any], section: Any, path: Path) -> Any:
    """``section`` as ``cls``; Faulty with paths that begin with ``path``."""
    if not isinstance(section, Mapping):
        raise Faulty(Fault(path, "must be a mapping"))
    result, faults = structure_with_faults(cls, Document(dict(section)), manager().registry)
    if faults or result is None:
        raise Faulty(*(evolve(fault, path=(*path, *fault.path)) for fault in faults))
    return result


def read_network(topology: Any, path: Path) -> Network:
    """The decoder that ``topology`` writes down.

    Args:
        topology: a mapping with ``type`` and ``layers``.
        path: where it stands.

    Raises:
        Faulty: it is no decoder; each fault has the path of what is in the way.
    """
    parts, faults = _read(topology, path)
    if faults:
        raise Faulty(*faults)
    rest = [
        part
        for part in parts
        if not (isinstance(part, Written) and isinstance(part.layer, DropoutLayer))
    ]
    embedding = _first(rest, EmbeddingLayer)
    blocks: list[tuple[Residual, Residual | None]] = []
    while (attention := _first_update(rest, (AttentionLayer,))) is not None:
        blocks.append((attention, _first_update(rest, FEED_FORWARD)))
    norm = _first(rest, RMSNormLayer)
    head = _first(rest, LinearLayer)
    if rest:
        raise Faulty(_out_of_place(rest[0]))
    if not blocks:
        raise Faulty(
            Fault(path, "has no block: a ResidualTopology of RMSNormLayer and AttentionLayer")
        )
    _check_alike(blocks)
    return Network(tuple(blocks), norm, head, embedding)


def _first(rest: list[Written | Residual], kind: type[Any]) -> Written | None:
    """The first part, taken out, where it is a layer of ``kind``."""
    found = rest[0] if rest else None
    if isinstance(found, Written) and isinstance(found.layer, kind):
        del rest[0]
        return found
    return None


def _first_update(rest: list[Written | Residual], kinds: tuple[type[Any], ...]) -> Residual | None:
    found = rest[0] if rest else None
    if isinstance(found, Residual) and isinstance(found.layer.layer, kinds):
        del rest[0]
        return found
    return None


def _out_of_place(part: Written | Residual) -> Fault:
    layer = part.layer if isinstance(part, Written) else part.layer.layer
    path = part.path if isinstance(part, Written) else part.layer.path
    return Fault(
        path,
        f"the decoder has no {type(layer).__name__} here: blocks of attention and feed-forward "
        f"layer, each in a "
        "ResidualTopology behind an RMSNormLayer, then an RMSNormLayer and a LinearLayer",
    )


def _read(section: Any, path: Path) -> tuple[list[Written | Residual], list[Fault]]:
    """Layers and residual updates of a topology or a layer, in their order, and what is wrong with
    them.
    """
    kind = section.get("type") if isinstance(section, Mapping) else None
    if not isinstance(kind, str):
        return [], [Fault(path, "must be a layer or a topology, with its 'type'")]
    keys = {key: value for key, value in section.items() if key != "type"}
    if kind in LAYERS:
        try:
            return [Written(keys_of(LAYERS[kind], keys, path), path)], []
        except Faulty as error:
            return [], list(error.faults)
    if kind not in _TOPOLOGIES:
        return [], [_unknown(kind, (*path, "type"))]
    repeat = keys.pop("repeat", 1) if kind == "NestedTopology" else 1
    layers = keys.pop("layers", None)
    faults = [Fault((*path, key), f"unknown key; a {kind} has none of this name") for key in keys]
    if type(repeat) is not int or not 1 <= repeat <= _MOST_BLOCKS:
        faults.append(
            Fault(
                (*path, "repeat"),
                f"must be a whole number from 1 to {_MOST_BLOCKS}, not {repeat!r}",
            )
        )
        repeat = 1
    if not isinstance(layers, list | tuple) or not layers:
        return [], [*faults, Fault((*path, "layers"), "must be a list of layers")]
    parts: list[Written | Residual] = []
    for number, each in enumerate(layers):
        found, wrong = _read(each, (*path, "layers", number))
        parts += found
        faults += wrong
    if kind == "ResidualTopology" and not faults:
        return _residual(parts, path)
    if len(parts) * repeat > 3 * _MOST_BLOCKS:
        return [], [*faults, Fault((*path, "repeat"), f"makes more than {_MOST_BLOCKS} blocks")]
    return parts * repeat, faults


def _residual(
    parts: list[Written | Residual], path: Path
) -> tuple[list[Written | Residual], list[Fault]]:
    inside = [
        part
        for part in parts
        if not (isinstance(part, Written) and isinstance(part.layer, DropoutLayer))
    ]
    if len(inside) == 2:
        norm, layer = inside
        plain = isinstance(norm, Written) and isinstance(layer, Written)
        if (
            plain
            and isinstance(norm.layer, RMSNormLayer)
            and isinstance(layer.layer, (AttentionLayer, *FEED_FORWARD))
        ):
            return [Residual(norm, layer)], []
    return [], [
        Fault(
            (*path, "layers"),
            "must be an RMSNormLayer, then an AttentionLayer or a feed-forward layer (SwiGLULayer)",
        )
    ]


def _unknown(kind: str, path: Path) -> Fault:
    close = NEAREST.get(kind) or nearest(kind, [*LAYERS, *_TOPOLOGIES])
    return Fault(
        path,
        f"the decoder has no {kind}; it is made of {', '.join(_TOPOLOGIES)} and of "
        f"{', '.join(LAYERS)}",
        f"The nearest that it has is {close}." if close else "",
    )


def _check_alike(blocks: list[tuple[Residual, Residual | None]]) -> None:
    """Faulty where a block differs from the first: the options of a decoder are those of all its
    blocks.
    """
    first_attention, first_feed_forward = blocks[0]
    for attention, feed_forward in blocks[1:]:
        if (feed_forward is None) != (first_feed_forward is None):
            raise Faulty(
                Fault(
                    attention.layer.path, "one block has a feed-forward layer and another has none"
                )
            )
        _same(attention.layer, first_attention.layer)
        if feed_forward is not None and first_feed_forward is not None:
            _same(feed_forward.layer, first_feed_forward.layer)


def _same(one: Written, first: Written) -> None:
    if one.layer == first.layer:
        return
    if type(one.layer) is not type(first.layer):
        names = (
            f"{type(one.layer).__name__}, and the first block has a {type(first.layer).__name__}"
        )
        raise Faulty(Fault(one.path, f"a {names}: all blocks of the decoder are alike"))
    for key, value in asdict(one.layer).items():
        before = getattr(first.layer, key)
        if value != before:
            raise Faulty(
                Fault(
                    (*one.path, key),
                    f"is {value}, and {before} in the first block: all blocks of the decoder are "
                    f"alike",
                )
            )
