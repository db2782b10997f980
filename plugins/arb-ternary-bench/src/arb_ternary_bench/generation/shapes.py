"""The sizes of the decoders that generate; weights are random."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal

from attrs import frozen

from arb_ternary_text.models.config import DecoderConfig

GroupSize = Literal[32, 64, 128, 256, "row"]


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

    def config(
        self, max_length: int, group_size: GroupSize, *, floats: bool = False
    ) -> DecoderConfig:
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
            group_size=group_size,
            activations="float" if floats else "int8",
            float_parts=("embedding", "head", "norms", "linears") if floats else (),
        )


_ALL: Final = (
    GenerationShape(
        name="0.6m",
        what="the demo as a llama (docs/examples/llama.yaml)",
        width=128,
        layers=3,
        heads=4,
        kv_heads=4,
        feed_forward=256,
        vocabulary=256,
    ),
    GenerationShape(
        name="125m",
        what="a llama of GPT-2's width, depth and vocabulary",
        width=768,
        layers=12,
        heads=12,
        kv_heads=12,
        feed_forward=2048,
        vocabulary=50304,
        tied=True,
    ),
    GenerationShape(
        name="1b",
        what="TinyLlama 1.1B",
        width=2048,
        layers=22,
        heads=32,
        kv_heads=4,
        feed_forward=5632,
        vocabulary=32000,
    ),
    GenerationShape(
        name="2b",
        what="BitNet b1.58 2B4T",
        width=2560,
        layers=30,
        heads=20,
        kv_heads=5,
        feed_forward=6912,
        vocabulary=128256,
        tied=True,
        bitnet=True,
    ),
    GenerationShape(
        name="7b",
        what="Llama 2 7B",
        width=4096,
        layers=32,
        heads=32,
        kv_heads=32,
        feed_forward=11008,
        vocabulary=32000,
    ),
    GenerationShape(
        name="tiny",
        what="one that a test can wait for",
        width=256,
        layers=2,
        heads=4,
        kv_heads=2,
        feed_forward=512,
        vocabulary=512,
    ),
)
SHAPES: Final[Mapping[str, GenerationShape]] = {shape.name: shape for shape in _ALL}
