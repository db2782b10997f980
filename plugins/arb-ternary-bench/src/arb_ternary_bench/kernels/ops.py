"""The ops that can be measured, and who takes part in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from attrs import frozen

from arb_ternary_bench.kernels.cells import Cell, Contender
from arb_ternary_bench.kernels.operands import Operands
from arb_ternary_bench.kernels.products import grad_input_contenders, linear_contenders
from arb_ternary_bench.kernels.rows import row_contenders
from arb_ternary_bench.kernels.updates import apply_contenders, cast_contenders


@frozen
class BenchOp:
    """An op of the bench.

    Attributes:
        contenders: makes the contenders of a cell: backends first, then torch's own.
        summary: one line.
        uses_rows: whether ``M`` matters; otherwise there is one cell per shape.
        peers: whether peers take part.
    """

    contenders: Callable[[Cell, Operands, Sequence[str]], list[Contender]]
    summary: str
    uses_rows: bool = True
    peers: bool = False


OPS: Final[Mapping[str, BenchOp]] = {
    "linear": BenchOp(partial(linear_contenders, integer=True), "x @ W.T of int8 rows", peers=True),
    "linear_float": BenchOp(partial(linear_contenders, integer=False), "x @ W.T of bfloat16 rows"),
    "linear_grad_input": BenchOp(
        partial(grad_input_contenders, integer=True), "grad @ W of int8 rows"
    ),
    "linear_grad_input_float": BenchOp(
        partial(grad_input_contenders, integer=False), "grad @ W of bfloat16 rows"
    ),
    "cast_scaled_votes": BenchOp(
        partial(cast_contenders, integer=False), "votes from bfloat16 gradients"
    ),
    "cast_scaled_votes_int8": BenchOp(
        partial(cast_contenders, integer=True), "votes from int8 gradients"
    ),
    "apply_scaled_votes": BenchOp(apply_contenders, "votes to flips", uses_rows=False),
    "quantize_rows": BenchOp(row_contenders, "float32 activations to int8"),
    "quantize_gradient": BenchOp(row_contenders, "float32 gradients to int8"),
    "rms_norm_quantize": BenchOp(row_contenders, "norm and quantisation in one"),
}

DEFAULT_OPS: Final = (
    "linear",
    "linear_grad_input",
    "cast_scaled_votes",
    "cast_scaled_votes_int8",
    "apply_scaled_votes",
    "quantize_rows",
)
