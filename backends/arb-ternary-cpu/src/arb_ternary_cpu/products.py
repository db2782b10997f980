"""Layout, quantisation, matrix products and lookup: arguments checked, results allocated, the
native kernels called.

Meaning and signatures are those of ``arb_ternary.backends.reference``. Operands that are not
contiguous are copied; nothing that is passed in is written to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, get_num_threads

from arb_ternary.backends.arguments import check_readable
from arb_ternary.backends.protocol import WeightShape
from arb_ternary_cpu import _native
from arb_ternary_cpu.arguments import (
    WORD,
    check_exponent,
    check_packed,
    check_shape,
    float_dtype,
    packed_shape,
)


def pack(trits_NK: Tensor) -> Tensor:
    """int8 trits ``[N, K]`` to uint8 ``[ceil(N / 16), ceil(K / 16), 64]``.

    Raises:
        ValueError: a value is not -1, 0 or 1.
    """
    rows, columns = _matrix(trits_NK, "trits")
    trits = check_readable(trits_NK, "trits", torch.int8, (rows, columns))
    packed = torch.empty(packed_shape(rows, columns), dtype=torch.uint8)
    if packed.numel() and not _native.pack(
        get_num_threads(), trits.data_ptr(), rows, columns, packed.data_ptr()
    ):
        raise ValueError("trits must be -1, 0 or 1")
    return packed


def unpack(packed: Tensor, shape: WeightShape) -> Tensor:
    """A packed weight to int8 trits ``[N, K]``."""
    check_shape(shape)
    packed = check_packed(packed, shape)
    trits = torch.empty((shape.out_features, shape.in_features), dtype=torch.int8)
    if trits.numel():
        _native.unpack(
            get_num_threads(),
            packed.data_ptr(),
            shape.out_features,
            shape.in_features,
            trits.data_ptr(),
        )
    return trits


def _quantize_rows(isa: int, x_MK: Tensor, eps: float | None = None) -> tuple[Tensor, Tensor]:
    """Quantise rows, after their norm if ``eps`` is given."""
    rows, columns = _matrix(x_MK, "x")
    x, dtype = _floats(x_MK, "x")
    if not columns:
        return torch.empty((rows, 0), dtype=torch.int8), torch.zeros(rows)
    q = torch.empty((rows, columns), dtype=torch.int8)
    scale = torch.empty(rows, dtype=torch.float32)
    operands = (isa, get_num_threads(), x.data_ptr(), dtype, rows, columns)
    results = (q.data_ptr(), scale.data_ptr())
    if rows and eps is None:
        _native.quantize_rows(*operands, *results)
    elif rows and eps is not None:
        _native.norm_quantize_rows(*operands, eps, *results)
    return q, scale


def _quantize_gradient(
    isa: int, grad_MN: Tensor, seed: int, step: int, stream: int
) -> tuple[Tensor, Tensor]:
    grad, dtype = _floats(grad_MN, "grad")
    q = torch.empty(grad.shape, dtype=torch.int8)
    if not grad.numel():
        return q, torch.ones(())
    scale = torch.empty((), dtype=torch.float32)
    _native.quantize_gradient(
        isa,
        get_num_threads(),
        grad.data_ptr(),
        dtype,
        grad.numel(),
        seed & WORD,
        step & WORD,
        stream & WORD,
        q.data_ptr(),
        scale.data_ptr(),
    )
    return q, scale


def _linear(
    isa: int,
    x_MK: Tensor,
    scale_M: Tensor | None,
    packed: Tensor,
    exponent: Tensor,
    bias_N: Tensor | None,
    shape: WeightShape,
    dtype: torch.dtype,
) -> Tensor:
    return _multiply(isa, False, x_MK, scale_M, packed, exponent, bias_N, shape, dtype)


def _linear_grad_input(
    isa: int,
    grad_MN: Tensor,
    scale: Tensor | None,
    packed: Tensor,
    exponent: Tensor,
    shape: WeightShape,
    dtype: torch.dtype,
) -> Tensor:
    return _multiply(isa, True, grad_MN, scale, packed, exponent, None, shape, dtype)


def _multiply(
    isa: int,
    turned: bool,
    left: Tensor,
    scale: Tensor | None,
    packed: Tensor,
    exponent: Tensor,
    bias: Tensor | None,
    shape: WeightShape,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply rows by the weight: sums are over its columns, or over its rows if ``turned``."""
    check_shape(shape)
    name = "x"
    terms = shape.in_features
    outputs = shape.out_features
    if turned:
        name = "grad"
        terms = shape.out_features
        outputs = shape.in_features
    rows, columns = _matrix(left, name)
    if columns != terms:
        raise ValueError(f"{name} must be [M, {terms}], got {list(left.shape)}")
    packed = check_packed(packed, shape)
    exponent = check_exponent(exponent, shape)
    if bias is not None:
        bias = check_readable(bias, "bias", torch.float32, (outputs,))
    if scale is None and torch.float64 in (left.dtype, dtype):
        dense = _dense(isa, packed, exponent, shape)
        y = left.to(torch.float64) @ (dense if turned else dense.T)
        return (y if bias is None else y + bias).to(dtype)

    out = torch.empty((rows, outputs), dtype=torch.float32 if dtype is torch.float64 else dtype)
    out_dtype = float_dtype(out.dtype, "dtype")
    if scale is None:
        left, left_dtype = _floats(left, name)
    else:
        left = check_readable(left, name, torch.int8, (rows, terms))
        scale = check_readable(scale, "scale", torch.float32, () if turned else (rows,))
        left_dtype = 0
    if not out.numel() or not terms:
        out.zero_()
        return (out if bias is None else out.add_(bias)).to(dtype)

    weight = (packed.data_ptr(), exponent.data_ptr(), *_sizes(shape))
    tail: tuple[int, ...] = (out.data_ptr(), out_dtype)
    if not turned:
        tail = (0 if bias is None else bias.data_ptr(), *tail)
    threads = get_num_threads()
    if scale is None:
        run_float = _native.grad_input_float if turned else _native.linear_float
        run_float(isa, threads, left.data_ptr(), left_dtype, rows, *weight, *tail)
        return out
    run_int8 = _native.grad_input_int8 if turned else _native.linear_int8
    _check_spread(run_int8(isa, threads, left.data_ptr(), scale.data_ptr(), rows, *weight, *tail))
    return out.to(dtype)


def _embedding(
    isa: int,
    ids_M: Tensor,
    packed: Tensor,
    exponent: Tensor,
    shape: WeightShape,
    dtype: torch.dtype,
) -> Tensor:
    check_shape(shape)
    ids = check_readable(ids_M, "ids", torch.int64, (ids_M.numel(),))
    packed = check_packed(packed, shape)
    exponent = check_exponent(exponent, shape)
    out = torch.empty(
        (ids.numel(), shape.in_features), dtype=torch.float32 if dtype is torch.float64 else dtype
    )
    out_dtype = float_dtype(out.dtype, "dtype")
    bad = _native.lookup_rows(
        isa,
        get_num_threads(),
        ids.data_ptr(),
        ids.numel(),
        packed.data_ptr(),
        exponent.data_ptr(),
        *_sizes(shape),
        out.data_ptr(),
        out_dtype,
    )
    if bad >= 0:
        raise IndexError(
            f"ids must lie in 0..{shape.out_features - 1}, got {int(ids[bad])} at place {bad}"
        )
    return out.to(dtype)


def _dense(isa: int, packed: Tensor, exponent: Tensor, shape: WeightShape) -> Tensor:
    """The weight as a float64 matrix, for the gradient checks that need that dtype."""
    rows = torch.arange(shape.out_features)
    return _embedding(isa, rows, packed, exponent, shape, torch.float32).to(torch.float64)


def _matrix(tensor: Tensor, name: str) -> tuple[int, int]:
    if tensor.dim() != 2:
        raise ValueError(f"{name} must have 2 dimensions, got {list(tensor.shape)}")
    rows, columns = tensor.shape
    return rows, columns


def _floats(tensor: Tensor, name: str) -> tuple[Tensor, int]:
    """A float tensor that is only read, and the native index of its dtype; float64 is rounded to
    float32 first.
    """
    if tensor.dtype is torch.float64:
        tensor = tensor.to(torch.float32)
    index = float_dtype(tensor.dtype, name)
    return check_readable(tensor, name, tensor.dtype, tuple(tensor.shape)), index


def _sizes(shape: WeightShape) -> tuple[int, int, int, int]:
    return shape.out_features, shape.in_features, shape.groups, shape.group_size


def _check_spread(largest: int) -> None:
    if largest > _native.largest_spread:
        raise ValueError(
            f"exponents spread over {largest}; the exact integer product takes at most "
            f"{_native.largest_spread}"
        )


def kernels(isa: int) -> dict[str, Callable[..., Any]]:
    """The kernels of this module for the instruction set with this index."""
    return {
        "pack": pack,
        "unpack": unpack,
        "quantize_rows": partial(_quantize_rows, isa),
        "quantize_gradient": partial(_quantize_gradient, isa),
        "linear": partial(_linear, isa),
        "linear_grad_input": partial(_linear_grad_input, isa),
        "embedding": partial(_embedding, isa),
        "rms_norm_quantize": partial(_quantize_rows, isa),
    }
