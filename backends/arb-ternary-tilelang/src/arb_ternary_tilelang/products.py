"""Quantisation, matrix products and lookup: check arguments and launch kernels.

Meaning and signatures are those of ``arb_ternary.backends.reference``. Operands that are not
contiguous are copied; nothing that is passed in is written to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from attrs import define
from torch import Tensor

from arb_ternary.backends.arguments import check_float, check_ids
from arb_ternary.backends.protocol import WeightShape
from arb_ternary.counters.hashing import hash_keys
from arb_ternary_tilelang.arguments import (
    FLOATS,
    UNIT,
    nothing,
    readable,
    require,
    served,
    words,
)
from arb_ternary_tilelang.bands import BAND, Bands, bands_of
from arb_ternary_tilelang.kernels import products as programs
from arb_ternary_tilelang.kernels import rows as row_programs
from arb_ternary_tilelang.lane import Lane, Tiles, lane_of
from arb_ternary_tilelang.storage import packed_weight

#: Most terms of an integer sum: each is at most 127 << 6.
MOST_TERMS: Final = (2**31 - 1) // (127 << (BAND - 1))
#: Most rows that are multiplied one by one.
GEMV_ROWS: Final = 4
#: Most rows of a product whose sums are split among blocks.
FEW_ROWS: Final = 64
#: Least number of terms in each part of a sum.
_SPLIT_TERMS: Final = 1024
#: Most parts of a sum.
MOST_SPLITS: Final = 8


def kernels() -> dict[str, Callable[..., object]]:
    """Return the kernels of this module by op."""
    return {
        "quantize_rows": quantize_rows,
        "quantize_gradient": quantize_gradient,
        "rms_norm_quantize": rms_norm_quantize,
        "linear": linear,
        "linear_grad_input": linear_grad_input,
        "embedding": embedding,
    }


def _exponent(exponent: Tensor, packed: Tensor, shape: WeightShape) -> Tensor:
    size = (shape.out_features, shape.groups)
    return readable(exponent, "exponent", torch.int8, size, packed.device)


# --- quantisation


def _floats(tensor: Tensor, name: str, lane: Lane) -> tuple[Tensor, str]:
    """Return a contiguous float tensor in a dtype that the lane's kernels read, and its name."""
    tensor = served(lane, tensor, name)
    checked = readable(tensor, name, tensor.dtype, tuple(tensor.shape), tensor.device)
    return checked, FLOATS[checked.dtype]


def _rows(x_MK: Tensor, norm: bool, eps: float) -> tuple[Tensor, Tensor]:
    require(x_MK.dim() == 2, f"x must be [M, K], got {list(x_MK.shape)}")
    lane = lane_of(x_MK.device)
    x, dtype = _floats(x_MK, "x", lane)
    rows, columns = x.shape
    if not columns:
        return x.to(torch.int8), torch.zeros(rows, device=x.device)
    q = torch.empty((rows, columns), dtype=torch.int8, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        kernel = lane.kernel(
            row_programs.quantize_rows,
            dtype,
            lane.option(norm),
            K=columns,
        )
        kernel(x, q, scale, eps, int(norm))
    return q, scale


def quantize_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row by its largest absolute value: int8 ``[M, K]`` and float32 ``[M]``."""
    return _rows(x_MK, False, 0.0)


def rms_norm_quantize(x_MK: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Apply RMSNorm without gain, then :func:`quantize_rows`."""
    return _rows(x_MK, True, eps)


def quantize_gradient(grad_MN: Tensor, seed: int, step: int, stream: int) -> tuple[Tensor, Tensor]:
    """Round stochastically to int8 with one power of two, without waiting for the device."""
    lane = lane_of(grad_MN.device)
    grad, dtype = _floats(grad_MN, "grad", lane)
    q = torch.empty(grad.shape, dtype=torch.int8, device=grad.device)
    if not grad.numel():
        return q, torch.ones((), device=grad.device)
    flat = grad.view(-1)
    count = flat.shape[0]
    blocks = -(-count // (UNIT * lane.width))
    tops = torch.empty(blocks, dtype=torch.int32, device=grad.device)
    find_largest = lane.kernel(row_programs.largest, dtype)
    find_largest(flat, tops)
    top = tops.amax(dim=0, keepdim=True)
    scale = torch.empty(1, dtype=torch.float32, device=grad.device)
    key_0, key_1, _ = hash_keys(seed, step, stream, count)
    round_gradient = lane.kernel(row_programs.quantize_gradient, dtype)
    round_gradient(flat, top, q.view(-1), scale, key_0, key_1)
    return q, scale.view(())


# --- products


def linear(
    x_MK: Tensor,
    scale_M: Tensor | None,
    packed: Tensor,
    exponent: Tensor,
    bias_N: Tensor | None,
    shape: WeightShape,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``x @ W.T + bias``: ``[M, N]`` in ``dtype``."""
    return _product(False, x_MK, scale_M, packed, exponent, bias_N, shape, dtype)


def linear_grad_input(
    grad_MN: Tensor,
    scale: Tensor | None,
    packed: Tensor,
    exponent: Tensor,
    shape: WeightShape,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``grad_y @ W``: ``[M, K]`` in ``dtype``."""
    return _product(True, grad_MN, scale, packed, exponent, None, shape, dtype)


@define(eq=False)
class _Operands:
    """Operands of a product with a packed weight. Nothing changes them.

    Attributes:
        lane: the target of the kernels.
        turned: whether the sum is over the rows of the weight.
        a: the left operand, a matrix whose dtype and columns are not checked yet.
        held: the words of the weight.
        exponent: the exponents of the weight, int8 ``[N, J]``.
        bias: float32 ``[P]``, or None.
        shape: the shape of the weight.
        terms: terms of each sum.
        columns: columns of the result.
        out: dtype of the result that the kernels write.
    """

    lane: Lane
    turned: bool
    a: Tensor
    held: Tensor
    exponent: Tensor
    bias: Tensor | None
    shape: WeightShape
    terms: int
    columns: int
    out: torch.dtype

    @property
    def rows(self) -> int:
        """Rows of the left operand."""
        return self.a.shape[0]

    @property
    def biased(self) -> bool:
        """Whether a bias is added."""
        return self.bias is not None

    @property
    def bias_or_empty(self) -> Tensor:
        """The bias as a kernel takes it: empty if there is none."""
        if self.bias is None:
            return nothing(self.held.device)
        return self.bias

    @property
    def tiles(self) -> Tiles:
        """Tiles for this number of rows."""
        return self.lane.tiles.few if self.rows <= FEW_ROWS else self.lane.tiles.many

    def empty(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for a result on the device of the weight."""
        return torch.empty(size, dtype=dtype, device=self.held.device)

    def checked(self, a: Tensor, dtype: torch.dtype) -> Tensor:
        """The left operand as a kernel reads it."""
        size = (a.shape[0], self.terms)
        return readable(a, "the left operand", dtype, size, self.held.device)

    def multiply(
        self,
        mode: str,
        a: Tensor,
        scale: Tensor,
        level: Tensor,
        floor: Tensor,
        result: Tensor,
    ) -> None:
        """Multiply tile by tile into ``result``, ``[splits, M, P]``, in a mode of the kernel."""
        exact = mode == programs.SUMS
        biased = self.biased and not exact
        kernel = self.lane.kernel(
            programs.product,
            self.turned,
            mode,
            "int32" if exact else FLOATS[result.dtype],
            self.lane.option(biased),
            self.tiles,
            result.shape[0],
            **_sizes(self.shape),
        )
        kernel(
            a,
            scale,
            self.held,
            level,
            floor,
            self.bias_or_empty,
            result,
            self.shape.group_size,
            int(biased),
        )


def _product(
    turned: bool,
    a_MR: Tensor,
    scale: Tensor | None,
    packed: Tensor,
    exponent: Tensor,
    bias: Tensor | None,
    shape: WeightShape,
    dtype: torch.dtype,
) -> Tensor:
    device = packed.device
    lane = lane_of(device)
    held = words(packed_weight(packed, shape))
    powers = _exponent(exponent, packed, shape)
    if turned:
        terms = shape.out_features
        columns = shape.in_features
    else:
        terms = shape.in_features
        columns = shape.out_features
    if a_MR.dim() != 2:
        raise ValueError(f"the left operand must be [M, {terms}], got {list(a_MR.shape)}")
    rows = a_MR.shape[0]
    check_float(dtype, "result", "tilelang")
    if bias is not None:
        bias = readable(bias, "bias", torch.float32, (columns,), device)
    if 0 in (rows, terms, columns):
        result = torch.zeros((rows, columns), dtype=torch.float32, device=device)
        if bias is not None:
            result += bias
        return result.to(dtype)
    operands = _Operands(
        lane=lane,
        turned=turned,
        a=a_MR,
        held=held,
        exponent=powers,
        bias=bias,
        shape=shape,
        terms=terms,
        columns=columns,
        out=dtype if lane.cuda else torch.float32,
    )
    if scale is None:
        return _float_product(operands).to(dtype)
    size = (rows,)
    if turned:
        size = (1,)
        scale = scale.reshape(size)
    factors = readable(scale, "scale", torch.float32, size, device)
    bands = bands_of(exponent, shape, turned)
    result = _int8_product(operands, factors, bands)
    return result if result.dtype is dtype else result.to(dtype)


def _float_product(operands: _Operands) -> Tensor:
    a, mode = _floats(operands.a, "the left operand", operands.lane)
    a = operands.checked(a, a.dtype)
    result = operands.empty(1, operands.rows, operands.columns, dtype=operands.out)
    operands.multiply(
        mode,
        a,
        nothing(a.device),
        operands.exponent,
        nothing(a.device, torch.int32),
        result,
    )
    return result[0]


def _int8_product(operands: _Operands, scale: Tensor, bands: Bands) -> Tensor:
    a = operands.checked(operands.a, torch.int8)
    terms = operands.terms
    if terms > MOST_TERMS:
        raise ValueError(f"the tilelang backend sums at most {MOST_TERMS} terms, got {terms}")
    if len(bands.shifts) > 1:
        return _banded_product(operands, a, scale, bands)
    if operands.rows <= GEMV_ROWS and not operands.turned:
        return _gemv(operands, a, scale, bands)
    splits = _splits(operands.lane, operands.rows, terms)
    if splits > 1:
        return _split_product(operands, a, scale, bands, splits)
    result = operands.empty(1, operands.rows, operands.columns, dtype=operands.out)
    operands.multiply("int8", a, scale, bands.shifts[0], bands.floor, result)
    return result[0]


def _banded_product(
    operands: _Operands,
    a: Tensor,
    scale: Tensor,
    bands: Bands,
) -> Tensor:
    """Multiply if exponents spread over several bands: one pass per band, added in int64."""
    total = torch.zeros(
        (operands.rows, operands.columns),
        dtype=torch.int64,
        device=a.device,
    )
    parts = operands.empty(1, operands.rows, operands.columns, dtype=torch.int32)
    for index, level in enumerate(bands.shifts):
        operands.multiply(programs.SUMS, a, scale, level, bands.floor, parts)
        total += parts[0].to(torch.int64) << (BAND * index)
    factor = ((bands.floor + 127) << 23).view(torch.float32)
    y = total.to(torch.float32)
    y *= scale if operands.turned else scale.unsqueeze(1)
    y *= factor
    if operands.bias is not None:
        y += operands.bias
    return y.to(operands.out)


def _gemv(operands: _Operands, a: Tensor, scale: Tensor, bands: Bands) -> Tensor:
    """Multiply very few rows, one by one."""
    result = operands.empty(operands.rows, operands.columns, dtype=operands.out)
    chunk = 4 if operands.lane.fixed and operands.held.shape[1] % 4 == 0 else 1
    missing = -operands.terms % UNIT
    if missing:
        a = torch.nn.functional.pad(a, (0, missing))
    kernel = operands.lane.kernel(
        programs.gemv,
        FLOATS[operands.out],
        operands.lane.option(operands.biased),
        chunk,
        **_sizes(operands.shape),
    )
    kernel(
        words(a),
        scale,
        operands.held,
        bands.shifts[0],
        bands.floor,
        operands.bias_or_empty,
        result,
        operands.shape.group_size,
        int(operands.biased),
    )
    return result


def _split_product(
    operands: _Operands,
    a: Tensor,
    scale: Tensor,
    bands: Bands,
    splits: int,
) -> Tensor:
    """Multiply with each sum split among blocks; a second kernel adds the parts."""
    parts = operands.empty(splits, operands.rows, operands.columns, dtype=torch.int32)
    operands.multiply(programs.SUMS, a, scale, bands.shifts[0], bands.floor, parts)
    result = operands.empty(operands.rows, operands.columns, dtype=operands.out)
    kernel = operands.lane.kernel(
        programs.finish,
        operands.turned,
        FLOATS[operands.out],
        operands.lane.option(operands.biased),
    )
    kernel(
        parts,
        scale,
        bands.floor,
        operands.bias_or_empty,
        result,
        int(operands.biased),
    )
    return result


def _sizes(shape: WeightShape) -> dict[str, int]:
    return {
        "N": shape.out_features,
        "K": shape.in_features,
        "G": shape.group_size,
    }


def _splits(lane: Lane, rows: int, terms: int) -> int:
    """Parts of the sum, so that products with few rows occupy the whole device."""
    if rows > FEW_ROWS:
        return 1
    wanted = max(1, terms // _SPLIT_TERMS)
    return min(MOST_SPLITS, wanted)


def embedding(
    ids_M: Tensor, packed: Tensor, exponent: Tensor, shape: WeightShape, dtype: torch.dtype
) -> Tensor:
    """Return rows ``W[ids]``, ``[M, K]``; only the requested rows are decoded.

    Raises:
        IndexError: an id is outside ``0 .. N - 1``; see ``check_ids``.
    """
    lane = lane_of(packed.device)
    device = packed.device
    held = words(packed_weight(packed, shape))
    powers = _exponent(exponent, packed, shape)
    require(ids_M.dim() == 1, f"ids must be [M], got {list(ids_M.shape)}")
    ids = readable(ids_M, "ids", torch.int64, tuple(ids_M.shape), device)
    check_float(dtype, "result", "tilelang")
    out = dtype if lane.cuda else torch.float32
    rows = torch.empty((ids.shape[0], shape.in_features), dtype=out, device=device)
    if not rows.numel():
        return rows.to(dtype)
    check_ids(ids, shape.out_features)
    kernel = lane.kernel(programs.lookup, FLOATS[out], **_sizes(shape))
    kernel(ids, held, powers, rows, shape.group_size)
    return rows.to(dtype)
