"""Convolutions: patches of an image quantised, multiplied and summed up again, without the patches
as floats.

Windows and rows are those of ``arb_ternary_vision.patches``; an image may have any strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, get_num_threads

from arb_ternary.backends.arguments import check_readable
from arb_ternary.backends.protocol import WeightShape
from arb_ternary_cpu import _native
from arb_ternary_cpu.arguments import check_exponent, check_packed, check_shape, float_dtype


def _image(x: Tensor) -> tuple[Tensor, tuple[int, int, tuple[int, ...]]]:
    """An image and its address, dtype, sizes and strides; float64 is rounded to float32 first."""
    if x.dim() != 4:
        raise ValueError(f"x must be [B, C, H, W], got {list(x.shape)}")
    if not x.is_cpu or x.layout is not torch.strided:
        raise TypeError(f"x must be a dense tensor on the CPU, got {x.layout} on {x.device}")
    x = x.resolve_neg()
    if x.dtype is torch.float64:
        x = x.to(torch.float32)
    return x, (x.data_ptr(), float_dtype(x.dtype, "x"), (*x.shape, *x.stride()))


def _places(size: Sequence[int], window: Sequence[int]) -> tuple[int, int]:
    """Where a window fits into an image of ``size``: ``H', W'``."""
    taps, gaps, pads, steps = (window[at : at + 2] for at in (0, 2, 4, 6))
    high, wide = (
        (size[axis] + 2 * pads[axis] - gaps[axis] * (taps[axis] - 1) - 1) // steps[axis] + 1
        for axis in (0, 1)
    )
    if high < 1 or wide < 1:
        raise ValueError(
            f"an image of {[*size]} with padding {[*pads]} is smaller than the kernel {(*taps,)}"
        )
    return high, wide


def _rows(x: Tensor, window: Sequence[int]) -> tuple[int, int]:
    """``M`` and ``K``."""
    if len(window) != 8 or min(window[:4]) < 1 or min(window[4:6]) < 0 or min(window[6:]) < 1:
        raise ValueError(
            f"a window is taps, dilation, padding and stride, each down and across, got {[*window]}"
        )
    high, wide = _places(x.shape[2:], window)
    return x.shape[0] * high * wide, x.shape[1] * window[0] * window[1]


def _unfold_quantize(isa: int, x_BCHW: Tensor, window: Sequence[int]) -> tuple[Tensor, Tensor]:
    x, image = _image(x_BCHW)
    rows, columns = _rows(x, window)
    q = torch.empty((rows, columns), dtype=torch.int8)
    scale = torch.zeros(rows)
    if q.numel():
        _native.quantize_patches(
            isa, get_num_threads(), *image, tuple(window), q.data_ptr(), scale.data_ptr()
        )
    return q, scale


def _convolve(
    isa: int,
    linear: Callable[..., Tensor],
    x_BCHW: Tensor,
    packed: Tensor,
    exponent: Tensor,
    bias_N: Tensor | None,
    shape: WeightShape,
    window: Sequence[int],
) -> Tensor:
    """``linear`` multiplies where sums need more than 32 bits, and where there is nothing to
    sum.
    """
    check_shape(shape)
    x, image = _image(x_BCHW)
    rows, columns = _rows(x, window)
    if columns != shape.in_features:
        raise ValueError(
            f"patches of {columns} elements do not fit a weight of {shape.in_features} columns"
        )
    packed = check_packed(packed, shape)
    exponent = check_exponent(exponent, shape)
    bias = (
        None
        if bias_N is None
        else check_readable(bias_N, "bias", torch.float32, (shape.out_features,))
    )
    out = torch.empty((rows, shape.out_features), dtype=x.dtype)
    done = bool(out.numel() and columns) and _native.convolve_int8(
        isa,
        get_num_threads(),
        *image,
        tuple(window),
        packed.data_ptr(),
        exponent.data_ptr(),
        shape.out_features,
        shape.in_features,
        shape.groups,
        shape.group_size,
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        float_dtype(out.dtype, "x"),
    )
    if done:
        return out.to(x_BCHW.dtype)
    q, scale = _unfold_quantize(isa, x, window)
    return linear(q, scale, packed, exponent, bias, shape, x_BCHW.dtype)


def _fold_patches(rows_MK: Tensor, size: Sequence[int], window: Sequence[int]) -> Tensor:
    batch, height, width, channels = size
    out = torch.empty((batch, height, width, channels))
    rows = check_readable(rows_MK, "rows", torch.float32, _rows(out.permute(0, 3, 1, 2), window))
    image = (batch, channels, height, width)
    _native.fold_patches(get_num_threads(), rows.data_ptr(), image, tuple(window), out.data_ptr())
    return out


def kernels(isa: int, linear: Callable[..., Tensor]) -> dict[str, Callable[..., object]]:
    """The kernels of this module for the instruction set with this index, beside its ``linear``."""
    return {
        "vision.unfold_quantize": partial(_unfold_quantize, isa),
        "vision.convolve": partial(_convolve, isa, linear),
        "vision.fold_patches": _fold_patches,
    }
