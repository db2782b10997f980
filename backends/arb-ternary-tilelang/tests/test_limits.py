"""Extents of grids: CUDA takes 2**31 - 1 blocks along the first and 65,535 along the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from arb_ternary_tilelang.kernels import flips, products, rows, storage, votes
from arb_ternary_tilelang.lane import Lane, cuda_lane
from arb_ternary_tilelang.products import GEMV_ROWS

#: Rows of a weight, of activations and of a lookup: a large vocabulary, and a long batch.
MANY: Final = 200_000
K = 4096
G = 128
_WEIGHT: Final = {"N": MANY, "K": K, "G": G}
_LAYER: Final = {"N": K, "K": K, "G": G}


def _votes(source: str, lane: Lane) -> Any:
    rule = votes.Rule(source, votes.SIGN, "int8", "int8", 8, True)
    tiles = lane.tiles.votes if source == votes.PRODUCT else lane.tiles.lookups
    return votes.cast(lane, rule, tiles, **_WEIGHT)


KERNELS: Final[dict[str, Callable[[Lane], Any]]] = {
    "pack": lambda lane: storage.pack(lane, N=MANY, K=K),
    "unpack": lambda lane: storage.unpack(lane, N=MANY, K=K),
    "pack_nibbles": lambda lane: storage.pack_nibbles(lane, N=MANY, K=K),
    "unpack_nibbles": lambda lane: storage.unpack_nibbles(lane, N=MANY, K=K),
    "flip_trits": lambda lane: flips.flip_trits(lane, 8, True, True, N=MANY, K=K),
    "flip_exponents": flips.flip_exponents,
    "product, many outputs": lambda lane: products.product(
        lane, False, "int8", "bfloat16", False, lane.tiles.few, 1, **_WEIGHT
    ),
    "product, many rows": lambda lane: products.product(
        lane, False, "int8", "bfloat16", False, lane.tiles.few, 1, **_LAYER
    ),
    "product, turned": lambda lane: products.product(
        lane, True, products.SUMS, "int32", False, lane.tiles.few, 4, **_WEIGHT
    ),
    "finish": lambda lane: products.finish(lane, False, "bfloat16", False),
    "gemv": lambda lane: products.gemv(lane, "bfloat16", False, 4, **_WEIGHT),
    "lookup": lambda lane: products.lookup(lane, "bfloat16", **_WEIGHT),
    "votes of a product": lambda lane: _votes(votes.PRODUCT, lane),
    "votes of a lookup": lambda lane: _votes(votes.LOOKUP, lane),
    "settle": lambda lane: votes.settle(lane, True, True),
    "quantize_rows": lambda lane: rows.quantize_rows(lane, "bfloat16", True, K=K),
    "largest": lambda lane: rows.largest(lane, "bfloat16"),
    "quantize_gradient": lambda lane: rows.quantize_gradient(lane, "bfloat16"),
}


def _extents(program: Any, many: int) -> dict[str, int]:
    """Blocks along each extent of a grid, with ``many`` in place of the sizes that only a call
    knows.
    """
    from tvm import arith, tirx

    found: dict[str, int] = {}

    def visit(node: Any) -> None:
        if isinstance(node, tirx.For) and node.thread_binding is not None:
            names: list[Any] = []
            tirx.stmt_functor.post_order_visit(
                node.extent, lambda part: names.append(part) if isinstance(part, tirx.Var) else None
            )
            known = {name: tirx.IntImm(name.dtype, many) for name in names}
            extent = arith.Analyzer().simplify(tirx.stmt_functor.substitute(node.extent, known))
            found[str(node.thread_binding.thread_tag)] = int(extent)

    tirx.stmt_functor.post_order_visit(program.body, visit)
    return found


@pytest.mark.parametrize("name", KERNELS)
def test_a_grid_stays_within_the_limits_of_cuda_for_many_rows(name: str) -> None:
    lane = cuda_lane("sm_90a")
    extents = _extents(KERNELS[name](lane), GEMV_ROWS if name == "gemv" else MANY)
    assert extents.pop("blockIdx.x") <= 2**31 - 1
    assert all(blocks <= 65_535 for blocks in extents.values()), extents
