"""Decoders that the training bench trains, and how many tokens a step has."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from attrs import frozen


@frozen(kw_only=True)
class TrainSize:
    """A decoder with SwiGLU and norms of queries and keys, and the batches that it is trained on.

    Attributes:
        width: features of the residual stream.
        feed_forward: hidden features.
        vocabulary: token ids.
        batch: sequences of a step.
        block: tokens of a sequence.
        group_size: weights that share an exponent, where weights are ternary.
        architecture: the decoder's preset; None: it has sub-norms, as in no preset with norms of
            queries and keys.
    """

    name: str
    width: int
    layers: int
    heads: int
    feed_forward: int
    vocabulary: int
    batch: int
    block: int
    group_size: int | str = 128
    architecture: str | None = None

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.block

    def weights(self) -> int:
        """Of linears, embedding and head; norms have no gains."""
        blocks = self.layers * (4 * self.width**2 + 3 * self.width * self.feed_forward)
        return blocks + 2 * self.vocabulary * self.width

    def activation_bytes(self) -> int:
        """What a step keeps for its backward pass, about, in float32: for deciding what fits into
        the memory.
        """
        block = 20 * self.width + 6 * self.feed_forward + 3 * self.heads * self.block
        return 4 * self.tokens * (self.layers * block + 4 * self.vocabulary)

    def model(self) -> dict[str, Any]:
        """The options that every way of training has in common."""
        kind: dict[str, Any] = {"activation": "swiglu", "query_key_norm": True}
        if self.architecture is not None:
            kind = {"architecture": self.architecture}
        return {
            "width": self.width,
            "layers": self.layers,
            "heads": self.heads,
            "feed_forward": self.feed_forward,
            "max_length": self.block,
            **kind,
        }


#: The demo's decoder (docs/examples/demo.yaml), larger ones, and one that a test can wait for.
SIZES: Final[Mapping[str, TrainSize]] = MappingProxyType(
    {
        size.name: size
        for size in (
            TrainSize(
                name="demo",
                width=128,
                layers=3,
                heads=4,
                feed_forward=256,
                vocabulary=256,
                batch=8,
                block=128,
                group_size="row",
                architecture="qwen3",
            ),
            TrainSize(
                name="512x8",
                width=512,
                layers=8,
                heads=8,
                feed_forward=1536,
                vocabulary=256,
                batch=8,
                block=256,
            ),
            TrainSize(
                name="1024x12",
                width=1024,
                layers=12,
                heads=16,
                feed_forward=2816,
                vocabulary=256,
                batch=4,
                block=256,
            ),
            TrainSize(
                name="2048x4",
                width=2048,
                layers=4,
                heads=16,
                feed_forward=5632,
                vocabulary=32000,
                batch=2,
                block=512,
            ),
            TrainSize(
                name="tiny",
                width=32,
                layers=1,
                heads=2,
                feed_forward=64,
                vocabulary=64,
                batch=2,
                block=16,
                group_size=32,
            ),
        )
    }
)
