"""The sizes of a model, which decide what is sent."""

from __future__ import annotations

from attrs import frozen

from arb_ternary_bench.network.config import DecoderSizes, MatrixSizes, ModelSizes


@frozen
class Model:
    """Matrices, and parameters that stay float."""

    matrices: tuple[MatrixSizes, ...]
    float_parameters: int

    @property
    def weights(self) -> int:
        """Number of weights of the matrices."""
        return sum(each.rows * each.columns * each.count for each in self.matrices)

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return self.weights + self.float_parameters

    @property
    def edges(self) -> int:
        """Number of rows and columns of all matrices."""
        return sum((each.rows + each.columns) * each.count for each in self.matrices)

    @property
    def count(self) -> int:
        """Number of matrices."""
        return sum(each.count for each in self.matrices)

    def exponents(self, group_size: int | str) -> int:
        """Return the number of groups of weights that share an exponent."""
        total = 0
        for each in self.matrices:
            groups = 1 if group_size == "row" else -(-each.columns // int(group_size))
            total += each.rows * each.count * groups
        return total


def model_of(sizes: ModelSizes) -> Model:
    """Return the model of a config."""
    matrices = sizes.matrices if sizes.decoder is None else decoder_matrices(sizes.decoder)
    return Model(matrices, sizes.float_parameters)


def decoder_matrices(sizes: DecoderSizes) -> tuple[MatrixSizes, ...]:
    """Return queries and outputs, keys and values, gate and up, down, embedding and head."""
    head = sizes.width // sizes.heads
    inner = head * sizes.heads
    outer = head * sizes.kv_heads
    layers = sizes.layers
    return (
        MatrixSizes(rows=inner, columns=sizes.width, count=layers),
        MatrixSizes(rows=outer, columns=sizes.width, count=2 * layers),
        MatrixSizes(rows=sizes.width, columns=inner, count=layers),
        MatrixSizes(rows=sizes.feed_forward, columns=sizes.width, count=2 * layers),
        MatrixSizes(rows=sizes.width, columns=sizes.feed_forward, count=layers),
        MatrixSizes(rows=sizes.vocabulary, columns=sizes.width, count=2),
    )
