"""llama.cpp's ternary formats through its tensor library ggml, loaded with ctypes.

The libraries are those of an installed ``llama_cpp`` (the PyPI package llama-cpp-python). A product
is a graph of one node; its time includes the quantisation of float32 activations in blocks of 256,
as in llama.cpp.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from arb_ternary.errors import ArbError
from arb_ternary_bench.kernels.cells import Cell
from arb_ternary_bench.kernels.operands import Operands
from arb_ternary_bench.kernels.peer_product import PeerProduct, aligned

#: Weights that share a scale in both formats; rows are whole blocks.
_BLOCK: Final = 256
#: ``GGML_TYPE_F32``.
_F32: Final = 0
#: Room for the headers of two tensors and a graph.
_CONTEXT_BYTES: Final = 1 << 20


class _InitParams(ctypes.Structure):
    """``struct ggml_init_params``."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


class _Plan(ctypes.Structure):
    """``struct ggml_cplan``; later versions append to it, hence the room at its end."""

    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("rest", ctypes.c_byte * 108),
    )


@frozen
class GgmlPeer:
    """One ternary format of ggml.

    Attributes:
        format: ``TQ2_0`` or ``TQ1_0``.
        type_number: of the format, in ``enum ggml_type``; numbers are part of the file format and
            do not change.
        size: of a weight, for the listing.
    """

    format: str
    type_number: int
    size: str

    @property
    def name(self) -> str:
        return f"ggml {self.format}"

    @property
    def summary(self) -> str:
        return f"llama.cpp's {self.format}, {self.size}; from float32 rows, which it makes int8"

    @property
    def install(self) -> str:
        return "pip install llama-cpp-python"

    def available(self) -> str | None:
        return "llama_cpp is not installed" if _folder() is None else None

    def serves(self, cell: Cell) -> str | None:
        return None if cell.in_features % _BLOCK == 0 else f"K must be a multiple of {_BLOCK}"

    def prepare(self, cell: Cell, operands: Operands) -> PeerProduct:
        library = _library()
        trits = operands.trits.numpy().astype(np.float32)
        first = self._pack(library, trits)
        weights = cell.repeated(lambda: _copy(first), first, first.nbytes)
        x: NDArray[np.float32] = np.ascontiguousarray(operands.x.numpy())
        output = (
            aligned(4 * cell.rows * cell.out_features)
            .view(np.float32)
            .reshape(cell.rows, cell.out_features)
        )
        graphs = [_Graph(library, self.type_number, weight, x, output, cell) for weight in weights]
        return PeerProduct(
            lambda i: graphs[i].compute(), len(graphs), first.nbytes, output, (weights, x, graphs)
        )

    def _pack(self, library: Any, trits_NK: NDArray[np.float32]) -> NDArray[np.uint8]:
        rows, columns = trits_NK.shape
        packed = aligned(rows * int(library.ggml_row_size(self.type_number, columns)))
        library.ggml_quantize_chunk(
            self.type_number, trits_NK.ctypes.data, packed.ctypes.data, 0, rows, columns, None
        )
        return packed


def _copy(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    made = aligned(packed.nbytes)
    made[:] = packed
    return made


class _Graph:
    """``y = x @ W.T`` as a graph of one node over memory of ours."""

    def __init__(
        self, library: Any, kind: int, weight: NDArray[np.uint8], x: Any, output: Any, cell: Cell
    ) -> None:
        self._library = library
        self._context = library.ggml_init(_InitParams(_CONTEXT_BYTES, None, True))
        w = library.ggml_new_tensor_2d(self._context, kind, cell.in_features, cell.out_features)
        rows = library.ggml_new_tensor_2d(self._context, _F32, cell.in_features, cell.rows)
        product = library.ggml_mul_mat(self._context, w, rows)
        offset = library.data_offset
        for tensor, memory in ((w, weight), (rows, x), (product, output)):
            ctypes.c_void_p.from_address(tensor + offset).value = memory.ctypes.data
        self._graph = library.ggml_new_graph(self._context)
        library.ggml_build_forward_expand(self._graph, product)
        self._plan = library.ggml_graph_plan(self._graph, cell.threads, None)
        self._work = aligned(max(int(self._plan.work_size), 64))
        self._plan.work_data = self._work.ctypes.data

    def compute(self) -> None:
        status = self._library.ggml_graph_compute(self._graph, ctypes.byref(self._plan))
        if status:
            raise ArbError(f"ggml: the product failed with status {status}")

    def __del__(self) -> None:
        self._library.ggml_free(self._context)


def _folder() -> Path | None:
    """Return the folder with ggml's libraries, or None."""
    spec = find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "lib"
    found = _find(folder, "ggml-base") and _find(folder, "ggml-cpu")
    return folder if found else None


def _find(folder: Path, stem: str) -> Path | None:
    for path in sorted(folder.glob(f"*{stem}.*")):
        if path.suffix in (".so", ".dylib", ".dll"):
            return path
    return None


class _Library:
    """The functions of ggml that are used here, with their types.

    Attributes:
        data_offset: where a tensor keeps its data pointer.
    """

    def __init__(self, folder: Path) -> None:
        base_file = _find(folder, "ggml-base")
        cpu_file = _find(folder, "ggml-cpu")
        assert base_file is not None
        assert cpu_file is not None
        try:
            base = ctypes.CDLL(str(base_file), mode=ctypes.RTLD_GLOBAL)
            cpu = ctypes.CDLL(str(cpu_file))
        except OSError as error:
            raise ArbError(f"{folder}: ggml cannot be loaded: {error}") from error
        pointer = ctypes.c_void_p
        integer = ctypes.c_int
        long = ctypes.c_int64
        for library, name, result, arguments in (
            (base, "ggml_init", pointer, (_InitParams,)),
            (base, "ggml_free", None, (pointer,)),
            (base, "ggml_row_size", ctypes.c_size_t, (integer, long)),
            (
                base,
                "ggml_quantize_chunk",
                ctypes.c_size_t,
                (integer, pointer, pointer, long, long, long, pointer),
            ),
            (base, "ggml_new_tensor_2d", pointer, (pointer, integer, long, long)),
            (base, "ggml_mul_mat", pointer, (pointer, pointer, pointer)),
            (base, "ggml_new_graph", pointer, (pointer,)),
            (base, "ggml_build_forward_expand", None, (pointer, pointer)),
            (base, "ggml_get_data", pointer, (pointer,)),
            (cpu, "ggml_cpu_init", None, ()),
            (cpu, "ggml_graph_plan", _Plan, (pointer, integer, pointer)),
            (cpu, "ggml_graph_compute", integer, (pointer, ctypes.POINTER(_Plan))),
        ):
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
            setattr(self, name, function)
        self.ggml_cpu_init: Any
        self.ggml_cpu_init()
        self.data_offset = self._data_offset()

    def _data_offset(self) -> int:
        """Find where ``struct ggml_tensor`` keeps its data pointer: that depends on the version."""
        library: Any = self
        context = library.ggml_init(_InitParams(_CONTEXT_BYTES, None, False))
        tensor = library.ggml_new_tensor_2d(context, _F32, 8, 8)
        data = library.ggml_get_data(tensor)
        header = (ctypes.c_void_p * 64).from_address(tensor)
        place = next(index for index, value in enumerate(header) if value == data)
        library.ggml_free(context)
        return place * ctypes.sizeof(ctypes.c_void_p)


@cache
def _library() -> _Library:
    folder = _folder()
    if folder is None:
        raise ArbError("ggml is not installed")
    return _Library(folder)
