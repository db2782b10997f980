"""When the parts of a block may be computed by kernels of their own, not by the operations of torch.

Such kernels (``arb_ternary.backends.protocol.BLOCK_OPS``) are optional: they save the memory traffic and the calls of
a dozen operations each. They add up in an order of their own, so that float results differ from torch's in the last
bits; integers made of the same floats are equal. Rows of ``M`` positions have ``K`` features, of any float dtype; what
lies between reading a row and writing it is float32. ``x`` may also be ``[B, H, S, C]``, whose row ``(b, s)`` is its
heads one after another. ``eps`` is None where rows are not normalised, and ``r``, their factors in float32, likewise.

* ``normalise_quantize(x, eps) -> q, scale, r``: ``quantize_rows`` of the rows times ``r = 1 / sqrt(mean(x^2) + eps)``.
* ``normalise_quantize_backward(grads, x, r, size) -> grad``: of ``x``, which has this size, from the sum of one to
  three gradients ``[M, K]`` of the normalised rows; ``x`` may be None where ``r`` is.
* ``activate_quantize(gate, up, kind, eps) -> q, scale, r``: the same of ``silu(gate) * up`` (``swiglu``),
  ``relu(up)^2`` (``relu2``, whose gate is None) or ``relu(gate)^2 * up`` (``reglu2``).
* ``activate_quantize_backward(grad, gate, up, kind, r) -> grad_gate, grad_up``.
* ``turn_heads(x, angles, heads, length, eps) -> y, r``: rows ``[B * S, H * C]`` to heads ``[B, H, S, C]``, each
  normalised (``r`` is ``[M, H]``) and turned by ``angles``, cosines and sines ``[S, C / 2]``, or by nothing (None).
* ``turn_heads_backward(grad, x, angles, r) -> grad``.
* ``attend(query, key, value, angles, heads, key_heads, length, query_eps, key_eps) -> seen, logs``: causal softmax
  attention over heads ``[B * S, heads * C]`` and ``[B * S, key_heads * C]``, normalised and turned as by ``turn_heads``
  (values are not); ``logs``, float32 ``[B, heads, S]``, are those of the sums of what softmax divides by.
* ``attend_backward(grad, query, key, value, seen, logs, ...) -> grad_query, grad_key, grad_value``, with the rest of
  the arguments of ``attend``.
* ``quantize_gradients(grad, row_scale, seed, step, stream, folded_stream) -> q, scale, folded, folded_scale``:
  ``quantize_gradient`` of ``grad`` and of its rows times their scales; for fewer than 2**32 elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor, nn

from arb_ternary.backends.protocol import BLOCK_OPS
from arb_ternary.backends.select import get_backend
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_text.models.rms_norm import OwnEpsRMSNorm, RMSNorm
from arb_ternary_train.exact_arithmetic import is_exact

__all__ = ["Kernels", "eps_of", "is_watched", "kernels_for", "may_round_otherwise"]

Kernels = Mapping[str, Callable[..., Any]]

#: Parts of a module that a user may have set to see, or to change, what enters and leaves it.
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Those that take part in training: all but a whole step of decoding.
_OPS: Final = tuple(op for op in BLOCK_OPS if op != "decode_step")
_DTYPES: Final = (torch.float32, torch.bfloat16)


def may_round_otherwise() -> bool:
    """Whether float results may differ from those of torch's operations in the last bits.

    Not in an exact run, whose bits are the same on every backend; and not while a graph is compiled, which is made of
    torch's operations.
    """
    return not (torch.compiler.is_compiling() or is_exact())


def kernels_for(x: Tensor, norms: Sequence[nn.Module], linears: Sequence[nn.Module]) -> Kernels | None:
    """The kernels for a part of a block that reads ``x``, or None where torch's operations have to compute it.

    They do where results may be rounded otherwise, ``x`` is a plain tensor of float32 or bfloat16 on the CPU, every
    linear is ternary without a bias and takes int8 activations, no norm has a gain, nobody has put hooks or another
    ``forward`` on them, and the backend of all linears has the kernels. Under autocast, which is to bfloat16, the part
    reads ``x``, and writes, in that.
    """
    if type(x) is not Tensor or not x.is_cpu or x.dtype not in _DTYPES or not x.numel() or not may_round_otherwise():
        return None
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") not in _DTYPES:
        return None
    backend = None
    for linear in linears:
        if not _is_plain(linear) or linear.activations != "int8" or linear.bias is not None:
            return None
        if is_watched(linear) or backend not in (None, linear.backend) or linear.backend != linear.chosen_backend:
            return None
        backend = linear.backend
    if backend is None or any(_has_gain(norm) or is_watched(norm) for norm in norms):
        return None
    kernels = get_backend(backend).kernels
    return kernels if all(op in kernels for op in _OPS) else None


def _is_plain(linear: nn.Module) -> TypeGuard[TernaryLinear]:
    """Whether it is just a ternary linear; of one whose weight ranks share, whether all of that is here."""
    kind = getattr(type(linear), "uncut", type(linear))
    return kind is TernaryLinear and type(linear.weight) in (Tensor, nn.Parameter)


def eps_of(norm: nn.Module) -> float | None:
    """What a norm without a gain adds to the mean square; None for one that does nothing."""
    return norm.eps if isinstance(norm, RMSNorm) else None


def _has_gain(norm: nn.Module) -> bool:
    if type(norm) is nn.Identity:
        return False
    return type(norm) not in (RMSNorm, OwnEpsRMSNorm) or norm.weight is not None


def is_watched(module: nn.Module) -> bool:
    """Whether somebody has put hooks or another ``forward`` on a module."""
    held = module.__dict__
    return "forward" in held or any(held[name] for name in _HOOKS)
