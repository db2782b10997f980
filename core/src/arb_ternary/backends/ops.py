"""The ops: schemas, fake (meta) implementations and autograd, once for every backend.

Namespace ``arb_ternary::``. The backend's name is a constant string argument, so ``torch.compile(fullgraph=True)``
makes one graph without a break, and switching the backend recompiles. An op mutates exactly what its schema says.

Weight arguments: ``packed`` (uint8, the layout of ``backend``), ``exponent`` (int8 ``[N, J]``) and the integers
``N, K, G`` and ``vote_bits``. Vote arguments: ``votes``, ``exponent_votes`` (None: the exponents do not learn),
``stats`` (float32 ``[1 + N + K]``) and ``control`` (int64, see :mod:`arb_ternary.counters.control`).

Arguments of scaled votes: ``magnitudes`` (float32 ``[N + K]``), ``vote_scale`` (``[N + K]``, float32 factors or int32
shifts) and ``vote_limits`` (int64 ``[3]``: the largest vote in 256ths, the shift of the exponents' votes, and that of
the noise). With ``vote_scale`` None backward casts sign votes. The limits are a tensor, so that a schedule that changes
them recompiles nothing.

``anchor`` is an empty tensor that requires grad. Integer weights cannot carry a graph; without it, the first ternary
layer of a pure model would see no input that requires grad and would never be asked to vote.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from arb_ternary.backends.dispatch import kernel
from arb_ternary.backends.protocol import WeightShape
from arb_ternary.backends.registration import op
from arb_ternary.backends.vote_ops import (
    cast_bias_votes,
    cast_embedding_scaled_votes,
    cast_embedding_votes,
    cast_scaled_votes,
    cast_votes,
    quantize_gradient,
)
from arb_ternary.counters.hashing import USE_EMBEDDING, USE_GRAD_INPUT, USE_VOTES

__all__ = [
    "ACTIVATION_MODES",
    "GRADIENT_MODES",
    "bias",
    "cast_bias_votes",
    "cast_embedding_scaled_votes",
    "cast_embedding_votes",
    "cast_scaled_votes",
    "cast_votes",
    "embedding",
    "linear",
    "linear_grad_input",
    "quantize_gradient",
]

ACTIVATION_MODES: Final = ("int8", "float")
GRADIENT_MODES: Final = ("float", "int8")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --- linear ----------------------------------------------------------------------------------------------------------


@op()
def linear_grad_input(
    grad: Tensor,
    scale: Tensor | None,
    packed: Tensor,
    exponent: Tensor,
    out_features: int,
    in_features: int,
    group_size: int,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """``grad [M, N] @ W``: ``[M, K]`` in ``dtype``."""
    shape = WeightShape(out_features, in_features, group_size)
    result: Tensor = kernel(backend, "linear_grad_input")(grad, scale, packed, exponent, shape, dtype)
    return result


@linear_grad_input.register_fake
def _(
    grad: Tensor,
    scale: Tensor | None,
    packed: Tensor,
    exponent: Tensor,
    out_features: int,
    in_features: int,
    group_size: int,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    return grad.new_empty((grad.shape[0], in_features), dtype=dtype)


@op()
def linear(
    x: Tensor,
    anchor: Tensor | None,
    packed: Tensor,
    exponent: Tensor,
    bias: Tensor | None,
    votes: Tensor,
    exponent_votes: Tensor | None,
    stats: Tensor,
    magnitudes: Tensor | None,
    vote_scale: Tensor | None,
    vote_limits: Tensor,
    control: Tensor,
    out_features: int,
    in_features: int,
    group_size: int,
    vote_bits: int,
    activations: str,
    gradients: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """``x [M, K] @ W.T + bias``.

    ``activations`` is ``int8`` or ``float``, ``gradients`` likewise. Backward casts votes when ``anchor`` is given.

    Returns:
        ``y [M, N]`` in the dtype of ``x``; and, in int8 mode, the quantised rows and their scales (kept for backward
        instead of ``x``: a quarter of its bytes), else two empty tensors.
    """
    _check(x.dim() == 2 and x.shape[1] == in_features, f"x must be [M, {in_features}], got {tuple(x.shape)}")
    _check(x.is_floating_point(), f"x must be a float tensor, got {x.dtype}")
    shape = WeightShape(out_features, in_features, group_size)
    run = kernel(backend, "linear")
    if activations == "int8":
        q, scale = kernel(backend, "quantize_rows")(x)
        return run(q, scale, packed, exponent, bias, shape, x.dtype), q, scale
    y = run(x, None, packed, exponent, bias, shape, x.dtype)
    return y, x.new_empty(0, dtype=torch.int8), x.new_empty(0, dtype=torch.float32)


@linear.register_fake
def _(
    x: Tensor,
    anchor: Tensor | None,
    packed: Tensor,
    exponent: Tensor,
    bias: Tensor | None,
    votes: Tensor,
    exponent_votes: Tensor | None,
    stats: Tensor,
    magnitudes: Tensor | None,
    vote_scale: Tensor | None,
    vote_limits: Tensor,
    control: Tensor,
    out_features: int,
    in_features: int,
    group_size: int,
    vote_bits: int,
    activations: str,
    gradients: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[0]
    y = x.new_empty((rows, out_features))
    if activations == "int8":
        return y, x.new_empty((rows, in_features), dtype=torch.int8), x.new_empty(rows, dtype=torch.float32)
    return y, x.new_empty(0, dtype=torch.int8), x.new_empty(0, dtype=torch.float32)


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, anchor, packed, exponent, bias, votes, exponent_votes, stats, *scaled, control = inputs[:12]
    _, q, scale = output
    ctx.mark_non_differentiable(q, scale)
    *ctx.shape, ctx.activations, ctx.gradients, ctx.backend = inputs[12:]
    ctx.casts = anchor is not None
    ctx.has_bias = bias is not None
    ctx.x_dtype = x.dtype
    if ctx.activations == "int8":
        ctx.save_for_backward(q, scale, packed, exponent)
    else:
        ctx.save_for_backward(x, scale, packed, exponent)
    # Not saved: backward mutates these, and a module used twice in one graph must not trip the version check.
    ctx.accumulators = (votes, exponent_votes, stats)
    ctx.scaled = tuple(scaled)
    ctx.control = control


def _linear_backward(ctx: Any, grad_y: Tensor, _grad_q: Any, _grad_scale: Any) -> tuple[Tensor | None, ...]:
    x, scale_M, packed, exponent = ctx.saved_tensors
    control = ctx.control
    integer = ctx.gradients == "int8"
    grad_y = grad_y.contiguous()
    grad_x: Tensor | None = None
    if ctx.needs_input_grad[0]:
        grad, scale = grad_y, None
        if integer:
            grad, scale = quantize_gradient(grad_y, control, USE_GRAD_INPUT, ctx.backend)
        grad_x = linear_grad_input(grad, scale, packed, exponent, *ctx.shape[:3], ctx.x_dtype, ctx.backend)
    if ctx.casts:
        # The token scales of int8 activations belong to the product; folded into the gradient, x stays integer.
        folded = grad_y * scale_M.to(grad_y.dtype).unsqueeze(1) if ctx.activations == "int8" else grad_y
        scale = None
        if integer and ctx.activations == "int8":
            folded, scale = quantize_gradient(folded, control, USE_VOTES, ctx.backend)
        cast, scaled = (cast_votes, ()) if ctx.scaled[1] is None else (cast_scaled_votes, ctx.scaled)
        cast(folded, x, scale, packed, *ctx.accumulators, *scaled, control, *ctx.shape, ctx.backend)
    grad_bias = grad_y.to(torch.float32).sum(dim=0) if ctx.has_bias else None
    return (grad_x, None, None, None, grad_bias, *(None,) * 14)


linear.register_autograd(_linear_backward, setup_context=_linear_setup)


# --- embedding -------------------------------------------------------------------------------------------------------


@op()
def embedding(
    ids: Tensor,
    anchor: Tensor | None,
    packed: Tensor,
    exponent: Tensor,
    votes: Tensor,
    exponent_votes: Tensor | None,
    correlation: Tensor | None,
    steps: Tensor | None,
    stats: Tensor,
    magnitudes: Tensor | None,
    vote_scale: Tensor | None,
    vote_limits: Tensor,
    control: Tensor,
    out_features: int,
    in_features: int,
    group_size: int,
    vote_bits: int,
    dtype: torch.dtype,
    gradients: str,
    backend: str,
) -> Tensor:
    """Rows ``W[ids]`` for ``ids [M]``: ``[M, K]`` in ``dtype``; only those rows are decoded."""
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= out_features):
        raise IndexError(f"ids must lie in 0..{out_features - 1}, got {int(ids.min())}..{int(ids.max())}")
    shape = WeightShape(out_features, in_features, group_size)
    rows: Tensor = kernel(backend, "embedding")(ids, packed, exponent, shape, dtype)
    return rows


@embedding.register_fake
def _(
    ids: Tensor,
    anchor: Tensor | None,
    packed: Tensor,
    exponent: Tensor,
    votes: Tensor,
    exponent_votes: Tensor | None,
    correlation: Tensor | None,
    steps: Tensor | None,
    stats: Tensor,
    magnitudes: Tensor | None,
    vote_scale: Tensor | None,
    vote_limits: Tensor,
    control: Tensor,
    out_features: int,
    in_features: int,
    group_size: int,
    vote_bits: int,
    dtype: torch.dtype,
    gradients: str,
    backend: str,
) -> Tensor:
    return torch.empty((ids.shape[0], in_features), dtype=dtype, device=packed.device)


def _embedding_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, anchor, packed, _, votes, exponent_votes, correlation, steps, stats, *scaled, control = inputs[:13]
    *ctx.shape, _, ctx.gradients, ctx.backend = inputs[13:]
    ctx.casts = anchor is not None
    ctx.save_for_backward(ids, packed)
    ctx.accumulators = (votes, exponent_votes)
    ctx.correlation = (correlation, steps)
    ctx.stats = stats
    ctx.scaled = tuple(scaled)
    ctx.control = control


def _embedding_backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
    if ctx.casts:
        ids, packed = ctx.saved_tensors
        grad = grad.contiguous()
        scale = None
        if ctx.gradients == "int8":
            grad, scale = quantize_gradient(grad, ctx.control, USE_EMBEDDING, ctx.backend)
        arguments = (ids, grad, scale, packed, *ctx.accumulators)
        settings = (ctx.control, *ctx.shape, ctx.backend)
        if ctx.scaled[1] is None:
            cast_embedding_votes(*arguments, *ctx.correlation, ctx.stats, *settings)
        else:
            cast_embedding_scaled_votes(*arguments, ctx.stats, *ctx.scaled, *settings)
    return (None,) * 20


embedding.register_autograd(_embedding_backward, setup_context=_embedding_setup)


# --- bias ------------------------------------------------------------------------------------------------------------


@op()
def bias(anchor: Tensor | None, value: Tensor, exponent: Tensor, votes: Tensor) -> Tensor:
    """The integer bias as float32: ``value [N] * 2**exponent``; votes are cast in backward when ``anchor`` is given."""
    return torch.ldexp(value.to(torch.float32), exponent.to(torch.int32))


@bias.register_fake
def _(anchor: Tensor | None, value: Tensor, exponent: Tensor, votes: Tensor) -> Tensor:
    return torch.empty_like(value, dtype=torch.float32)


def _bias_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.casts = inputs[0] is not None
    ctx.votes = inputs[3]


def _bias_backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
    if ctx.casts:
        cast_bias_votes(grad.contiguous(), ctx.votes)
    return (None,) * 4


bias.register_autograd(_bias_backward, setup_context=_bias_setup)
