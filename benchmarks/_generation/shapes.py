"""The sizes of the decoders that generate; weights are random."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from attrs import frozen

from arb_ternary.config.yaml_document import read_yaml
from arb_ternary_text.models.config import DecoderConfig


@frozen(kw_only=True)
class GenerationShape:
    """Sizes of a decoder of an architecture that llama.cpp runs too.

    Attributes:
        name: on the command line.
        what: the model that has these sizes.
        vocabulary: token ids.
        tied: the head has the embedding's weights.
        bitnet: norms before the output and down projections, and ``relu(gate)^2 * up`` (BitNet
            b1.58 2B4T); otherwise a llama.
    """

    name: str
    what: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    tied: bool = False
    bitnet: bool = False

    @property
    def key_width(self) -> int:
        """Features of all key heads together."""
        return self.width // self.heads * self.kv_heads

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """Yield the linears of one block by llama.cpp's names, with outputs and inputs."""
        yield "attn_q", self.width, self.width
        yield "attn_k", self.key_width, self.width
        yield "attn_v", self.key_width, self.width
        yield "attn_output", self.width, self.width
        yield "ffn_gate", self.feed_forward, self.width
        yield "ffn_up", self.feed_forward, self.width
        yield "ffn_down", self.width, self.feed_forward

    def weights_read(self) -> int:
        """Return how many weights the pass of one token reads whole: blocks and head."""
        block = sum(outputs * inputs for _, outputs, inputs in self.matrices())
        return self.layers * block + self.vocabulary * self.width

    def weights(self) -> int:
        """Return the number of weights of all matrices."""
        embedding = 0 if self.tied else self.vocabulary * self.width
        return self.weights_read() + embedding

    def config(self, max_length: int, *, floats: bool = False) -> DecoderConfig:
        """Return the decoder's options; ``floats`` makes every part and activation float."""
        return DecoderConfig(
            architecture="bitnet" if self.bitnet else "llama",
            activation="reglu2" if self.bitnet else "swiglu",
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            feed_forward=self.feed_forward,
            tie_embeddings=self.tied,
            max_length=max_length,
            group_size="row" if floats else 128,
            activations="float" if floats else "int8",
            float_parts=("embedding", "head", "norms", "linears") if floats else (),
        )


def _load() -> dict[str, GenerationShape]:
    file = Path(__file__).with_name("shapes.yaml")
    plain = read_yaml(file.read_text(encoding="utf-8"), str(file)).data
    return {name: GenerationShape(name=name, **fields) for name, fields in plain.items()}


SHAPES: Final[Mapping[str, GenerationShape]] = _load()
