"""llama.cpp's ternary products to compare with, by its tensor library ggml.

A peer's time is what its users pay: it gets float rows, which it quantises itself. It has one scale
per block or matrix, so that exponents are left out.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from _kernels.cells import Cell, Contender, contender
from _kernels.operands import Operands
from arb_ternary.errors import ArbError
from harness import llama_cpp

#: Largest error of a peer, in root mean squares of the result. Rounding Gaussian rows to int8
#: leaves errors of 0.9 %, and the largest of millions is six times as large.
_TOLERANCE: Final = 0.1
#: llama.cpp's ternary formats, with their numbers in files.
_GGML_TYPES: Final = {"TQ2_0": 35, "TQ1_0": 34}
#: Weights that share a scale in both formats; rows are whole blocks.
_BLOCK: Final = 256
#: ``GGML_TYPE_F32``.
_F32: Final = 0


def peers(operands: Operands) -> tuple[list[Contender], list[str]]:
    """Return ggml's products that take part in the op ``linear``, and why others do not."""
    reason = _obstacle(operands.cell)
    if reason is not None:
        return [], [f"ggml: {reason}"]
    return [_ggml(kind, operands) for kind in _GGML_TYPES], []


def _obstacle(cell: Cell) -> str | None:
    if cell.device != "cpu":
        return "it runs on CPUs"
    if cell.in_features % _BLOCK:
        return f"K must be a multiple of {_BLOCK}"
    return llama_cpp.missing()


def _ggml(kind: str, operands: Operands) -> Contender:
    import gguf

    cell = operands.cell
    trits = operands.trits.numpy().astype(np.float32)
    packed = gguf.quantize(trits, gguf.GGMLQuantizationType[kind])
    wanted = operands.x @ operands.trits.to(torch.float32).t()
    return contender(
        cell,
        f"ggml {kind}",
        lambda product: product.run(),
        partial(_GgmlProduct, kind, operands, packed),
        packed.nbytes,
        [wanted],
        moved=packed.nbytes + operands.x.nbytes + wanted.nbytes,
        operations=cell.operations,
        tolerance=_TOLERANCE,
        role="peer",
    )


class _InitParams(ctypes.Structure):
    """``struct ggml_init_params``."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


class _Plan(ctypes.Structure):
    """``struct ggml_cplan``: the first fields, and more room than any version takes."""

    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("rest", ctypes.c_byte * 108),
    )


@cache
def _library() -> Any:
    pointer = ctypes.c_void_p
    number = ctypes.c_int64
    library = llama_cpp.load(
        [
            ("ggml_init", pointer, (_InitParams,)),
            ("ggml_free", None, (pointer,)),
            ("ggml_new_tensor_2d", pointer, (pointer, ctypes.c_int, number, number)),
            ("ggml_get_data", pointer, (pointer,)),
            ("ggml_mul_mat", pointer, (pointer, pointer, pointer)),
            ("ggml_new_graph", pointer, (pointer,)),
            ("ggml_build_forward_expand", None, (pointer, pointer)),
            ("ggml_cpu_init", None, ()),
            ("ggml_graph_plan", _Plan, (pointer, ctypes.c_int, pointer)),
            ("ggml_graph_compute", ctypes.c_int, (pointer, ctypes.POINTER(_Plan))),
        ]
    )
    library.ggml_cpu_init()
    return library


class _GgmlProduct:
    """``y = x @ W.T`` as a graph of one node of ggml, in memory of its own."""

    def __init__(self, kind: str, operands: Operands, packed: Any) -> None:
        library = _library()
        cell = operands.cell
        x = operands.x
        out_bytes = 4 * cell.rows * cell.out_features
        size = packed.nbytes + x.nbytes + out_bytes + (1 << 20)
        self._context = library.ggml_init(_InitParams(size, None, False))
        weight = library.ggml_new_tensor_2d(
            self._context, _GGML_TYPES[kind], cell.in_features, cell.out_features
        )
        rows = library.ggml_new_tensor_2d(self._context, _F32, cell.in_features, cell.rows)
        ctypes.memmove(library.ggml_get_data(weight), packed.ctypes.data, packed.nbytes)
        ctypes.memmove(library.ggml_get_data(rows), x.data_ptr(), x.nbytes)
        product = library.ggml_mul_mat(self._context, weight, rows)
        memory = (ctypes.c_float * (out_bytes // 4)).from_address(library.ggml_get_data(product))
        output = np.ctypeslib.as_array(memory).reshape(cell.rows, cell.out_features)
        output[:] = float("nan")
        self._output = torch.from_numpy(output)
        self._graph = library.ggml_new_graph(self._context)
        library.ggml_build_forward_expand(self._graph, product)
        self._plan = library.ggml_graph_plan(self._graph, torch.get_num_threads(), None)
        self._work = ctypes.create_string_buffer(max(self._plan.work_size, 64))
        self._plan.work_data = ctypes.addressof(self._work)

    def run(self) -> Tensor:
        status = _library().ggml_graph_compute(self._graph, ctypes.byref(self._plan))
        if status:
            raise ArbError(f"ggml: the product failed with status {status}")
        return self._output

    def __del__(self) -> None:
        _library().ggml_free(self._context)
