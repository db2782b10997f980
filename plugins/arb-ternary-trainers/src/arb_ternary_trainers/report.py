"""The report of ``ternarize``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import frozen

from arb_ternary.cli.output import aligned


@frozen
class Replaced:
    """A weight that became ternary.

    Attributes:
        name: name of the layer.
        tied: names of further layers with the same weight.
        kind: class of the layer before.
        shape: shape of the weight.
        init: how trits and exponents were found.
        error: ``|W - Q| / |W|`` of the weight and its ternary form; None if it was drawn anew.
        weights: number of weights.
        bytes_before: bytes of the float weight.
        bytes_after: bytes of trits and exponents, which are the model.
        bytes_in_training: bytes with the accumulators, which training adds.
    """

    name: str
    tied: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    init: str
    error: float | None
    weights: int
    bytes_before: int
    bytes_after: int
    bytes_in_training: int


@frozen
class Left:
    """A matrix that stayed float.

    Attributes:
        name: name of the parameter.
        shape: its shape; empty if it has none yet.
        reason: why it stayed.
    """

    name: str
    shape: tuple[int, ...]
    reason: str


@frozen(str=False)
class TernarizeReport:
    """The outcome of ``ternarize``; ``str(report)`` is a table.

    Attributes:
        replaced: the weights that became ternary.
        left: the matrices that stayed float. Vectors, such as biases and gains, are not listed.
    """

    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...]

    @property
    def weights(self) -> int:
        """Number of ternary weights."""
        return sum(each.weights for each in self.replaced)

    @property
    def bytes_before(self) -> int:
        """Bytes of the replaced weights before."""
        return sum(each.bytes_before for each in self.replaced)

    @property
    def bytes_after(self) -> int:
        """Bytes of their trits and exponents."""
        return sum(each.bytes_after for each in self.replaced)

    @property
    def bytes_in_training(self) -> int:
        """Bytes of these and of the accumulators."""
        return sum(each.bytes_in_training for each in self.replaced)

    def __str__(self) -> str:
        heading = ("ternary", "kind", "shape", "init", "error")
        lines = aligned([heading, *self._replaced_rows()])
        if self.left:
            lines += ["", *aligned([("stays float", "shape", "reason"), *self._left_rows()])]
        sizes = (self.bytes_before, self.bytes_after, self.bytes_in_training)
        before, after, training = (8 * size / self.weights for size in sizes)
        lines += [
            "",
            f"{self.weights:,} ternary weights: {before:.2f} bits each before, {after:.2f} now, "
            f"{training:.2f} in training",
            f"{self.bytes_before:,} bytes before, {self.bytes_after:,} now, "
            f"{self.bytes_in_training:,} in training",
        ]
        return "\n".join(lines)

    def _replaced_rows(self) -> Iterator[tuple[str, ...]]:
        for each in self.replaced:
            name = " = ".join((each.name, *each.tied))
            error = "" if each.error is None else f"{each.error:.3f}"
            yield name, each.kind, _times(each.shape), each.init, error

    def _left_rows(self) -> Iterator[tuple[str, ...]]:
        for each in self.left:
            yield each.name, _times(each.shape), each.reason


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
