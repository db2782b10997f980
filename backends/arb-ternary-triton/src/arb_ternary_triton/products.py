"""Matrix products and lookup: check arguments, allocate results, launch kernels.

Meaning and signatures are those of ``arb_ternary.backends.reference``.
"""

from __future__ import annotations

from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.backends import arguments
from arb_ternary.backends.arguments import check_ids
from arb_ternary.backends.floors import floors_of
from arb_ternary.backends.integer import INT8_SPREAD, check_spread
from arb_ternary.backends.protocol import WeightShape
from arb_ternary_triton.arguments import (
    BLOCK,
    LANES,
    check_float,
    check_packed,
    check_readable,
)
from arb_ternary_triton.kernels.products import (
    finish_kernel,
    grad_input_kernel,
    linear_kernel,
    lookup_kernel,
    row_kernel,
)
from arb_ternary_triton.launch import INTERPRETED, cdiv, instruction_set, launch
from arb_ternary_triton.layout import unpack
from arb_ternary_triton.tiles import (
    ProductTile,
    choose_grad_input,
    choose_linear,
    choose_row,
    elementwise,
)

#: Longest sum of int8 activations and trits shifted by up to 6 that fits in 32 bits.
_INT32_TERMS: Final = (2**31 - 1) // (127 << INT8_SPREAD)
#: Bands of 7 shifts that serve a spread of 40.
_BANDS: Final = 6


def _bands(spread: int, terms: int) -> int:
    """Return the number of bands that a sum takes; one band is summed in 32 bits."""
    check_spread(spread)
    return 1 if spread <= INT8_SPREAD and terms <= _INT32_TERMS else _BANDS


def _group(shape: WeightShape) -> int:
    """Return the columns per exponent as kernels take it: 0 for one exponent per row."""
    return shape.group_size if shape.groups > 1 else 0


def _check_exponent(exponent: Tensor, shape: WeightShape) -> Tensor:
    return check_readable(exponent, "exponent", torch.int8, (shape.out_features, shape.groups))


def _dense(packed: Tensor, exponent: Tensor, shape: WeightShape) -> Tensor:
    """Return the weight as a float64 matrix, for gradient checks in that dtype."""
    scale = torch.exp2(exponent.to(torch.float64))
    scale = scale.repeat_interleave(max(1, shape.group_size), dim=1)
    return unpack(packed, shape) * scale[:, : shape.in_features]


def _result_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a kernel writes.

    The interpreter truncates to bfloat16 instead of rounding, so there kernels write float32.
    """
    if dtype is torch.float64 or (INTERPRETED and dtype is torch.bfloat16):
        return torch.float32
    arguments.check_float(dtype, "dtype", "triton")
    return dtype


@frozen(eq=False)
class _Product:
    """Checked operands of a product with a packed weight, and its result.

    Attributes:
        left: activations or the gradient.
        scale: their row scales, or one scale of a gradient; None for float operands.
        floor: int32 units of the sums; any tensor for float operands.
        out: the result.
        turned: whether the sum is over the rows of the weight.
        bands: bands that the sums take.
    """

    left: Tensor
    scale: Tensor | None
    packed: Tensor
    exponent: Tensor
    floor: Tensor
    bias: Tensor | None
    out: Tensor
    shape: WeightShape
    turned: bool
    bands: int

    @property
    def integer(self) -> bool:
        """Whether operands are int8."""
        return self.scale is not None

    @property
    def blocks(self) -> int:
        """Blocks of 128 columns of a row of the weight."""
        return self.packed.shape[1] // LANES

    @property
    def scale_argument(self) -> Tensor:
        """The scale, or a placeholder that kernels do not read."""
        return self.left if self.scale is None else self.scale

    @property
    def bias_argument(self) -> Tensor:
        """The bias, or a placeholder that kernels do not read."""
        return self.scale_argument if self.bias is None else self.bias

    def options(self, tile: ProductTile) -> dict[str, int]:
        """Return the compile-time arguments and options that all kernels of products take."""
        return {
            "GROUP": _group(self.shape),
            "INT8": self.integer,
            "ISA": instruction_set(self.packed.device),
            "SPLIT": tile.split,
            "OUTPUTS": tile.outputs,
            "BLOCKS": tile.blocks,
            "warps": tile.warps,
            "stages": tile.stages,
        }

    def parts(self, split: int) -> Tensor:
        """Allocate the partial sums of ``split`` programs; the result itself if they are one."""
        if split == 1:
            return self.out
        dtype = torch.float32
        if self.integer:
            dtype = torch.int32 if self.bands == 1 else torch.int64
        return torch.empty((split, *self.out.shape), dtype=dtype, device=self.out.device)

    def finish(self, parts: Tensor, split: int) -> Tensor:
        """Add up partial sums, if there are several, and return the result."""
        if split == 1:
            return self.out
        rows, columns = self.out.shape
        tile = elementwise(rows, columns)
        launch(
            finish_kernel,
            (cdiv(rows, tile.rows), cdiv(columns, tile.columns)),
            parts,
            self.scale_argument,
            0 if self.turned else 1,
            self.floor,
            self.bias_argument,
            self.out,
            rows,
            columns,
            INT8=self.integer,
            SPLIT=split,
            BIAS=self.bias is not None,
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
    """Return ``x @ W.T + bias``, ``[M, N]`` in ``dtype``; int8 rows with scales sum exactly."""
    return _multiply(False, x_MK, scale_M, packed, exponent, bias_N, shape, dtype)


def linear_grad_input(
    grad_MN: Tensor,
    scale: Tensor | None,
    packed: Tensor,
    exponent: Tensor,
    shape: WeightShape,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``grad_y @ W``, ``[M, K]`` in ``dtype``; an int8 gradient sums exactly."""
    return _multiply(True, grad_MN, scale, packed, exponent, None, shape, dtype)


def _multiply(
    turned: bool,
    left: Tensor,
    scale: Tensor | None,
    packed: Tensor,
    exponent: Tensor,
    bias: Tensor | None,
    shape: WeightShape,
    dtype: torch.dtype,
) -> Tensor:
    rows = left.shape[0]
    name = "x"
    terms = shape.in_features
    columns = shape.out_features
    if turned:
        name = "grad"
        terms = shape.out_features
        columns = shape.in_features
    packed = check_packed(packed, shape)
    exponent = _check_exponent(exponent, shape)
    if bias is not None:
        bias = check_readable(bias, "bias", torch.float32, (columns,))
    if scale is None and torch.float64 in (left.dtype, dtype):
        dense = _dense(packed, exponent, shape)
        y = left.to(torch.float64) @ (dense if turned else dense.T)
        return (y if bias is None else y + bias).to(dtype)

    out = torch.empty((rows, columns), dtype=_result_dtype(dtype), device=packed.device)
    if scale is None:
        left = check_float(left, name, (rows, terms))
    else:
        left = check_readable(left, name, torch.int8, (rows, terms))
        scale = check_readable(scale, "scale", torch.float32, () if turned else (rows,))
    if not out.numel():
        return out.to(dtype)
    if not terms:
        out.zero_()
        if bias is not None:
            out.copy_(bias.expand_as(out))
        return out.to(dtype)

    bands = 1
    floor = left
    if scale is not None:
        floors = floors_of(exponent, shape)
        bands = _bands(floors.column_spread if turned else floors.row_spread, terms)
        floor = floors.columns if turned else floors.rows
    product = _Product(left, scale, packed, exponent, floor, bias, out, shape, turned, bands)
    if turned:
        y = _multiply_turned(product)
    elif rows == 1 and bands == 1:
        y = _multiply_row(product)
    else:
        y = _multiply_rows(product)
    return y if y.dtype is dtype else y.to(dtype)


def _multiply_row(product: _Product) -> Tensor:
    """Multiply one row of activations."""
    shape = product.shape
    outputs = shape.out_features
    columns = shape.in_features
    packed = product.packed
    tile = choose_row(outputs, columns, product.integer, packed.device)
    parts = product.parts(tile.split)
    x = product.left
    if columns % BLOCK:
        x = torch.nn.functional.pad(x, (0, -columns % BLOCK))
    if product.integer:
        x = x.view(torch.int32)
    launch(
        row_kernel,
        (cdiv(outputs, tile.outputs), tile.split),
        x,
        product.scale_argument,
        packed.view(torch.int32),
        product.exponent,
        product.floor,
        product.bias_argument,
        product.out,
        parts,
        outputs,
        packed.shape[1],
        shape.groups,
        tile.blocks * cdiv(product.blocks, tile.blocks * tile.split),
        BIAS=product.bias is not None,
        **product.options(tile),
    )
    return product.finish(parts, tile.split)


def _multiply_rows(product: _Product) -> Tensor:
    """Multiply several rows of activations, in tiles."""
    shape = product.shape
    rows = product.left.shape[0]
    outputs = shape.out_features
    columns = shape.in_features
    packed = product.packed
    wide = product.bands > 1
    tile = choose_linear(rows, outputs, columns, product.left.dtype, wide, packed.device)
    parts = product.parts(tile.split)
    launch(
        linear_kernel,
        (cdiv(outputs, tile.outputs), cdiv(rows, tile.rows), tile.split),
        product.left,
        product.scale_argument,
        packed.view(torch.int32),
        product.exponent,
        product.floor,
        product.bias_argument,
        product.out,
        parts,
        rows,
        outputs,
        columns,
        packed.shape[1],
        shape.groups,
        tile.blocks * cdiv(product.blocks, tile.blocks * tile.split),
        BANDS=product.bands,
        BIAS=product.bias is not None,
        ROWS=tile.rows,
        **product.options(tile),
    )
    return product.finish(parts, tile.split)


def _multiply_turned(product: _Product) -> Tensor:
    """Multiply a gradient of outputs, whose sums are over the rows of the weight."""
    shape = product.shape
    rows = product.left.shape[0]
    outputs = shape.out_features
    columns = shape.in_features
    packed = product.packed
    wide = product.bands > 1
    tile = choose_grad_input(rows, outputs, columns, product.left.dtype, wide, packed.device)
    parts = product.parts(tile.split)
    launch(
        grad_input_kernel,
        (4 * cdiv(product.blocks, tile.blocks), cdiv(rows, tile.rows), tile.split),
        product.left,
        product.scale_argument,
        packed.view(torch.int32),
        product.exponent,
        product.floor,
        product.out,
        parts,
        rows,
        outputs,
        columns,
        packed.shape[1],
        shape.groups,
        cdiv(outputs, tile.split),
        BANDS=product.bands,
        ROWS=tile.rows,
        **product.options(tile),
    )
    return product.finish(parts, tile.split)


def embedding(
    ids_M: Tensor, packed: Tensor, exponent: Tensor, shape: WeightShape, dtype: torch.dtype
) -> Tensor:
    """Return rows ``W[ids]``, ``[M, K]`` in ``dtype``; only the requested rows are decoded.

    Raises:
        IndexError: an id is outside ``0 .. N - 1``. On a GPU it is a device-side assertion, as for
            torch's embedding.
    """
    ids = check_readable(ids_M, "ids", torch.int64, (ids_M.numel(),))
    packed = check_packed(packed, shape)
    exponent = _check_exponent(exponent, shape)
    count = ids.numel()
    columns = shape.in_features
    out = torch.empty((count, columns), dtype=_result_dtype(dtype), device=packed.device)
    check_ids(ids, shape.out_features)
    tile = elementwise(count, columns)
    launch(
        lookup_kernel,
        (cdiv(count, tile.rows), cdiv(columns, tile.columns)),
        ids,
        packed,
        exponent,
        out,
        count,
        columns,
        packed.shape[1],
        shape.groups,
        GROUP=_group(shape),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
    )
    return out.to(dtype)
