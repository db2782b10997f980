"""Matrix products and lookup: arguments checked, the kernel chosen, results allocated.

Meaning and signatures are those of ``arb_ternary.backends.reference``.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from arb_ternary.backends.protocol import WeightShape
from arb_ternary_triton.arguments import (
    BLOCK,
    FLOATS,
    LANES,
    check_float,
    check_packed,
    check_readable,
    packed_columns,
)
from arb_ternary_triton.floors import INT8_SPREAD, check_spread, floors_of
from arb_ternary_triton.kernels.products import (
    finish_kernel,
    grad_input_kernel,
    linear_kernel,
    lookup_kernel,
    row_kernel,
)
from arb_ternary_triton.launch import INTERPRETED, cdiv, launch, on_nvidia
from arb_ternary_triton.layout import unpack
from arb_ternary_triton.tiles import choose_grad_input, choose_linear, choose_row, elementwise

#: Longest sum of int8 activations and trits shifted by up to 6 that fits in 32 bits.
_INT32_TERMS: Final = (2**31 - 1) // (127 << INT8_SPREAD)
#: Bands of 7 shifts that serve a spread of 40.
_BANDS: Final = 6


def _bands(spread: int, terms: int) -> int:
    check_spread(spread)
    return 1 if spread <= INT8_SPREAD and terms <= _INT32_TERMS else _BANDS


def _group(shape: WeightShape) -> int:
    """Columns of an exponent for the kernels, 0 for one a row."""
    return shape.group_size if shape.groups > 1 else 0


def _check_exponent(exponent: Tensor, shape: WeightShape) -> Tensor:
    return check_readable(exponent, "exponent", torch.int8, (shape.out_features, shape.groups))


def _dense(packed: Tensor, exponent: Tensor, shape: WeightShape) -> Tensor:
    """The weight as a float64 matrix, for the gradient checks that need that dtype."""
    scale = torch.exp2(exponent.to(torch.float64)).repeat_interleave(
        max(1, shape.group_size), dim=1
    )
    return unpack(packed, shape) * scale[:, : shape.in_features]


def _result_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a kernel writes; the interpreter cuts bfloat16 off instead of rounding: it
    writes float32.
    """
    if dtype is torch.float64 or (INTERPRETED and dtype is torch.bfloat16):
        return torch.float32
    if dtype not in FLOATS:
        raise TypeError(
            f"dtype: the triton backend serves float32, bfloat16 and float16, got {dtype}"
        )
    return dtype


class _Pieces:
    """Sums that several programs share: a workspace, and the kernel that adds it up."""

    def __init__(self, out: Tensor, split: int, integer: bool, bands: int) -> None:
        kind = (torch.int32 if bands == 1 else torch.int64) if integer else torch.float32
        self.split = split
        self.out = out
        self.part = (
            torch.empty((split, *out.shape), dtype=kind, device=out.device) if split > 1 else out
        )

    def finish(
        self, scale: Tensor, stride: int, floor: Tensor, bias: Tensor | None, integer: bool
    ) -> Tensor:
        if self.split > 1:
            rows, columns = self.out.shape
            tile = elementwise(rows, columns)
            launch(
                finish_kernel,
                (cdiv(rows, tile.rows), cdiv(columns, tile.columns)),
                self.part,
                scale,
                stride,
                floor,
                scale if bias is None else bias,
                self.out,
                rows,
                columns,
                INT8=integer,
                SPLIT=self.split,
                BIAS=bias is not None,
                ROWS=tile.rows,
                COLUMNS=tile.columns,
            )
        return self.out


def linear(
    x_MK: Tensor,
    scale_M: Tensor | None,
    packed: Tensor,
    exponent: Tensor,
    bias_N: Tensor | None,
    shape: WeightShape,
    dtype: torch.dtype,
) -> Tensor:
    """``x @ W.T + bias``, ``[M, N]`` in ``dtype``; int8 rows with scales are summed exactly."""
    rows = x_MK.shape[0]
    outputs = shape.out_features
    columns = shape.in_features
    packed = check_packed(packed, shape)
    exponent = _check_exponent(exponent, shape)
    bias = None if bias_N is None else check_readable(bias_N, "bias", torch.float32, (outputs,))
    if scale_M is None and torch.float64 in (x_MK.dtype, dtype):
        y = x_MK.to(torch.float64) @ _dense(packed, exponent, shape).T
        return (y if bias is None else y + bias).to(dtype)
    out = torch.empty((rows, outputs), dtype=_result_dtype(dtype), device=packed.device)
    integer = scale_M is not None
    if scale_M is not None:
        x = check_readable(x_MK, "x", torch.int8, (rows, columns))
        scale = check_readable(scale_M, "scale", torch.float32, (rows,))
    else:
        x = check_float(x_MK, "x", (rows, columns))
        scale = x
    if not out.numel():
        return out.to(dtype)
    if not columns:
        return (out.zero_() if bias is None else out.copy_(bias.expand_as(out))).to(dtype)
    bands = 1
    floor = scale
    if integer:
        floors = floors_of(exponent, shape)
        bands = _bands(floors.row_spread, columns)
        floor = floors.rows
    facts: dict[str, Any] = {"GROUP": _group(shape), "INT8": integer, "BIAS": bias is not None}
    last = scale if bias is None else bias
    if rows == 1 and bands == 1:
        one = choose_row(outputs, columns, integer, packed.device)
        pieces = _Pieces(out, one.split, integer, 1)
        x = torch.nn.functional.pad(x, (0, -columns % BLOCK))
        weight = packed
        if integer:
            x = x.view(torch.int32)
            weight = packed.view(torch.int32)
        blocks = packed_columns(columns) // LANES
        launch(
            row_kernel,
            (cdiv(outputs, one.outputs), one.split),
            x, scale, weight, exponent, floor, last, out, pieces.part,
            outputs, packed.shape[1], shape.groups, cdiv(blocks, one.split),
            DP4A=on_nvidia(), SPLIT=one.split, OUTPUTS=one.outputs, BLOCKS=one.blocks,
            warps=one.warps, stages=one.stages, **facts,
        )  # fmt: skip
        return pieces.finish(scale, 1, floor, bias, integer).to(dtype)
    tile = choose_linear(rows, outputs, columns, x.dtype, bands > 1, packed.device)
    pieces = _Pieces(out, tile.split, integer, bands)
    blocks = packed_columns(columns) // LANES
    launch(
        linear_kernel,
        (cdiv(outputs, tile.outputs), cdiv(rows, tile.rows), tile.split),
        x, scale, packed, exponent, floor, last, out, pieces.part,
        rows, outputs, columns, packed.shape[1], shape.groups, cdiv(blocks, tile.split),
        BANDS=bands, SPLIT=tile.split, ROWS=tile.rows, OUTPUTS=tile.outputs, BLOCKS=tile.blocks,
        warps=tile.warps, stages=tile.stages, **facts,
    )  # fmt: skip
    return pieces.finish(scale, 1, floor, bias, integer).to(dtype)


def linear_grad_input(
    grad_MN: Tensor,
    scale: Tensor | None,
    packed: Tensor,
    exponent: Tensor,
    shape: WeightShape,
    dtype: torch.dtype,
) -> Tensor:
    """``grad_y @ W`` from the packed weight, ``[M, K]`` in ``dtype``; an int8 gradient is summed
    exactly.
    """
    rows = grad_MN.shape[0]
    outputs = shape.out_features
    columns = shape.in_features
    packed = check_packed(packed, shape)
    exponent = _check_exponent(exponent, shape)
    if scale is None and torch.float64 in (grad_MN.dtype, dtype):
        return (grad_MN.to(torch.float64) @ _dense(packed, exponent, shape)).to(dtype)
    out = torch.empty((rows, columns), dtype=_result_dtype(dtype), device=packed.device)
    integer = scale is not None
    if scale is not None:
        grad = check_readable(grad_MN, "grad", torch.int8, (rows, outputs))
        unit = check_readable(scale, "scale", torch.float32, ())
    else:
        grad = check_float(grad_MN, "grad", (rows, outputs))
        unit = grad
    if not out.numel():
        return out.to(dtype)
    if not outputs:
        return out.zero_().to(dtype)
    bands = 1
    floor = unit
    if integer:
        floors = floors_of(exponent, shape)
        bands = _bands(floors.column_spread, outputs)
        floor = floors.columns
    tile = choose_grad_input(rows, outputs, columns, grad.dtype, bands > 1, packed.device)
    pieces = _Pieces(out, tile.split, integer, bands)
    blocks = packed_columns(columns) // LANES
    launch(
        grad_input_kernel,
        (4 * cdiv(blocks, tile.blocks), cdiv(rows, tile.rows), tile.split),
        grad, unit, packed, exponent, floor, out, pieces.part,
        rows, outputs, columns, packed.shape[1], shape.groups, cdiv(outputs, tile.split),
        GROUP=_group(shape), INT8=integer, BANDS=bands, SPLIT=tile.split,
        ROWS=tile.rows, OUTPUTS=tile.outputs, BLOCKS=tile.blocks,
        warps=tile.warps, stages=tile.stages,
    )  # fmt: skip
    return pieces.finish(unit, 0, floor, None, integer).to(dtype)


def embedding(
    ids_M: Tensor, packed: Tensor, exponent: Tensor, shape: WeightShape, dtype: torch.dtype
) -> Tensor:
    """Rows ``W[ids]``, ``[M, K]`` in ``dtype``; only the requested rows are decoded.

    Raises:
        IndexError: an id is outside ``0 .. N - 1``; on a GPU the device stops at it, as torch's
            embedding does.
    """
    ids = check_readable(ids_M, "ids", torch.int64, (ids_M.numel(),))
    packed = check_packed(packed, shape)
    exponent = _check_exponent(exponent, shape)
    columns = shape.in_features
    out = torch.empty((ids.numel(), columns), dtype=_result_dtype(dtype), device=packed.device)
    inside = ((ids >= 0) & (ids < shape.out_features)).all()
    if ids.device.type != "cpu":
        torch._assert_async(inside)  # the host does not wait for it
    elif not inside:
        raise IndexError(
            f"ids must lie in 0..{shape.out_features - 1}, got {int(ids.min())}..{int(ids.max())}"
        )
    tile = elementwise(ids.numel(), columns)
    launch(
        lookup_kernel,
        (cdiv(ids.numel(), tile.rows), cdiv(columns, tile.columns)),
        ids, packed, exponent, out, ids.numel(), columns, packed.shape[1], shape.groups,
        GROUP=_group(shape), ROWS=tile.rows, COLUMNS=tile.columns,
    )  # fmt: skip
    return out.to(dtype)
