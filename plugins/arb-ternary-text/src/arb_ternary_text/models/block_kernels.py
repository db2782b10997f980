"""The optional kernels for the parts of a block, and when they may be used.

A kernel replaces a dozen of torch's operations, their memory traffic and their calls. It adds up in
an order of its own, so that float results differ from torch's in the last bits. Integers made of
the same floats are equal.

Rows of ``M`` positions have ``K`` features, of any float dtype; between reading and writing a row
everything is float32. ``x`` may also be ``[B, H, S, C]``: its row ``(b, s)`` is the heads one after
another. ``eps`` is None if rows are not normalised, and then so is ``r``, the float32 factors that
normalise them. A ``gain`` has one float32 number per feature and multiplies the normalised rows;
None stands for 1. Backward adds its gradient to ``grad_gain``, in an order that depends on sizes
alone.

* ``normalise_quantize(x, eps, gain) -> q, scale, r``: ``quantize_rows`` of the rows times
  ``r = 1 / sqrt(mean(x^2) + eps)`` and ``gain [K]``.
* ``normalise_quantize_backward(grads, x, r, size, gain, grad_gain) -> grad``: the gradient of
  ``x``, whose size is given, from the sum of one to three gradients ``[M, K]`` of the normalised
  rows. ``x`` may be None if ``r`` is.
* ``activate_quantize(gate, up, kind, eps, gain) -> q, scale, r``: the same of ``silu(gate) * up``
  (``swiglu``), ``relu(up)^2`` (``relu2``, whose gate is None) or ``relu(gate)^2 * up``
  (``reglu2``).
* ``activate_quantize_backward(grad, gate, up, kind, r, gain, grad_gain) -> grad_gate, grad_up``.
* ``scale_columns_backward(grad, x, factor, grad_factor) -> grad``: the gradient of ``x [M, N]``
  from that of ``factor * x``, with one float32 factor per column, whose gradient is added to
  ``grad_factor``.
* ``turn_heads(x, angles, heads, length, eps, gain) -> y, r``: rows ``[B * S, H * C]`` as heads
  ``[B, H, S, C]``, each normalised (``r`` is ``[M, H]``, ``gain`` ``[C]``) and turned by
  ``angles``, cosines and sines ``[S, C / 2]``; None turns nothing.
* ``turn_heads_backward(grad, x, angles, r, gain, grad_gain) -> grad``.
* ``attend(query, key, value, angles, heads, key_heads, length, query_eps, key_eps, query_gain,
  key_gain) -> seen, logs``: causal softmax attention over heads ``[B * S, heads * C]`` and
  ``[B * S, key_heads * C]``. Queries and keys are normalised and turned as by ``turn_heads``.
  ``logs``, float32 ``[B, heads, S]``, are the logarithms of the sums that softmax divides by.
* ``attend_backward(grad, query, key, value, seen, logs, ..., grad_query_gain, grad_key_gain) ->
  grad_query, grad_key, grad_value``, with the other arguments of ``attend``.
* core's ``quantize_gradients(grad, row_scale, seed, step, stream, folded_stream) -> q, scale,
  folded, folded_scale``: ``quantize_gradient`` of ``grad``, and of its rows times their scales, for
  fewer than 2**32 elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor, nn

from arb_ternary.backends.select import get_backend
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_text.models.rms_norm import RMSNorm
from arb_ternary_text.models.scaled_linear import ScaledTernaryLinear
from arb_ternary_train.exact_arithmetic import is_exact

Kernels = Mapping[str, Callable[..., Any]]

#: The ops that a backend needs for the parts of a block. ``text.decode_step`` is for generation.
BLOCK_OPS: Final = (
    "quantize_gradients",
    "text.normalise_quantize",
    "text.normalise_quantize_backward",
    "text.activate_quantize",
    "text.activate_quantize_backward",
    "text.scale_columns_backward",
    "text.turn_heads",
    "text.turn_heads_backward",
    "text.attend",
    "text.attend_backward",
)

#: Attributes of a module that hold the hooks of a user, who sees or changes what passes through it.
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DTYPES: Final = (torch.float32, torch.bfloat16)
#: Types of tensors that are complete in memory: no subclass that shards or traces.
_PLAIN: Final = (Tensor, nn.Parameter)


def may_round_differently() -> bool:
    """Return whether float results may differ from torch's in the last bits.

    They may not in an exact run, which has the same bits on every backend, nor in a compiled graph,
    which is made of torch's operations.
    """
    return not (torch.compiler.is_compiling() or is_exact())


def kernels_for(
    x: Tensor, norms: Sequence[nn.Module], linears: Sequence[nn.Module]
) -> Kernels | None:
    """Return the kernels for a part of a block, or None if torch's operations have to compute it.

    Kernels are used for plain tensors of float32 or bfloat16 on the CPU, ternary linears with int8
    activations and no bias, and the norms of this package with float gains or gains of trits; if
    these modules have no hooks, and if the backend of all linears has all kernels. Under autocast
    to bfloat16 the part reads ``x``, and writes, in that.

    Args:
        x: the input of the part.
        norms: its norms.
        linears: its linears.
    """
    if type(x) is not Tensor or not x.is_cpu or x.dtype not in _DTYPES or not x.numel():
        return None
    if not may_round_differently():
        return None
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") not in _DTYPES:
        return None

    backends = set()
    for linear in linears:
        if not is_plain_linear(linear):
            return None
        backends.add(linear.backend)
    for norm in norms:
        if not _is_known_norm(norm) or is_watched(norm):
            return None

    if len(backends) != 1:
        return None
    kernels = get_backend(backends.pop()).kernels
    return kernels if all(op in kernels for op in BLOCK_OPS) else None


def is_plain_linear(linear: nn.Module) -> TypeGuard[TernaryLinear]:
    """Return whether a linear does no more than multiply quantised rows, and nobody watches it.

    It is one of ours without a bias or a constant factor, complete in memory, on a device that its
    backend serves.
    """
    if not _is_known_linear(linear) or is_watched(linear):
        return False
    if linear.activations != "int8" or linear.bias is not None:
        return False
    return linear.backend == linear.chosen_backend


def _is_known_linear(linear: nn.Module) -> TypeGuard[TernaryLinear]:
    """Return whether a linear is one of ours without a constant factor, and complete in memory."""
    # A linear that shards its weight among ranks has its original type in `uncut`.
    kind = getattr(type(linear), "replicated_type", type(linear))
    if kind not in (TernaryLinear, ScaledTernaryLinear) or type(linear.weight) not in _PLAIN:
        return False
    if not isinstance(linear, ScaledTernaryLinear):
        return True
    factors_are_plain = linear.row_scale is None or type(linear.row_scale) in _PLAIN
    return linear.scale is None and factors_are_plain


def _is_known_norm(norm: nn.Module) -> bool:
    """Return whether a norm is ours, or none, and its float gain is complete in memory."""
    if type(norm) is RMSNorm:
        return norm.weight is None or type(norm.weight) in _PLAIN
    return type(norm) is nn.Identity


def is_watched(module: nn.Module) -> bool:
    """Return whether somebody has put hooks or another ``forward`` on a module."""
    attributes = module.__dict__
    return "forward" in attributes or any(attributes[name] for name in _HOOKS)


def eps_of(norm: nn.Module) -> float | None:
    """Return what a norm adds to the mean square; None for a module that does not normalise."""
    return norm.eps if isinstance(norm, RMSNorm) else None


def gain_of(norm: nn.Module) -> Tensor | None:
    """Return the gain of a norm, float32 ``[K]``, in the graph; None for none."""
    if not isinstance(norm, RMSNorm):
        return None
    if norm.gains is not None:
        gains: Tensor = norm.gains()
        return gains
    return None if norm.weight is None else norm.weight.float()


def factor_of(linear: nn.Module) -> Tensor | None:
    """Return the factors of a linear's rows, float32 ``[N]``, in the graph; None for none."""
    return linear.learning_factors().float() if isinstance(linear, ScaledTernaryLinear) else None
