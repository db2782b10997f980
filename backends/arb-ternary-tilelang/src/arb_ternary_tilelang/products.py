"""Layout, quantisation, matrix products and lookup: arguments checked, results allocated, kernels
launched.

Meaning and signatures are those of ``arb_ternary.backends.reference``. Operands that are not
contiguous are copied; nothing that is passed in is written to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from arb_ternary.backends.protocol import WeightShape
from arb_ternary_tilelang.arguments import (
    FLOATS,
    UNIT,
    check_ids,
    check_shape,
    float_name,
    keys,
    packed_bytes,
    readable,
    require,
    words,
)
from arb_ternary_tilelang.kernels import products as programs
from arb_ternary_tilelang.kernels import rows as row_programs
from arb_ternary_tilelang.kernels import storage
from arb_ternary_tilelang.lane import Lane, Tiles
from arb_ternary_tilelang.lanes import lane_of
from arb_ternary_tilelang.levels import BAND, Levels, levels_of

#: Rows up to which each is multiplied by itself, and up to which the sum is split among blocks.
GEMV_ROWS: Final = 4
FEW_ROWS: Final = 64
#: Terms of a sum below which it is not split.
_SPLIT_TERMS: Final = 1024
_MOST_SPLITS: Final = 8


def kernels() -> dict[str, Callable[..., object]]:
    """The kernels of this module."""
    return {
        "pack": pack,
        "unpack": unpack,
        "quantize_rows": quantize_rows,
        "quantize_gradient": quantize_gradient,
        "rms_norm_quantize": rms_norm_quantize,
        "linear": linear,
        "linear_grad_input": linear_grad_input,
        "embedding": embedding,
    }


# --- layout


def pack(trits_NK: Tensor) -> Tensor:
    """int8 trits ``[N, K]`` to uint8 ``[N, 4 * ceil(K / 16)]``."""
    require(trits_NK.dim() == 2, f"trits must be [N, K], got {list(trits_NK.shape)}")
    rows, columns = trits_NK.shape
    trits = readable(trits_NK, "trits", torch.int8, (rows, columns), trits_NK.device)
    packed = torch.empty((rows, packed_bytes(columns)), dtype=torch.uint8, device=trits.device)
    if packed.numel():
        lane_of(trits.device).kernel(storage.pack, N=rows, K=columns)(trits, words(packed))
    return packed


def unpack(packed: Tensor, shape: WeightShape) -> Tensor:
    """A packed weight to int8 trits ``[N, K]``."""
    held = _packed(packed, shape)
    trits = torch.empty(
        (shape.out_features, shape.in_features), dtype=torch.int8, device=packed.device
    )
    if trits.numel():
        lane = lane_of(packed.device)
        lane.kernel(storage.unpack, N=shape.out_features, K=shape.in_features)(words(held), trits)
    return trits


def _packed(packed: Tensor, shape: WeightShape) -> Tensor:
    check_shape(shape)
    size = (shape.out_features, packed_bytes(shape.in_features))
    return readable(packed, "packed", torch.uint8, size, packed.device)


def _exponent(exponent: Tensor, packed: Tensor, shape: WeightShape) -> Tensor:
    return readable(
        exponent, "exponent", torch.int8, (shape.out_features, shape.groups), packed.device
    )


# --- quantisation


def _floats(tensor: Tensor, name: str, lane: Lane) -> tuple[Tensor, str]:
    """A contiguous float tensor of a type that the lane's kernels read, and its name."""
    found = float_name(tensor.dtype, name)
    if not lane.cuda and found != "float32":
        tensor = tensor.to(torch.float32)
        found = "float32"
    return readable(tensor, name, tensor.dtype, tuple(tensor.shape), tensor.device), found


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
        lane.kernel(row_programs.quantize_rows, dtype, lane.option(norm), K=columns)(
            x, q, scale, eps, int(norm)
        )
    return q, scale


def quantize_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Per-row absolute-maximum quantisation: int8 ``[M, K]`` and float32 ``[M]``."""
    return _rows(x_MK, False, 0.0)


def rms_norm_quantize(x_MK: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm without gain, then :func:`quantize_rows`."""
    return _rows(x_MK, True, eps)


def quantize_gradient(grad_MN: Tensor, seed: int, step: int, stream: int) -> tuple[Tensor, Tensor]:
    """Stochastic rounding to int8 with one power of two; nothing waits for the device."""
    lane = lane_of(grad_MN.device)
    grad, dtype = _floats(grad_MN, "grad", lane)
    q = torch.empty(grad.shape, dtype=torch.int8, device=grad.device)
    if not grad.numel():
        return q, torch.ones((), device=grad.device)
    flat = grad.view(-1)
    tops = torch.empty(
        -(-flat.shape[0] // (UNIT * lane.width)), dtype=torch.int32, device=grad.device
    )
    lane.kernel(row_programs.largest, dtype)(flat, tops)
    scale = torch.empty(1, dtype=torch.float32, device=grad.device)
    top = tops.amax(dim=0, keepdim=True)
    words_of_hash = keys(seed, step, stream, flat.shape[0])
    lane.kernel(row_programs.quantize_gradient, dtype)(flat, top, q.view(-1), scale, *words_of_hash)
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
    """``x @ W.T + bias``: ``[M, N]`` in ``dtype``."""
    return _product(False, x_MK, scale_M, packed, exponent, bias_N, shape, dtype)


def linear_grad_input(
    grad_MN: Tensor,
    scale: Tensor | None,
    packed: Tensor,
    exponent: Tensor,
    shape: WeightShape,
    dtype: torch.dtype,
) -> Tensor:
    """``grad_y @ W``: ``[M, K]`` in ``dtype``."""
    return _product(True, grad_MN, scale, packed, exponent, None, shape, dtype)


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
    lane = lane_of(packed.device)
    device = packed.device
    held = words(_packed(packed, shape))
    powers = _exponent(exponent, packed, shape)
    terms, columns = (shape.out_features, shape.in_features)[:: 1 if turned else -1]
    require(a_MR.dim() == 2, f"the left operand must be [M, {terms}], got {list(a_MR.shape)}")
    rows = a_MR.shape[0]
    float_name(dtype, "result")
    added = None if bias is None else readable(bias, "bias", torch.float32, (columns,), device)
    if 0 in (rows, terms, columns):
        empty = torch.zeros((rows, columns), dtype=torch.float32, device=device)
        return (empty if added is None else empty + added).to(dtype)
    out = dtype if lane.cuda else torch.float32
    options = (lane, turned, a_MR, held, powers, added, shape, out)
    if scale is None:
        return _float_product(*options).to(dtype)
    sizes = (1,) if turned else (rows,)
    factors = readable(
        scale.reshape(sizes) if turned else scale, "scale", torch.float32, sizes, device
    )
    return _int8_product(*options, factors, levels_of(exponent, shape, turned)).to(dtype)


def _float_product(
    lane: Lane,
    turned: bool,
    a_MR: Tensor,
    held: Tensor,
    exponent: Tensor,
    added: Tensor | None,
    shape: WeightShape,
    out: torch.dtype,
) -> Tensor:
    a, mode = _floats(a_MR, "the left operand", lane)
    terms, columns = (shape.out_features, shape.in_features)[:: 1 if turned else -1]
    a = readable(a, "the left operand", a.dtype, (a.shape[0], terms), held.device)
    result = torch.empty((1, a.shape[0], columns), dtype=out, device=held.device)
    none = torch.empty(0, device=held.device)
    biased = added is not None
    kernel = lane.kernel(
        programs.product,
        turned,
        mode,
        FLOATS[out],
        lane.option(biased),
        _tiles(lane, a.shape[0]),
        1,
        **_sizes(shape),
    )
    bias = none if added is None else added
    kernel(
        a, none, held, exponent, none.to(torch.int32), bias, result, shape.group_size, int(biased)
    )
    return result[0]


def _int8_product(
    lane: Lane,
    turned: bool,
    a_MR: Tensor,
    held: Tensor,
    exponent: Tensor,
    added: Tensor | None,
    shape: WeightShape,
    out: torch.dtype,
    scale: Tensor,
    levels: Levels,
) -> Tensor:
    terms, columns = (shape.out_features, shape.in_features)[:: 1 if turned else -1]
    a = readable(a_MR, "the left operand", torch.int8, (a_MR.shape[0], terms), held.device)
    rows = a.shape[0]
    device = held.device
    sizes = _sizes(shape)
    require(
        terms * (127 << (BAND - 1)) < 2**31,
        f"the tilelang backend sums at most {2**31 // 8128} terms, got {terms}",
    )
    bias = torch.empty(0, device=device) if added is None else added
    name = FLOATS[out]
    biased = added is not None
    group = shape.group_size
    given = lane.option(biased)
    tiles = _tiles(lane, rows)
    if len(levels.bands) > 1:
        total = torch.zeros((rows, columns), dtype=torch.int64, device=device)
        part = torch.empty((1, rows, columns), dtype=torch.int32, device=device)
        kernel = lane.kernel(
            programs.product, turned, programs.SUMS, "int32", lane.option(False), tiles, 1, **sizes
        )
        for index, level in enumerate(levels.bands):
            kernel(a, scale, held, level, levels.floor, bias, part, group, 0)
            total += part[0].to(torch.int64) << (BAND * index)
        factor = ((levels.floor + 127) << 23).view(torch.float32)
        y = total.to(torch.float32).mul_(scale if turned else scale.unsqueeze(1)).mul_(factor)
        return (y if added is None else y.add_(added)).to(out)
    level = levels.bands[0]
    if rows <= GEMV_ROWS and not turned:
        result = torch.empty((rows, columns), dtype=out, device=device)
        chunk = 4 if lane.cuda and held.shape[1] % 4 == 0 else 1
        padded = a if terms % UNIT == 0 else torch.nn.functional.pad(a, (0, -terms % UNIT))
        kernel = lane.kernel(programs.gemv, name, given, chunk, **sizes)
        kernel(words(padded), scale, held, level, levels.floor, bias, result, group, int(biased))
        return result
    splits = _splits(lane, rows, terms)
    if splits == 1:
        result = torch.empty((1, rows, columns), dtype=out, device=device)
        kernel = lane.kernel(programs.product, turned, "int8", name, given, tiles, 1, **sizes)
        kernel(a, scale, held, level, levels.floor, bias, result, group, int(biased))
        return result[0]
    parts = torch.empty((splits, rows, columns), dtype=torch.int32, device=device)
    result = torch.empty((rows, columns), dtype=out, device=device)
    kernel = lane.kernel(
        programs.product, turned, programs.SUMS, "int32", lane.option(False), tiles, splits, **sizes
    )
    kernel(a, scale, held, level, levels.floor, bias, parts, group, 0)
    lane.kernel(programs.finish, turned, name, given)(
        parts, scale, levels.floor, bias, result, int(biased)
    )
    return result


def _sizes(shape: WeightShape) -> dict[str, int]:
    return {"N": shape.out_features, "K": shape.in_features, "G": shape.group_size}


def _tiles(lane: Lane, rows: int) -> Tiles:
    return lane.few_tiles if rows <= FEW_ROWS else lane.tiles


def _splits(lane: Lane, rows: int, terms: int) -> int:
    """Parts of the sum, so that products with few rows occupy the whole device."""
    return min(_MOST_SPLITS, max(1, terms // _SPLIT_TERMS)) if rows <= FEW_ROWS else 1


def embedding(
    ids_M: Tensor, packed: Tensor, exponent: Tensor, shape: WeightShape, dtype: torch.dtype
) -> Tensor:
    """Rows ``W[ids]``, ``[M, K]``; only the requested rows are decoded.

    Raises:
        IndexError: an id is outside ``0 .. N - 1``; see :func:`check_ids`.
    """
    lane = lane_of(packed.device)
    device = packed.device
    held = words(_packed(packed, shape))
    powers = _exponent(exponent, packed, shape)
    require(ids_M.dim() == 1, f"ids must be [M], got {list(ids_M.shape)}")
    ids = readable(ids_M, "ids", torch.int64, tuple(ids_M.shape), device)
    float_name(dtype, "result")
    out = dtype if lane.cuda else torch.float32
    rows = torch.empty((ids.shape[0], shape.in_features), dtype=out, device=device)
    if not rows.numel():
        return rows.to(dtype)
    check_ids(ids, shape.out_features)
    lane.kernel(programs.lookup, FLOATS[out], **_sizes(shape))(
        ids, held, powers, rows, shape.group_size
    )
    return rows.to(dtype)
