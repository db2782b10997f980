"""The decoders that are trained, and the tokens of a step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from arb_ternary.config.yaml_document import read_yaml


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

    def model(self) -> dict[str, Any]:
        """Return the options of the model that every method shares."""
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


def _load() -> dict[str, TrainSize]:
    file = Path(__file__).with_name("sizes.yaml")
    plain = read_yaml(file.read_text(encoding="utf-8"), str(file)).data
    return {name: TrainSize(name=name, **fields) for name, fields in plain.items()}


SIZES: Final[Mapping[str, TrainSize]] = _load()
