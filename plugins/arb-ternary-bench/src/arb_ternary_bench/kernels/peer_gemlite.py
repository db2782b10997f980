"""gemlite (PyPI): Triton kernels; its BitNet mode has int8 activations and one scale per matrix."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import torch
from attrs import frozen

from arb_ternary.errors import ArbError
from arb_ternary_bench.kernels.cells import Cell
from arb_ternary_bench.kernels.operands import Operands
from arb_ternary_bench.kernels.peer_product import PeerProduct

#: Names of that mode in its releases, the newest first.
_MODES: Final = ("A8W158_INT_dynamic", "A8W158")


@frozen
class GemlitePeer:
    """Its linear layer of ternary weights, called with float16 rows, which it quantises itself."""

    name: str = "gemlite"
    summary: str = "gemlite, 2 bits per weight; from float16 rows, which it makes int8"
    install: str = "pip install gemlite"

    def available(self) -> str | None:
        return None if find_spec("gemlite") is not None else "gemlite is not installed"

    def serves(self, cell: Cell) -> str | None:
        # Its packing takes words of 32 bits and tiles of 128 columns.
        if cell.in_features % 128 == 0 and cell.out_features % 32 == 0:
            return None
        return "K % 128 and N % 32 must be 0"

    def prepare(self, cell: Cell, operands: Operands) -> PeerProduct:
        helper = import_module("gemlite.helper")
        mode = next((getattr(helper, name) for name in _MODES if hasattr(helper, name)), None)
        if mode is None:
            raise ArbError(
                f"gemlite.helper has none of {', '.join(_MODES)}",
                "another release of gemlite may have one",
            )
        weight = operands.trits.to(torch.float16)
        layer: Any = mode(device=cell.device).from_weights(
            weight, torch.ones(1, device=cell.device)
        )
        x = operands.x.to(torch.float16)
        return PeerProduct(lambda _: layer(x), 1, cell.weights // 4, None, (layer, x))
