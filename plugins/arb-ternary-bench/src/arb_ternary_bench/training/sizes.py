"""The decoders that the training bench trains, and the tokens of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen


@frozen(kw_only=True)
class TrainSize:
    """A decoder with SwiGLU and norms of queries and keys, and the batches that it is trained on.

    Attributes:
        width: features of the residual stream.
        feed_forward: hidden features.
        vocabulary: token ids.
        batch: sequences per step.
        block: tokens per sequence.
        group_size: weights that share an exponent, where weights are ternary.
        architecture: the decoder's preset. Without one it has sub-norms too, which no preset with
            norms of queries and keys has.
    """

    name: str
    width: int
    layers: int
    heads: int
    feed_forward: int
    batch: int
    block: int
    vocabulary: int = 256
    group_size: int | str = 128
    architecture: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.block

    def weights(self) -> int:
        """Return the number of weights in linears, embedding and head; norms have no gains."""
        blocks = self.layers * (4 * self.width**2 + 3 * self.width * self.feed_forward)
        return blocks + 2 * self.vocabulary * self.width

    def activation_bytes(self) -> int:
        """Estimate what a step keeps for its backward pass in float32, to say what fits."""
        block = 20 * self.width + 6 * self.feed_forward + 3 * self.heads * self.block
        return 4 * self.tokens * (self.layers * block + 4 * self.vocabulary)

    def model(self) -> dict[str, Any]:
        """Return the options of the model that every way of training shares."""
        options: dict[str, Any] = {
            "width": self.width,
            "layers": self.layers,
            "heads": self.heads,
            "feed_forward": self.feed_forward,
            "max_length": self.block,
        }
        if self.architecture is None:
            return {**options, "activation": "swiglu", "query_key_norm": True}
        return {**options, "architecture": self.architecture}


_ALL: Final = (
    # The demo's decoder, docs/examples/demo.yaml.
    TrainSize(
        name="demo",
        width=128,
        layers=3,
        heads=4,
        feed_forward=256,
        batch=8,
        block=128,
        group_size="row",
        architecture="qwen3",
    ),
    TrainSize(name="512x8", width=512, layers=8, heads=8, feed_forward=1536, batch=8, block=256),
    TrainSize(
        name="1024x12", width=1024, layers=12, heads=16, feed_forward=2816, batch=4, block=256
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
    # One that a test can wait for.
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
SIZES: Final[Mapping[str, TrainSize]] = {size.name: size for size in _ALL}
