"""What lies between the products of a transformer's block: norms, activations, heads that turn,
quantisation.

Meaning and signatures are those of ``arb_ternary_text.models.block_kernels``. Rows are computed in
float32 and one by one: results depend neither on the number of threads nor on the other rows.
Operands that are not contiguous are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, get_num_threads

from arb_ternary.backends.arguments import check_mutable, check_readable
from arb_ternary_cpu import _native
from arb_ternary_cpu.arguments import (
    ACTIVATIONS,
    WORD,
    check_gain,
    check_gains,
    float_dtype,
    native_eps,
)


class _Rows:
    """A tensor ``[M, K]``, or ``[B, H, S, C]`` with rows ``(b, s)`` of features ``(h, c)``, as the
    kernels take it.
    """

    __slots__ = ("columns", "dtype", "native", "rows", "tensor")

    def __init__(self, x: Tensor, name: str) -> None:
        self.dtype = float_dtype(x.dtype, name)
        if x.dim() not in (2, 4):
            raise ValueError(f"{name} must have 2 or 4 dimensions, got {list(x.shape)}")
        if not x.numel() or x.stride(-1) != 1 or not x.is_cpu or x.layout is not torch.strided:
            x = check_readable(x, name, x.dtype, tuple(x.shape))
        self.tensor = x
        if x.dim() == 2:
            self.rows, self.columns = x.shape
            self.native = (1, self.columns, max(1, self.rows), 0, 0, x.stride(0))
        else:
            batch, heads, length, features = x.shape
            self.rows = batch * length
            self.columns = heads * features
            of_batch, of_head, of_position, _ = x.stride()
            self.native = (heads, features, max(1, length), of_batch, of_head, of_position)


def _normalise_quantize(
    isa: int, x: Tensor, eps: float | None, gain: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    of = _Rows(x, "x")
    gain = check_gain(gain, eps is not None, of.columns)
    q = torch.empty((of.rows, of.columns), dtype=torch.int8)
    scale = torch.zeros(of.rows)
    r = None if eps is None else torch.empty(of.rows)
    if q.numel():
        _native.normalise_quantize(
            isa,
            get_num_threads(),
            of.tensor.data_ptr(),
            of.native,
            of.dtype,
            of.rows,
            native_eps(eps),
            _address(gain),
            q.data_ptr(),
            scale.data_ptr(),
            _address(r),
        )
    return q, scale, r


def _normalise_quantize_backward(
    isa: int,
    grads: Sequence[Tensor],
    x: Tensor | None,
    r: Tensor | None,
    size: Sequence[int],
    gain: Tensor | None = None,
    grad_gain: Tensor | None = None,
) -> Tensor:
    if not 1 <= len(grads) <= 3:
        raise ValueError(f"1 to 3 gradients are added, got {len(grads)}")
    dtype = grads[0].dtype
    out = torch.empty(tuple(size), dtype=dtype)
    to = _Rows(out, "size")
    of = to
    if r is not None:
        if x is None or x.shape != out.shape or x.dtype is not dtype:
            raise ValueError(
                f"x must be {dtype} {list(size)}, got {None if x is None else [x.dtype, *x.shape]}"
            )
        of = _Rows(x, "x")
        r = check_readable(r, "r", torch.float32, (to.rows,))
    gain, gains = check_gains(gain, grad_gain, r is not None, to.columns)
    held = [check_readable(grad, "grad", dtype, (to.rows, to.columns)) for grad in grads]
    first, second, third = (*(grad.data_ptr() for grad in held), 0, 0)[:3]
    if out.numel():
        _native.normalise_back(
            isa,
            get_num_threads(),
            first,
            second,
            third,
            of.tensor.data_ptr(),
            of.native,
            _address(r),
            gains,
            to.dtype,
            to.rows,
            out.data_ptr(),
            to.native,
        )
    return out


def _activate_quantize(
    isa: int,
    gate: Tensor | None,
    up: Tensor,
    kind: str,
    eps: float | None,
    gain: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    gate, up, dtype = _hidden(gate, up, kind)
    rows, columns = up.shape
    gain = check_gain(gain, eps is not None, columns)
    q = torch.empty((rows, columns), dtype=torch.int8)
    scale = torch.zeros(rows)
    r = None if eps is None else torch.empty(rows)
    if q.numel():
        _native.activate_quantize(
            isa,
            get_num_threads(),
            ACTIVATIONS[kind],
            gate.data_ptr(),
            up.data_ptr(),
            dtype,
            rows,
            columns,
            native_eps(eps),
            _address(gain),
            q.data_ptr(),
            scale.data_ptr(),
            _address(r),
        )
    return q, scale, r


def _activate_quantize_backward(
    isa: int,
    grad: Tensor,
    gate: Tensor | None,
    up: Tensor,
    kind: str,
    r: Tensor | None,
    gain: Tensor | None = None,
    grad_gain: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    has_gate = gate is not None
    gate, up, dtype = _hidden(gate, up, kind)
    rows, columns = up.shape
    grad = check_readable(grad, "grad", up.dtype, (rows, columns))
    r = None if r is None else check_readable(r, "r", torch.float32, (rows,))
    gain, gains = check_gains(gain, grad_gain, r is not None, columns)
    grad_up = torch.empty((rows, columns), dtype=up.dtype)
    grad_gate = torch.empty((rows, columns), dtype=up.dtype) if has_gate else grad_up
    if grad_up.numel():
        _native.activate_back(
            isa,
            get_num_threads(),
            ACTIVATIONS[kind],
            grad.data_ptr(),
            gate.data_ptr(),
            up.data_ptr(),
            _address(r),
            gains,
            dtype,
            rows,
            columns,
            grad_gate.data_ptr(),
            grad_up.data_ptr(),
        )
    return grad_gate if has_gate else None, grad_up


def _hidden(gate: Tensor | None, up: Tensor, kind: str) -> tuple[Tensor, Tensor, int]:
    """Gate (``up`` where there is none) and up, contiguous, and the native index of their dtype."""
    if kind not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {tuple(ACTIVATIONS)}, got {kind!r}")
    if (gate is None) != (kind == "relu2"):
        raise ValueError(f"{kind} {'needs a' if gate is None else 'has no'} gate")
    if up.dim() != 2:
        raise ValueError(f"up must have 2 dimensions, got {list(up.shape)}")
    dtype = float_dtype(up.dtype, "up")
    size = tuple(up.shape)
    up = check_readable(up, "up", up.dtype, size)
    return up if gate is None else check_readable(gate, "gate", up.dtype, size), up, dtype


def _scale_columns_backward(
    isa: int, grad: Tensor, x: Tensor, factor: Tensor, grad_factor: Tensor
) -> Tensor:
    if grad.dim() != 2:
        raise ValueError(f"grad must have 2 dimensions, got {list(grad.shape)}")
    rows, columns = grad.shape
    dtype = float_dtype(grad.dtype, "grad")
    grad = check_readable(grad, "grad", grad.dtype, (rows, columns))
    x = check_readable(x, "x", grad.dtype, (rows, columns))
    factor = check_readable(factor, "factor", torch.float32, (columns,))
    check_mutable(grad_factor, "grad_factor", torch.float32, (columns,))
    out = torch.empty_like(grad)
    if out.numel():
        addresses = grad.data_ptr(), x.data_ptr(), (factor.data_ptr(), grad_factor.data_ptr())
        _native.scale_columns_back(
            isa, get_num_threads(), *addresses, dtype, rows, columns, out.data_ptr()
        )
    return out


def _turn_heads(
    isa: int,
    x_ME: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    heads: int,
    length: int,
    eps: float | None,
    gain: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    rows, features = _heads(x_ME, heads, length)
    gain = check_gain(gain, eps is not None, features)
    dtype = float_dtype(x_ME.dtype, "x")
    x = check_readable(x_ME, "x", x_ME.dtype, tuple(x_ME.shape))
    cos, sin = _angles(angles, length, features)
    y = torch.empty((rows // max(1, length), heads, length, features), dtype=x.dtype)
    r = None if eps is None else torch.empty((rows, heads))
    if y.numel():
        _native.turn_heads(
            isa,
            get_num_threads(),
            x.data_ptr(),
            dtype,
            rows,
            y.data_ptr(),
            _Rows(y, "y").native,
            _address(cos),
            _address(sin),
            native_eps(eps),
            _address(gain),
            _address(r),
        )
    return y, r


def _turn_heads_backward(
    isa: int,
    grad_BHSC: Tensor,
    x_ME: Tensor | None,
    angles: tuple[Tensor, Tensor] | None,
    r: Tensor | None,
    gain: Tensor | None = None,
    grad_gain: Tensor | None = None,
) -> Tensor:
    of = _Rows(grad_BHSC, "grad")
    if grad_BHSC.dim() != 4 or grad_BHSC.shape[3] % 2:
        raise ValueError(f"grad must be [B, H, S, C] with an even C, got {list(grad_BHSC.shape)}")
    _, heads, length, features = grad_BHSC.shape
    rows = of.rows
    x = None
    gain, gains = check_gains(gain, grad_gain, r is not None, features)
    if r is not None:
        if x_ME is None:
            raise ValueError("x is needed where it was normalised")
        x = check_readable(x_ME, "x", grad_BHSC.dtype, (rows, heads * features))
    cos, sin = _angles(angles, length, features)
    r = None if r is None else check_readable(r, "r", torch.float32, (rows, heads))
    out = torch.empty((rows, heads * features), dtype=grad_BHSC.dtype)
    if out.numel():
        _native.turn_heads_back(
            isa,
            get_num_threads(),
            of.tensor.data_ptr(),
            of.native,
            out.data_ptr() if x is None else x.data_ptr(),
            of.dtype,
            rows,
            _address(cos),
            _address(sin),
            _address(r),
            gains,
            out.data_ptr(),
        )
    return out


def _heads(x_ME: Tensor, heads: int, length: int) -> tuple[int, int]:
    """Rows, and features of a head."""
    if (
        x_ME.dim() != 2
        or heads < 1
        or x_ME.shape[1] % (2 * heads)
        or x_ME.shape[0] % max(1, length)
    ):
        raise ValueError(
            f"x must be [B * {length}, {heads} * C] with an even number C of features, got "
            f"{list(x_ME.shape)}"
        )
    return x_ME.shape[0], x_ME.shape[1] // heads


def _angles(
    angles: tuple[Tensor, Tensor] | None, length: int, features: int
) -> tuple[Tensor | None, Tensor | None]:
    if angles is None:
        return None, None
    cos, sin = angles
    size = (length, features // 2)
    return check_readable(cos, "cos", torch.float32, size), check_readable(
        sin, "sin", torch.float32, size
    )


def _quantize_gradients(
    isa: int,
    grad_MN: Tensor,
    row_scale_M: Tensor,
    seed: int,
    step: int,
    stream: int,
    folded_stream: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if grad_MN.dim() != 2:
        raise ValueError(f"grad must have 2 dimensions, got {list(grad_MN.shape)}")
    if grad_MN.numel() >= 1 << 32:
        raise ValueError(f"grad must have fewer than 2**32 elements, got {list(grad_MN.shape)}")
    rows, columns = grad_MN.shape
    dtype = float_dtype(grad_MN.dtype, "grad")
    grad = check_readable(grad_MN, "grad", grad_MN.dtype, (rows, columns))
    row_scale = check_readable(row_scale_M, "row_scale", torch.float32, (rows,))
    q = torch.empty((rows, columns), dtype=torch.int8)
    folded = torch.empty((rows, columns), dtype=torch.int8)
    scales = torch.ones(2)
    if q.numel():
        words = (seed & WORD, step & WORD, stream & WORD, folded_stream & WORD)
        tail = (q.data_ptr(), folded.data_ptr(), scales.data_ptr())
        _native.quantize_both(
            isa,
            get_num_threads(),
            grad.data_ptr(),
            dtype,
            rows,
            columns,
            row_scale.data_ptr(),
            *words,
            *tail,
        )
    return q, scales[0], folded, scales[1]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def kernels(isa: int) -> dict[str, Callable[..., Any]]:
    """The kernels of this module for the instruction set with this index."""
    return {
        "text.normalise_quantize": partial(_normalise_quantize, isa),
        "text.normalise_quantize_backward": partial(_normalise_quantize_backward, isa),
        "text.activate_quantize": partial(_activate_quantize, isa),
        "text.activate_quantize_backward": partial(_activate_quantize_backward, isa),
        "text.scale_columns_backward": partial(_scale_columns_backward, isa),
        "text.turn_heads": partial(_turn_heads, isa),
        "text.turn_heads_backward": partial(_turn_heads_backward, isa),
        "quantize_gradients": partial(_quantize_gradients, isa),
    }
