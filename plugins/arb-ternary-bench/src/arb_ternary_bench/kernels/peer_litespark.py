"""litespark-inference (PyPI): 2-bit weights, one scale per matrix; its kernels without torch."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from arb_ternary.errors import ArbError
from arb_ternary_bench.kernels.cells import Cell
from arb_ternary_bench.kernels.operands import Operands
from arb_ternary_bench.kernels.peer_product import PeerProduct

_PACKAGE = "litespark_inference"
#: The most rows that its kernel for several rows computes at a time.
_MOST_ROWS = 64


@frozen
class LitesparkPeer:
    """Its product with int8 rows; with several rows each has a scale."""

    name: str = "litespark"
    summary: str = "litespark-inference, 2 bits a weight; from int8 rows"
    install: str = "pip install litespark-inference"

    def available(self) -> str | None:
        spec = find_spec(_PACKAGE)
        if spec is None or spec.origin is None:
            return f"{_PACKAGE} is not installed"
        folder = Path(spec.origin).parent / "torchless"
        if any(folder.glob("_matmul_lut_*")):
            return None
        return f"{folder} has no compiled kernel"

    def serves(self, cell: Cell) -> str | None:
        if cell.in_features % 64:
            return "K must be a multiple of 64"
        if cell.rows == 1 or _kernels().has_batched_matmul():
            return None
        return "it has no kernel for several rows"

    def prepare(self, cell: Cell, operands: Operands) -> PeerProduct:
        kernels = _kernels()
        set_threads(kernels, cell.threads)
        packed = _pack(operands.trits.numpy())
        weights = [packed, *(packed.copy() for _ in range(cell.copies(packed.nbytes) - 1))]
        x = operands.x.numpy()
        scale: NDArray[np.float32] = (np.abs(x).max(axis=1) / np.float32(127)).astype(np.float32)
        q: NDArray[np.int8] = np.ascontiguousarray(np.rint(x / scale[:, None]).astype(np.int8))
        output: NDArray[np.float32] = np.empty((cell.rows, cell.out_features), np.float32)
        if cell.rows == 1:
            row = q[0]
            only = float(scale[0])
            line = output[0]

            def run(i: int) -> None:
                kernels.matmul_packed_m1(row, weights[i], 1.0, only, line)

        else:
            some = [slice(start, start + _MOST_ROWS) for start in range(0, cell.rows, _MOST_ROWS)]
            parts = [(q[part], scale[part], output[part]) for part in some]

            def run(i: int) -> None:
                for rows, scales, out in parts:
                    kernels.matmul_packed_mT(rows, scales, weights[i], 1.0, out)

        return PeerProduct(run, len(weights), packed.nbytes, output, (weights, q, scale))


def _pack(trits_NK: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Pack four columns per byte, codes ``t + 1``, the first in the low bits."""
    codes = (trits_NK + 1).astype(np.uint8).reshape(trits_NK.shape[0], -1, 4)
    packed: NDArray[np.uint8] = np.ascontiguousarray(
        codes[:, :, 0] | codes[:, :, 1] << 2 | codes[:, :, 2] << 4 | codes[:, :, 3] << 6
    )
    return packed


@cache
def _kernels() -> ModuleType:
    """Load the module of its ctypes bindings by path: its package imports an inference stack."""
    from importlib.util import module_from_spec, spec_from_file_location

    package = find_spec(_PACKAGE)
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "torchless" / "kernel.py"
    spec = spec_from_file_location(f"{_PACKAGE}_kernels", path)
    if spec is None or spec.loader is None:
        raise ArbError(f"{path}: litespark-inference cannot be loaded")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ensure_built()
    return module


def set_threads(kernels: ModuleType, threads: int) -> None:
    """Set the threads of the OpenMP that its kernels are linked with, which may not be torch's."""
    library = ctypes.CDLL(str(kernels.ensure_built()))
    setter = getattr(library, "omp_set_num_threads", None)
    if setter is not None:
        setter(threads)
