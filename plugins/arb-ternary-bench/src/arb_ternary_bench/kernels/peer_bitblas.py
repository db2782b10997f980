"""BitBLAS (PyPI): compiled kernels for mixed precision; int8 rows with weights of 2 bits."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from attrs import frozen

from arb_ternary_bench.kernels.cells import Cell
from arb_ternary_bench.kernels.operands import Operands
from arb_ternary_bench.kernels.peer_product import PeerProduct


@frozen
class BitblasPeer:
    """Its matrix product in int32, without scales. It compiles each shape first, for minutes."""

    name: str = "bitblas"
    summary: str = "BitBLAS, 2 bits a weight; from int8 rows, sums in int32 without scales"
    install: str = "pip install bitblas"

    def available(self) -> str | None:
        return None if find_spec("bitblas") is not None else "bitblas is not installed"

    def serves(self, cell: Cell) -> str | None:
        if cell.in_features % 128 == 0 and cell.out_features % 16 == 0:
            return None
        return "K % 128 and N % 16 must be 0"

    def prepare(self, cell: Cell, operands: Operands) -> PeerProduct:
        bitblas: Any = import_module("bitblas")
        config = bitblas.MatmulConfig(
            M=cell.rows,
            N=cell.out_features,
            K=cell.in_features,
            A_dtype="int8",
            W_dtype="int2",
            accum_dtype="int32",
            out_dtype="int32",
            layout="nt",
            with_bias=False,
        )
        multiply = bitblas.Matmul(config=config)
        weight = multiply.transform_weight(operands.trits)
        scale = operands.x.abs().amax(dim=1) / 127.0
        q = (operands.x / scale.unsqueeze(1)).round().to(torch.int8)
        return PeerProduct(
            lambda _: multiply(q, weight), 1, cell.weights // 4, None, (multiply, weight, q), scale
        )
