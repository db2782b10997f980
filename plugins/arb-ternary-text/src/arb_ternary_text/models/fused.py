"""When the parts of a block may be computed by kernels of their own, not by the operations of
torch.

Such kernels (:data:`BLOCK_OPS`) are optional: they save the memory
traffic and the calls of a dozen operations each. They add up in an order of their own, so that
float results differ from torch's in the last bits; integers made of the same floats are equal. Rows
of ``M`` positions have ``K`` features, of any float dtype; what lies between reading a row and
writing it is float32. ``x`` may also be ``[B, H, S, C]``, whose row ``(b, s)`` is its heads one
after another. ``eps`` is None where rows are not normalised, and ``r``, their factors in float32,
likewise. A ``gain``, float32 with a number a feature, multiplies what is normalised, and is None
where there is none; backward adds its gradient to ``grad_gain``, in an order that depends on sizes
alone.

* ``normalise_quantize(x, eps, gain) -> q, scale, r``: ``quantize_rows`` of the rows times
  ``r = 1 / sqrt(mean(x^2) + eps)`` and ``gain [K]``.
* ``normalise_quantize_backward(grads, x, r, size, gain, grad_gain) -> grad``: of ``x``, which has
  this size, from the sum of one to three gradients ``[M, K]`` of the normalised rows; ``x`` may be
  None where ``r`` is.
* ``activate_quantize(gate, up, kind, eps, gain) -> q, scale, r``: the same of ``silu(gate) * up``
  (``swiglu``), ``relu(up)^2`` (``relu2``, whose gate is None) or ``relu(gate)^2 * up``
  (``reglu2``).
* ``activate_quantize_backward(grad, gate, up, kind, r, gain, grad_gain) -> grad_gate, grad_up``.
* ``scale_columns_backward(grad, x, factor, grad_factor) -> grad``: of ``x [M, N]``, from that of
  ``factor * x`` with a float32 factor a column, whose gradient is added to ``grad_factor``.
* ``turn_heads(x, angles, heads, length, eps, gain) -> y, r``: rows ``[B * S, H * C]`` to heads
  ``[B, H, S, C]``, each normalised (``r`` is ``[M, H]``, ``gain`` ``[C]``) and turned by
  ``angles``, cosines and sines ``[S, C / 2]``, or by nothing (None).
* ``turn_heads_backward(grad, x, angles, r, gain, grad_gain) -> grad``.
* ``attend(query, key, value, angles, heads, key_heads, length, query_eps, key_eps, query_gain,
  key_gain) -> seen, logs``: causal softmax attention over heads ``[B * S, heads * C]`` and ``[B *
  S, key_heads * C]``, normalised and turned as by ``turn_heads`` (values are not); ``logs``,
  float32 ``[B, heads, S]``, are those of the sums of what softmax divides by.
* ``attend_backward(grad, query, key, value, seen, logs, ..., grad_query_gain, grad_key_gain) ->
  grad_query, grad_key, grad_value``, with the rest of the arguments of ``attend``.
* core's ``quantize_gradients(grad, row_scale, seed, step, stream, folded_stream) -> q, scale,
  folded, folded_scale``: ``quantize_gradient`` of ``grad`` and of its rows times their scales; for
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

#: Parts of a module that a user may have set to see, or to change, what enters and leaves it.
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
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
_DTYPES: Final = (torch.float32, torch.bfloat16)
#: What a tensor that is all here, and nothing but a tensor, is.
_TENSORS: Final = (Tensor, nn.Parameter)
_TENSORS_OR_NONE: Final = (*_TENSORS, type(None))


def may_round_otherwise() -> bool:
    """Whether float results may differ from those of torch's operations in the last bits.

    Not in an exact run, whose bits are the same on every backend; and not while a graph is
    compiled, which is made of torch's operations.
    """
    return not (torch.compiler.is_compiling() or is_exact())


def kernels_for(
    x: Tensor, norms: Sequence[nn.Module], linears: Sequence[nn.Module]
) -> Kernels | None:
    """The kernels for a part of a block that reads ``x``, or None where torch's operations have to
    compute it.

    They do where results may be rounded otherwise, ``x`` is a plain tensor of float32 or bfloat16
    on the CPU, every linear is ternary, perhaps with factors of its rows, without a bias and takes
    int8 activations, norms are those of this package, whose gains are float or means of trits,
    nobody has put hooks or another ``forward`` on them, and the backend of all linears has the
    kernels. Under autocast, which is to bfloat16, the part reads ``x``, and writes, in that.
    """
    if (
        type(x) is not Tensor
        or not x.is_cpu
        or x.dtype not in _DTYPES
        or not x.numel()
        or not may_round_otherwise()
    ):
        return None
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") not in _DTYPES:
        return None
    backend = None
    for linear in linears:
        if not _is_plain(linear) or linear.activations != "int8" or linear.bias is not None:
            return None
        if (
            is_watched(linear)
            or backend not in (None, linear.backend)
            or linear.backend != linear.chosen_backend
        ):
            return None
        backend = linear.backend
    if backend is None or not all(_is_known(norm) and not is_watched(norm) for norm in norms):
        return None
    kernels = get_backend(backend).kernels
    return kernels if all(op in kernels for op in BLOCK_OPS) else None


def _is_plain(linear: nn.Module) -> TypeGuard[TernaryLinear]:
    """Whether it is a linear of ours; of one whose weight ranks share, whether all of that is
    here.
    """
    kind = getattr(type(linear), "uncut", type(linear))
    if kind not in (TernaryLinear, ScaledTernaryLinear) or type(linear.weight) not in _TENSORS:
        return False
    if not isinstance(linear, ScaledTernaryLinear):
        return True
    return linear.scale is None and type(linear.row_scale) in _TENSORS_OR_NONE


def _is_known(norm: nn.Module) -> bool:
    """Whether it is a norm of ours, or none; of one with a float gain, whether all of that is
    here.
    """
    if type(norm) is RMSNorm:
        return type(norm.weight) in _TENSORS_OR_NONE
    return type(norm) is nn.Identity


def eps_of(norm: nn.Module) -> float | None:
    """What a norm adds to the mean square; None for one that does nothing."""
    return norm.eps if isinstance(norm, RMSNorm) else None


def gain_of(norm: nn.Module) -> Tensor | None:
    """What a norm multiplies by after it has normalised, float32 ``[K]``, in the graph; None for
    nothing.
    """
    if not isinstance(norm, RMSNorm):
        return None
    if norm.gains is not None:
        gains: Tensor = norm.gains()
        return gains
    return None if norm.weight is None else norm.weight.float()


def factor_of(linear: nn.Module) -> Tensor | None:
    """What a linear multiplies its rows by beside their powers of two, float32 ``[N]``, in the
    graph; None for none.
    """
    return linear.learning_factors().float() if isinstance(linear, ScaledTernaryLinear) else None


def is_watched(module: nn.Module) -> bool:
    """Whether somebody has put hooks or another ``forward`` on a module."""
    held = module.__dict__
    return "forward" in held or any(held[name] for name in _HOOKS)
