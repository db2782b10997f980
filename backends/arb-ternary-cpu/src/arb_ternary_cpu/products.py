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


def _quantize_rows(isa: int, x_MK: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = _matrix(x_MK, "x")
    x, dtype = _floats(x_MK, "x")
    if not columns:
        return torch.empty((rows, 0), dtype=torch.int8), torch.zeros(rows)
    q = torch.empty((rows, columns), dtype=torch.int8)
    scale = torch.empty(rows, dtype=torch.float32)
    if rows:
        _native.quantize_rows(
            isa,
            get_num_threads(),
            x.data_ptr(),
            dtype,
            rows,
            columns,
            q.data_ptr(),
            scale.data_ptr(),
        )
    return q, scale


def _rms_norm_quantize(isa: int, x_MK: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows, columns = _matrix(x_MK, "x")
    x, dtype = _floats(x_MK, "x")
    if not columns:
        return torch.empty((rows, 0), dtype=torch.int8), torch.zeros(rows)
    q = torch.empty((rows, columns), dtype=torch.int8)
    scale = torch.empty(rows, dtype=torch.float32)
    if rows:
        _native.norm_quantize_rows(
            isa,
            get_num_threads(),
            x.data_ptr(),
            dtype,
            rows,
            columns,
            eps,
            q.data_ptr(),
            scale.data_ptr(),
        )
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
    check_shape(shape)
    rows, columns = _matrix(x_MK, "x")
    if columns != shape.in_features:
        raise ValueError(f"x must be [M, {shape.in_features}], got {list(x_MK.shape)}")
    packed = check_packed(packed, shape)
    exponent = check_exponent(exponent, shape)
    bias = None
    if bias_N is not None:
        bias = check_readable(bias_N, "bias", torch.float32, (shape.out_features,))
    if scale_M is None and torch.float64 in (x_MK.dtype, dtype):
        return _linear_float64(isa, x_MK, packed, exponent, bias, shape).to(dtype)
    out = torch.empty(
        (rows, shape.out_features), dtype=torch.float32 if dtype is torch.float64 else dtype
    )
    out_dtype = float_dtype(out.dtype, "dtype")
    weight = (packed.data_ptr(), exponent.data_ptr(), *_sizes(shape))
    if scale_M is None:
        x, x_dtype = _floats(x_MK, "x")
        if not out.numel() or not columns:
            return _without_terms(out, bias)
        tail = (0 if bias is None else bias.data_ptr(), out.data_ptr(), out_dtype)
        _native.linear_float(isa, get_num_threads(), x.data_ptr(), x_dtype, rows, *weight, *tail)
        return out
    x = check_readable(x_MK, "x", torch.int8, (rows, columns))
    scale = check_readable(scale_M, "scale", torch.float32, (rows,))
    if not out.numel() or not columns:
        return _without_terms(out, bias).to(dtype)
    tail = (0 if bias is None else bias.data_ptr(), out.data_ptr(), out_dtype)
    _check_spread(
        _native.linear_int8(
            isa, get_num_threads(), x.data_ptr(), scale.data_ptr(), rows, *weight, *tail
        )
    )
    return out.to(dtype)


def _linear_grad_input(
    isa: int,
    grad_MN: Tensor,
    scale: Tensor | None,
    packed: Tensor,
    exponent: Tensor,
    shape: WeightShape,
    dtype: torch.dtype,
) -> Tensor:
    check_shape(shape)
    rows, columns = _matrix(grad_MN, "grad")
    if columns != shape.out_features:
        raise ValueError(f"grad must be [M, {shape.out_features}], got {list(grad_MN.shape)}")
    packed = check_packed(packed, shape)
    exponent = check_exponent(exponent, shape)
    if scale is None and torch.float64 in (grad_MN.dtype, dtype):
        return (grad_MN.to(torch.float64) @ _dense(isa, packed, exponent, shape)).to(dtype)
    out = torch.empty(
        (rows, shape.in_features), dtype=torch.float32 if dtype is torch.float64 else dtype
    )
    out_dtype = float_dtype(out.dtype, "dtype")
    weight = (packed.data_ptr(), exponent.data_ptr(), *_sizes(shape))
    if scale is None:
        grad, grad_dtype = _floats(grad_MN, "grad")
        if not out.numel() or not columns:
            return out.zero_()
        _native.grad_input_float(
            isa,
            get_num_threads(),
            grad.data_ptr(),
            grad_dtype,
            rows,
            *weight,
            out.data_ptr(),
            out_dtype,
        )
        return out
    grad = check_readable(grad_MN, "grad", torch.int8, (rows, columns))
    scale = check_readable(scale, "scale", torch.float32, ())
    if not out.numel() or not columns:
        return out.zero_().to(dtype)
    _check_spread(
        _native.grad_input_int8(
            isa,
            get_num_threads(),
            grad.data_ptr(),
            scale.data_ptr(),
            rows,
            *weight,
            out.data_ptr(),
            out_dtype,
        )
    )
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


def _linear_float64(
    isa: int,
    x_MK: Tensor,
    packed: Tensor,
    exponent: Tensor,
    bias: Tensor | None,
    shape: WeightShape,
) -> Tensor:
    y = x_MK.to(torch.float64) @ _dense(isa, packed, exponent, shape).T
    return y if bias is None else y + bias


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


def _without_terms(out: Tensor, bias: Tensor | None) -> Tensor:
    out.zero_()
    return out if bias is None else out.add_(bias)


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
        "rms_norm_quantize": partial(_rms_norm_quantize, isa),
    }
