"""Causal softmax attention of the heads that linears give, in one call, and its gradients in
another.

Meaning and signatures are those of ``arb_ternary_text.models.block_kernels``. A sequence and a key
head are computed by one thread: results depend neither on the number of threads nor on other
sequences. Operands that are not contiguous are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, get_num_threads

from arb_ternary.backends.arguments import check_readable
from arb_ternary_cpu import _native
from arb_ternary_cpu.arguments import check_gain, check_grad_gain, float_dtype, native_eps

_Angles = tuple[Tensor, Tensor]
_Five = tuple[int, int, int, int, int]
_Seven = tuple[int, int, int, int, int, int, int]


class _Attended(NamedTuple):
    """Checked operands: those that are read, their addresses, the native index of their dtype, and
    sizes.
    """

    held: tuple[Tensor, ...]
    addresses: _Seven
    dtype: int
    sizes: _Five


def _attended(
    query_ME: Tensor,
    key_MF: Tensor,
    value_MF: Tensor,
    angles: _Angles | None,
    heads: int,
    key_heads: int,
    length: int,
    eps: tuple[float | None, float | None],
    gains: tuple[Tensor | None, Tensor | None],
) -> _Attended:
    """The operands, contiguous, of ``M = B * length`` rows."""
    if (
        query_ME.dim() != 2
        or heads < 1
        or query_ME.shape[1] % (2 * heads)
        or query_ME.shape[0] % max(1, length)
    ):
        raise ValueError(
            f"query must be [B * {length}, {heads} * C] with an even number C of features, got "
            f"{list(query_ME.shape)}"
        )
    if key_heads < 1 or heads % key_heads:
        raise ValueError(
            f"the number of heads must be a multiple of key_heads, got {heads} and {key_heads}"
        )
    rows = query_ME.shape[0]
    features = query_ME.shape[1] // heads
    dtype = float_dtype(query_ME.dtype, "query")
    size = (rows, key_heads * features)
    query = check_readable(query_ME, "query", query_ME.dtype, (rows, heads * features))
    key = check_readable(key_MF, "key", query.dtype, size)
    value = check_readable(value_MF, "value", query.dtype, size)
    turned: tuple[Tensor, ...] = ()
    if angles is not None:
        planes = (length, features // 2)
        turned = (
            check_readable(angles[0], "cos", torch.float32, planes),
            check_readable(angles[1], "sin", torch.float32, planes),
        )
    cos, sin = (each.data_ptr() for each in turned) if turned else (0, 0)
    query_gain = check_gain(gains[0], eps[0] is not None, features, "query_gain")
    key_gain = check_gain(gains[1], eps[1] is not None, features, "key_gain")
    sizes = (rows // max(1, length), length, heads, key_heads, features)
    of_gains = [0 if gain is None else gain.data_ptr() for gain in (query_gain, key_gain)]
    addresses = (
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        cos,
        sin,
        of_gains[0],
        of_gains[1],
    )
    gained = [gain for gain in (query_gain, key_gain) if gain is not None]
    return _Attended((query, key, value, *turned, *gained), addresses, dtype, sizes)


def _attend(
    isa: int,
    query_ME: Tensor,
    key_MF: Tensor,
    value_MF: Tensor,
    angles: _Angles | None,
    heads: int,
    key_heads: int,
    length: int,
    query_eps: float | None,
    key_eps: float | None,
    query_gain: Tensor | None = None,
    key_gain: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    normed = (query_eps, key_eps)
    gains = (query_gain, key_gain)
    of = _attended(query_ME, key_MF, value_MF, angles, heads, key_heads, length, normed, gains)
    seen = torch.empty_like(of.held[0])
    logs = torch.empty((of.sizes[0], heads, length))
    if seen.numel():
        eps = (native_eps(query_eps), native_eps(key_eps))
        _native.attend(
            isa,
            get_num_threads(),
            of.addresses,
            of.dtype,
            of.sizes,
            *eps,
            seen.data_ptr(),
            logs.data_ptr(),
        )
    return seen, logs


def _attend_backward(
    isa: int,
    grad_ME: Tensor,
    query_ME: Tensor,
    key_MF: Tensor,
    value_MF: Tensor,
    seen_ME: Tensor,
    logs_BHS: Tensor,
    angles: _Angles | None,
    heads: int,
    key_heads: int,
    length: int,
    query_eps: float | None,
    key_eps: float | None,
    query_gain: Tensor | None = None,
    key_gain: Tensor | None = None,
    grad_query_gain: Tensor | None = None,
    grad_key_gain: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    normed = (query_eps, key_eps)
    gains = (query_gain, key_gain)
    of = _attended(query_ME, key_MF, value_MF, angles, heads, key_heads, length, normed, gains)
    query, key, value, *_ = of.held
    to_query = check_grad_gain(query_gain, grad_query_gain, "query_gain")
    to_key = check_grad_gain(key_gain, grad_key_gain, "key_gain")
    grad = check_readable(grad_ME, "grad", query.dtype, tuple(query.shape))
    seen = check_readable(seen_ME, "seen", query.dtype, tuple(query.shape))
    logs = check_readable(logs_BHS, "logs", torch.float32, (of.sizes[0], heads, length))
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    if query.numel():
        eps = (native_eps(query_eps), native_eps(key_eps))
        read = (seen.data_ptr(), logs.data_ptr(), grad.data_ptr())
        written = (grads[0].data_ptr(), grads[1].data_ptr(), grads[2].data_ptr(), to_query, to_key)
        _native.attend_back(
            isa, get_num_threads(), of.addresses, of.dtype, of.sizes, *eps, *read, written
        )
    return grads


def kernels(isa: int) -> dict[str, Callable[..., Any]]:
    """The kernels of this module for the instruction set with this index."""
    return {
        "text.attend": partial(_attend, isa),
        "text.attend_backward": partial(_attend_backward, isa),
    }
