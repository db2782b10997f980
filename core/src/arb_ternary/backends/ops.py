"""The ops: schemas, fake (meta) implementations and autograd, once for every backend.

Their namespace is ``arb_ternary::``. The name of the backend is a constant string argument.
Therefore ``torch.compile(fullgraph=True)`` makes one graph without a break, and another backend
recompiles it. An op mutates exactly what its schema says. The schema lists a ``state`` field by
field (:class:`~arb_ternary.backends.vote_state.VoteState`).

``anchor`` is an empty tensor that requires grad, or None if backward casts no votes. Integer
weights cannot carry a graph. Without the anchor, the first ternary layer of a pure model has no
input that requires grad, and backward never reaches it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from arb_ternary.backends.dispatch import kernel, pack_votes, vote_kernel
from arb_ternary.backends.reference_votes import count_correlation_, group_score, summed_rows
from arb_ternary.backends.registration import op
from arb_ternary.backends.select import get_backend
from arb_ternary.backends.vote_state import VoteState, weight_shape
from arb_ternary.counters.hashing import MICRO, USE_EMBEDDING, USE_GRAD_INPUT, USE_VOTES, hash_words
from arb_ternary.specs import resolve

ACTIVATION_MODES: Final = ("int8", "float")
#: Counts a cast in the control words, by one operation; ``control[MICRO] += 1`` takes three.
_ONE_CAST: Final = torch.eye(4, dtype=torch.int64, device="cpu")[MICRO]
#: A gradient rounded for the gradient of the rows, and its scale; the same rounded for votes, with
#: the scales of the rows.
QuantizedPair = tuple[Tensor, Tensor, Tensor, Tensor]


def is_traced(tensor: Tensor) -> bool:
    """Return whether a tracer or a dispatch mode watches what is done with ``tensor``.

    A tracer such as torch.compile passes a subclass of Tensor. Each step is then an op that it
    sees. Otherwise the function of the op is called, which saves the time of the dispatcher.
    """
    return type(tensor) is not Tensor or torch._C._len_torch_dispatch_stack() > 0


@op()
def quantize_gradient(
    grad: Tensor, control: Tensor, use: int, backend: str
) -> tuple[Tensor, Tensor]:
    """Round a gradient ``[M, N]`` stochastically to int8; return it and its power-of-two scale."""
    seed, step, stream = hash_words(control)
    q, scale = kernel(backend, "quantize_gradient")(grad, seed, step, stream + use)
    return q, scale


@quantize_gradient.register_fake
def _(grad: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    q = torch.empty_like(grad, dtype=torch.int8)
    scale = grad.new_empty((), dtype=torch.float32)
    return q, scale


@op()
def linear_grad_input(
    grad: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    exponent: Tensor,
    sizes: Sequence[int],
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """``grad [M, N] @ W``: ``[M, K]`` in ``dtype``."""
    result: Tensor = kernel(backend, "linear_grad_input")(
        grad, scale, weight, exponent, weight_shape(*sizes), dtype
    )
    return result


@linear_grad_input.register_fake
def _(
    grad: Tensor,
    scale: object,
    weight: object,
    exponent: object,
    sizes: Sequence[int],
    dtype: torch.dtype,
    *_: object,
) -> Tensor:
    return grad.new_empty((grad.shape[0], sizes[1]), dtype=dtype)


@contextmanager
def _adding(state: VoteState) -> Iterator[VoteState]:
    """Yield the state whose accumulators a cast changes.

    If votes are summed, these are new accumulators of 8 bits, which are then added to the sums.
    """
    if state.sums is None:
        yield state
        return
    rows, columns, group, _ = state.sizes
    wide = state._replace(sizes=(rows, columns, group, 8))
    votes = pack_votes(state.backend, torch.zeros_like(state.sums, dtype=torch.int8), 8)
    learned = None if state.exponent_votes is None else torch.zeros_like(state.exponent_votes)
    yield wide._replace(votes=votes, exponent_votes=learned)
    state.sums.add_(kernel(state.backend, "unpack_votes")(votes, wide.shape))
    if state.exponent_sums is not None and learned is not None:
        state.exponent_sums.add_(learned)


_CHANGED: Final = (
    "votes",
    "exponent_votes",
    "stats",
    "magnitudes",
    "control",
    "sums",
    "exponent_sums",
)


@op(mutates_args=_CHANGED)
def cast_votes(grad: Tensor, x: Tensor, scale: Tensor | None, state: VoteState) -> None:
    """Cast the votes of one micro-batch from ``grad [M, N]`` and ``x [M, K]``.

    They are scaled votes if the state has a ``vote_scale``, else sign votes. The micro-batch is
    counted in ``control``.
    """
    if grad.shape != (x.shape[0], state.sizes[0]):
        raise ValueError(f"grad must be [M, N], got {tuple(grad.shape)}")
    if state.transform is not None:
        grad, x, scale, state = resolve(state.transform)(grad, x, scale, state)
    with _adding(state) as target:
        vote_kernel(target, "cast_votes", "cast_scaled_votes")(grad, x, scale, target)
    state.control.add_(_ONE_CAST)


@op(mutates_args=(*_CHANGED, "correlation", "steps"))
def cast_embedding_votes(ids: Tensor, grad: Tensor, scale: Tensor | None, state: VoteState) -> None:
    """Cast the votes of looked-up rows, ``ids [M]`` and ``grad [M, K]``, like :func:`cast_votes`.

    The correlation counts signs under every rule. The kernels of scaled votes do not count it, so
    it is counted here.
    """
    correlation = state.correlation
    steps = state.steps
    scaled = state.vote_scale is not None
    if scaled and correlation is not None and steps is not None and ids.numel():
        rows_U, g_UK = summed_rows(ids, grad)
        decoded = kernel(state.backend, "embedding")(
            rows_U, state.weight, state.exponent, state.shape, torch.float32
        )
        signs = (g_UK.nan_to_num(0.0).sign() * decoded.sign()).to(torch.int8)
        count_correlation_(correlation, steps, rows_U, group_score(signs, state.shape))
        state = state._replace(correlation=None, steps=None)
    with _adding(state) as target:
        vote_kernel(target, "embedding_votes", "embedding_scaled_votes")(ids, grad, scale, target)
    state.control.add_(_ONE_CAST)


@op(mutates_args=("votes",))
def cast_bias_votes(grad: Tensor, votes: Tensor) -> None:
    """``votes = sat(votes - sign(grad))`` for ``grad [N]``, in the range of the dtype of ``votes``.

    NaN casts no vote.
    """
    limits = torch.iinfo(votes.dtype)
    s = torch.sign(grad.nan_to_num(0.0)).to(torch.int64)
    votes.copy_((votes - s).clamp_(limits.min, limits.max))


@op()
def linear(
    x: Tensor,
    anchor: Tensor | None,
    bias: Tensor | None,
    state: VoteState,
    activations: str,
    gradients: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """``x [M, K] @ W.T + bias``.

    ``activations`` and ``gradients`` are ``int8`` or ``float``. Backward casts votes if ``anchor``
    is given.

    Returns:
        ``y [M, N]`` in the dtype of ``x``; and in int8 mode the quantised rows and their scales,
        else two empty tensors. Backward keeps these rows instead of ``x``: they have a quarter of
        its bytes.
    """
    shape = state.shape
    if x.dim() != 2 or x.shape[1] != shape.in_features or not x.is_floating_point():
        raise ValueError(
            f"x must be a float tensor [M, {shape.in_features}], got {x.dtype} {[*x.shape]}"
        )
    run = kernel(state.backend, "linear")
    if activations == "int8":
        q, scale = kernel(state.backend, "quantize_rows")(x)
        return run(q, scale, state.weight, state.exponent, bias, shape, x.dtype), q, scale
    y = run(x, None, state.weight, state.exponent, bias, shape, x.dtype)
    no_rows = x.new_empty(0, dtype=torch.int8)
    no_scales = x.new_empty(0, dtype=torch.float32)
    return y, no_rows, no_scales


@linear.register_fake
def _(
    x: Tensor, anchor: object, bias: object, state: VoteState, activations: str, *_: object
) -> tuple[Tensor, ...]:
    kept = x.shape if activations == "int8" else (0,)
    y = x.new_empty((x.shape[0], state.sizes[0]))
    q = x.new_empty(kept, dtype=torch.int8)
    scale = x.new_empty(kept[:1], dtype=torch.float32)
    return y, q, scale


def _linear_setup(
    ctx: Any,
    output: Any,
    x: Tensor,
    anchor: object,
    bias: object,
    state: VoteState,
    activations: str,
    gradients: str,
) -> None:
    _, q, scale = output
    ctx.mark_non_differentiable(q, scale)
    ctx.casts = anchor is not None
    ctx.has_bias = bias is not None
    ctx.x_dtype = x.dtype
    ctx.activations = activations
    ctx.gradients = gradients
    rows = q if activations == "int8" else x
    ctx.save_for_backward(rows, scale, state.weight, state.exponent)
    # Accumulators are not saved: backward mutates them, and a module that is used twice in one
    # graph must not trip the version check.
    ctx.state = state


def _linear_backward(
    ctx: Any, grad_y: Tensor, _grad_q: Any, _grad_scale: Any
) -> tuple[Tensor | None, ...]:
    x, scale_M, *_ = ctx.saved_tensors
    grad_x = linear_backward(
        grad_y,
        x,
        scale_M if ctx.activations == "int8" else None,
        ctx.state,
        gradients=ctx.gradients,
        dtype=ctx.x_dtype,
        needs_input=ctx.needs_input_grad[0],
        casts=ctx.casts,
    )
    grad_bias = grad_y.to(torch.float32).sum(dim=0) if ctx.has_bias else None
    return grad_x, None, grad_bias


def linear_backward(
    grad_MN: Tensor,
    x_MK: Tensor,
    scale_M: Tensor | None,
    state: VoteState,
    *,
    gradients: str,
    dtype: torch.dtype,
    needs_input: bool,
    casts: bool,
    owns_grad: bool = False,
    both: QuantizedPair | None = None,
) -> Tensor | None:
    """Cast the votes of a product with a ternary weight; return the gradient of its rows.

    This is the backward of every such product, whatever computed its forward: the op ``linear``,
    a convolution, a native block, a loss in blocks. Integers, hashes and votes are the same in all.

    Args:
        grad_MN: gradient of the product.
        x_MK: the rows that were multiplied, int8 or float.
        scale_M: scales of int8 rows; None for float rows.
        state: the weight and what it learns by.
        gradients: ``int8`` if gradients are rounded before they are multiplied, else ``float``.
        dtype: dtype of the result.
        needs_input: whether the gradient of the rows is needed; if not, the result is None.
        casts: whether votes are cast.
        owns_grad: whether ``grad_MN`` may be overwritten and freed, which saves memory.
        both: the gradient rounded for rows and for votes, if the caller has done so; see
            :func:`quantize_related`.
    """
    traced = is_traced(grad_MN)
    quantize = quantize_gradient if traced else quantize_gradient.function
    multiply = linear_grad_input if traced else linear_grad_input.function
    integer = gradients == "int8"
    grad_MN = grad_MN.contiguous()

    if both is None and integer and needs_input and casts and not (traced or owns_grad):
        both = None if scale_M is None else _quantize_both(grad_MN, scale_M, state)

    grad_x = None
    if needs_input:
        rounded = grad_MN
        scale = None
        if both is not None:
            rounded, scale, *_ = both
        elif integer:
            rounded, scale = quantize(grad_MN, state.control, USE_GRAD_INPUT, state.backend)
        grad_x = multiply(
            rounded, scale, state.weight, state.exponent, state.sizes, dtype, state.backend
        )
        del rounded

    if casts:
        folded = grad_MN
        folded_scale = None
        if both is not None:
            *_, folded, folded_scale = both
        elif scale_M is not None:
            # The scales of int8 rows belong to the product. Folded into the gradient, they leave
            # the rows integers.
            factor_M1 = scale_M.to(grad_MN.dtype).unsqueeze(1)
            folded = grad_MN.mul_(factor_M1) if owns_grad else grad_MN * factor_M1
            if integer:
                folded, folded_scale = quantize(folded, state.control, USE_VOTES, state.backend)
        del grad_MN
        if traced:
            cast_votes(folded, x_MK, folded_scale, *state)
        else:
            cast_votes.function(folded, x_MK, folded_scale, state)
    return grad_x


def _quantize_both(grad_MN: Tensor, scale_M: Tensor, state: VoteState) -> QuantizedPair | None:
    """Quantise a gradient for rows and for votes at once, if the backend has a kernel for that.

    The kernel indexes elements in 32 bits.
    """
    kernel_of_both: Any = get_backend(state.backend).kernels.get("quantize_gradients")
    if kernel_of_both is None or grad_MN.numel() >= 1 << 32:
        return None
    found: QuantizedPair = kernel_of_both(grad_MN, scale_M, *_words_of_both(state))
    return found


def _words_of_both(state: VoteState) -> tuple[int, int, int, int]:
    """Return what a gradient is rounded with: seed, step, and the streams for rows and votes."""
    seed, step, stream = state.draw()
    return seed, step, stream + USE_GRAD_INPUT, stream + USE_VOTES


def quantize_related(
    grads: Sequence[Tensor], scale_M: Tensor, states: Sequence[VoteState]
) -> list[QuantizedPair]:
    """Quantise the gradients ``[M, N_i]`` of products of the same rows, in one call.

    The backend of the states has the kernel ``quantize_several``.
    """
    words = [_words_of_both(state) for state in states]
    several: Any = get_backend(states[0].backend).kernels["quantize_several"]
    found: list[QuantizedPair] = several(grads, scale_M, words)
    return found


linear.register_autograd(_linear_backward, setup_context=_linear_setup)


@op()
def embedding(
    ids: Tensor, anchor: Tensor | None, state: VoteState, dtype: torch.dtype, gradients: str
) -> Tensor:
    """Rows ``W[ids]`` for ``ids [M]``: ``[M, K]`` in ``dtype``; only those rows are decoded."""
    shape = state.shape
    # On another device the kernel asserts it there, and the host does not wait.
    if ids.device.type == "cpu":
        low = high = 0
        if ids.numel():
            low, high = map(int, ids.aminmax())
        if low < 0 or high >= max(1, shape.out_features):
            raise IndexError(f"ids must lie in 0..{shape.out_features - 1}, got {low}..{high}")
    rows: Tensor = kernel(state.backend, "embedding")(
        ids, state.weight, state.exponent, shape, dtype
    )
    return rows


@embedding.register_fake
def _(ids: Tensor, anchor: object, state: VoteState, dtype: torch.dtype, *_: object) -> Tensor:
    return state.weight.new_empty((ids.shape[0], state.sizes[1]), dtype=dtype)


def _embedding_setup(
    ctx: Any,
    output: Tensor,
    ids: Tensor,
    anchor: Tensor | None,
    state: VoteState,
    dtype: object,
    gradients: str,
) -> None:
    ctx.casts = anchor is not None
    ctx.gradients = gradients
    ctx.save_for_backward(ids, state.weight)
    ctx.state = state


def _embedding_backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
    if ctx.casts:
        ids, _weight = ctx.saved_tensors
        embedding_backward(ids, grad, ctx.state, ctx.gradients)
    return ()


def embedding_backward(ids_M: Tensor, grad_MK: Tensor, state: VoteState, gradients: str) -> None:
    """Cast the votes of looked-up rows from their gradient, rounded if ``gradients`` is int8."""
    grad = grad_MK.contiguous()
    scale = None
    traced = is_traced(grad)
    if gradients == "int8":
        quantize = quantize_gradient if traced else quantize_gradient.function
        grad, scale = quantize(grad, state.control, USE_EMBEDDING, state.backend)
    if traced:
        cast_embedding_votes(ids_M, grad, scale, *state)
    else:
        cast_embedding_votes.function(ids_M, grad, scale, state)


embedding.register_autograd(_embedding_backward, setup_context=_embedding_setup)


@op()
def bias(anchor: Tensor | None, value: Tensor, exponent: Tensor, votes: Tensor) -> Tensor:
    """The integer bias as float32, ``value [N] * 2**exponent``.

    Backward casts votes if ``anchor`` is given.
    """
    return torch.ldexp(value.to(torch.float32), exponent.to(torch.int32))


@bias.register_fake
def _(anchor: object, value: Tensor, *_: object) -> Tensor:
    return torch.empty_like(value, dtype=torch.float32)


def _bias_setup(
    ctx: Any, output: Tensor, anchor: Tensor | None, value: object, exponent: object, votes: Tensor
) -> None:
    ctx.votes = None if anchor is None else votes


def _bias_backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
    if ctx.votes is not None:
        cast_bias_votes(grad.contiguous(), ctx.votes)
    return ()


bias.register_autograd(_bias_backward, setup_context=_bias_setup)
