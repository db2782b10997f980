"""Cross entropy through a head, some rows of its input at a time, so that no more than their logits
are held.

The gradient of a row's logits, ``(softmax - onehot) / M``, needs that row alone, so that each block
of logits gives way to its gradient as soon as there is one. So does that of the divergence from
another model's predictions (:class:`Guide`), of which no more rows are held either. From there

* a float head computes the gradients of its input and of its weight in forward, and backward
  multiplies them by what comes from above. In float32, and where the weight does not learn, nothing
  of ``M x V`` is kept; else, in bfloat16, the gradient is until forward ends, because sums of
  products in blocks would be rounded, or added up in float32, which takes longer than the products;
* a ternary head keeps the gradient, in the dtype of its input, and goes on as from whole logits,
  with fewer copies: votes are rounded once, from all rows.

The logits of a row, its loss and its gradient are those of whole logits but for roundings of
float32 sums.

Shapes: ``M`` rows, ``m`` of them a block, ``D`` features, ``V`` ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from arb_ternary.backends.dispatch import kernel
from arb_ternary.backends.ops import linear_backward
from arb_ternary.backends.vote_state import VoteState
from arb_ternary.ternary.embedding import TernaryEmbedding
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_text.models.block_kernels import is_watched
from arb_ternary_text.models.parts import FloatLinear, TiedHead, rounded_to_int8

# : Logits from which on they are not held all at once: a quarter of a gigabyte of float32, several
# times in training.
MANY_LOGITS: Final = 1 << 24
#: Logits of a block: 32 MiB of float32.
_BLOCK_LOGITS: Final = 1 << 23
#: Logits that are judged at a time on a CPU: of each of some copies 1 MiB of float32.
_STRETCH: Final = 1 << 18
# : Fewest rows of a block, below which a product would mostly read its weight; with a float weight,
# write its gradient.
_FEWEST_ROWS: Final = 128
_FEWEST_ROWS_FLOAT: Final = 512


@frozen(eq=False)
class Guide:
    """Predictions of another model, from which the divergence of a head's own is added to its cross
    entropy.

    It is ``weight * T**2 * KL(guide || head)``, of softmaxes of logits over ``T``; the square keeps
    the size of the gradient (Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural
    Network", 2015).

    Attributes:
        logits_of: the other model's logits of some rows, ``[m, V]``, of any float dtype; called
            once for each row.
        weight: of the divergence.
        temperature: ``T``.
    """

    logits_of: Callable[[slice], Tensor]
    weight: float
    temperature: float = 1.0


def serves(head: nn.Module) -> bool:
    """Whether ``head`` multiplies in a way that this module knows, and nobody watches it.

    Not in float16, in which gradients vanish unless they are scaled before they are rounded.
    """
    known = type(head) in (FloatLinear, TernaryLinear) or (
        isinstance(head, TiedHead) and type(head._embedding[0]) in (nn.Embedding, TernaryEmbedding)
    )
    if not known or is_watched(head):
        return False
    weights, _ = _weights_of(head)
    held = weights if isinstance(weights, Tensor) else weights.weight
    kind = held.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else held.dtype
    return dtype is not torch.float16


def mean_cross_entropy(
    head: nn.Module,
    x_MD: Tensor,
    targets_M: Tensor,
    logit_scale: float = 1.0,
    guide: Guide | None = None,
) -> Tensor:
    """Mean of the cross entropies of ``logit_scale * head(x)``, a float32 scalar; backward casts
    the head's votes.

    Args:
        head: one that :func:`serves`.
        x_MD: input of the head, at least one row.
        targets_M: ids.
        logit_scale: power of two.
        guide: adds the mean divergence from its predictions.

    Raises:
        IndexError: an id is outside ``0..V-1``.
    """
    weights, activations = _weights_of(head)
    x_MD = TernaryModule.in_autocast(x_MD).contiguous()
    loss: Tensor
    if isinstance(weights, Tensor):
        x_MD = rounded_to_int8(x_MD) if activations == "int8" else x_MD
        loss = _FloatHead.apply(  # type: ignore[no-untyped-call]
            x_MD, weights.to(x_MD.dtype), targets_M, logit_scale, guide
        )
        return loss
    anchor = weights.vote_anchor()
    bias = _bias_of(weights)
    head_state = _TernaryState(weights.vote_state(), activations, weights.gradients)
    loss = _TernaryHead.apply(  # type: ignore[no-untyped-call]
        x_MD, anchor, bias, targets_M, logit_scale, head_state, guide
    )
    if anchor is not None:
        weights.expect_votes(loss)
    return loss


@torch.no_grad()
def cross_entropies(
    head: nn.Module, x_MD: Tensor, targets_M: Tensor, logit_scale: float = 1.0
) -> Tensor:
    """The cross entropy of each row, float32 ``[M]``, as :func:`mean_cross_entropy`, without
    gradients.
    """
    weights, activations = _weights_of(head)
    x_MD = TernaryModule.in_autocast(x_MD).contiguous()
    if isinstance(weights, Tensor):
        x_MD = rounded_to_int8(x_MD) if activations == "int8" else x_MD
        table = weights.to(x_MD.dtype)
        return _losses(
            lambda rows: F.linear(x_MD[rows], table), targets_M, table.size(0), logit_scale
        )
    product = _TernaryState(weights.vote_state(), activations, weights.gradients).product(
        x_MD, _bias_of(weights)
    )
    return _losses(product.logits, targets_M, weights.shape.out_features, logit_scale)


def _losses(
    logits_of: Callable[[slice], Tensor], targets_M: Tensor, ids: int, logit_scale: float
) -> Tensor:
    losses_M = torch.empty(targets_M.shape, dtype=torch.float32, device=targets_M.device)
    for rows in _blocks(targets_M, ids):
        logits_mV = logits_of(rows)
        wide_mV = (logits_mV if logit_scale == 1.0 else logits_mV * logit_scale).float()
        losses_M[rows] = F.cross_entropy(wide_mV, targets_M[rows], reduction="none")
    return losses_M


def _weights_of(head: nn.Module) -> tuple[Tensor | TernaryModule, str]:
    """What ``head`` multiplies by, and how it rounds its input."""
    if isinstance(head, TiedHead):
        (table,) = head._embedding
        return (table.weight if isinstance(table, nn.Embedding) else table), head.activations
    if isinstance(head, FloatLinear):
        return head.weight, head.activations
    assert isinstance(head, TernaryLinear)
    return head, head.activations


def _bias_of(weights: TernaryModule) -> Tensor | None:
    return weights.integer_bias() if isinstance(weights, TernaryLinear) else None


def _blocks(targets_M: Tensor, ids: int, fewest: int | None = None) -> Iterator[slice]:
    """Stretches of at least ``fewest`` rows; IndexError first where a target is no id."""
    low, high = map(int, targets_M.aminmax())
    if low < 0 or high >= ids:
        raise IndexError(f"targets must lie in 0..{ids - 1}, got {low}..{high}")
    step = max(fewest or _FEWEST_ROWS, _BLOCK_LOGITS // ids // 64 * 64)
    for first in range(0, len(targets_M), step):
        yield slice(first, first + step)


def losses_and_gradients(
    logits_mV: Tensor,
    targets_m: Tensor,
    logit_scale: float,
    share: float,
    guide: tuple[Guide, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The losses of a block, ``[m]``, and ``share`` times the gradients of their sum, ``[m, V]``;
    float32.

    ``logit_scale``, a power of two, multiplies the logits first. ``guide`` comes with its logits of
    the block.
    """
    scaled_mV = logits_mV if logit_scale == 1.0 else logits_mV * logit_scale
    logs_mV = scaled_mV.log_softmax(dim=-1, dtype=torch.float32)
    place_m1 = targets_m[:, None]
    losses_m = -logs_mV.gather(1, place_m1).squeeze(1)
    step = share * logit_scale
    if guide is None:
        gradients_mV = logs_mV.exp_().mul_(step)
    else:
        aim, theirs_mV = guide
        apart_m, gradients_mV = _drawn_towards(aim, theirs_mV, scaled_mV, logs_mV)
        losses_m += apart_m
        gradients_mV.mul_(step)
    gradients_mV.scatter_add_(1, place_m1, gradients_mV.new_full(place_m1.shape, -step))
    return losses_m, gradients_mV


def _drawn_towards(
    guide: Guide, theirs_mV: Tensor, scaled_mV: Tensor, logs_mV: Tensor
) -> tuple[Tensor, Tensor]:
    """The weighted divergences of a block, ``[m]``, and the gradient of their sum plus
    ``softmax(scaled)``.

    Overwrites ``logs``, which are ``log_softmax(scaled)``.
    """
    heat = guide.temperature
    weight = guide.weight
    warm = heat != 1.0
    logs_theirs_mV = (theirs_mV / heat if warm else theirs_mV).log_softmax(
        dim=-1, dtype=torch.float32
    )
    theirs_mV = logs_theirs_mV.exp()
    warm_mV = (scaled_mV / heat).log_softmax(dim=-1, dtype=torch.float32) if warm else logs_mV
    # As products of rows and columns, which need no room for what is summed.
    apart_m = torch.bmm(theirs_mV.unsqueeze(1), logs_theirs_mV.sub_(warm_mV).unsqueeze(2)).flatten()
    gradients_mV = logs_mV.exp_()
    if warm:
        gradients_mV.add_(warm_mV.exp_(), alpha=weight * heat)
    else:
        gradients_mV.mul_(1.0 + weight)
    return apart_m.mul_(weight * heat**2), gradients_mV.sub_(theirs_mV, alpha=weight * heat)


def _judge(
    logits_mV: Tensor,
    targets_m: Tensor,
    logit_scale: float,
    share: float,
    guide: tuple[Guide, Tensor] | None,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows of a block and their :func:`losses_and_gradients`, as few at a time as stay in a
    processor's cache.
    """
    count, ids = logits_mV.shape
    step = max(1, _STRETCH // ids) if logits_mV.device.type == "cpu" else count
    for first in range(0, count, step):
        rows = slice(first, first + step)
        aim = None if guide is None else (guide[0], guide[1][rows])
        yield rows, *losses_and_gradients(logits_mV[rows], targets_m[rows], logit_scale, share, aim)


def _of_block(guide: Guide | None, rows: slice) -> tuple[Guide, Tensor] | None:
    return None if guide is None else (guide, guide.logits_of(rows))


class _FloatHead(torch.autograd.Function):
    """Mean cross entropy of ``x @ W.T``; gradients of both are made in forward, where they are
    needed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_MD: Tensor,
        weight_VD: Tensor,
        targets_M: Tensor,
        logit_scale: float,
        guide: Guide | None,
    ) -> Tensor:
        count = len(targets_M)
        ids = weight_VD.size(0)
        of_x, of_weight = ctx.needs_input_grad[:2]
        at_once = x_MD.dtype is torch.float32 or not of_weight
        fewest = _FEWEST_ROWS_FLOAT if of_weight else _FEWEST_ROWS
        grad_x_MD = torch.empty_like(x_MD) if of_x else None
        grad_weight_VD = torch.zeros_like(weight_VD) if of_weight else None
        grad_MV = None if at_once else x_MD.new_empty((count, ids))
        losses_M = torch.empty(count, dtype=torch.float32, device=x_MD.device)
        with torch.autocast(x_MD.device.type, enabled=False):
            for rows in _blocks(targets_M, ids, fewest):
                # Logits give way to their gradients.
                block_mV = F.linear(x_MD[rows], weight_VD) if grad_MV is None else grad_MV[rows]
                if grad_MV is not None:
                    torch.mm(x_MD[rows], weight_VD.T, out=block_mV)
                loss_m = losses_M[rows]
                aim = _of_block(guide, rows)
                for few, losses, gradients in _judge(
                    block_mV, targets_M[rows], logit_scale, 1.0 / count, aim
                ):
                    loss_m[few] = losses
                    block_mV[few] = gradients
                if grad_MV is not None:
                    continue
                if grad_x_MD is not None:
                    torch.mm(block_mV, weight_VD, out=grad_x_MD[rows])
                if grad_weight_VD is not None:
                    grad_weight_VD.addmm_(block_mV.T, x_MD[rows])
            if grad_MV is not None and grad_x_MD is not None:
                torch.mm(grad_MV, weight_VD, out=grad_x_MD)
            if grad_MV is not None and grad_weight_VD is not None:
                torch.mm(grad_MV.T, x_MD, out=grad_weight_VD)
        ctx.made = (grad_x_MD, grad_weight_VD)
        return losses_M.mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = (None if each is None else _times(each, grad) for each in _taken(ctx))
        return grad_x, grad_weight, None, None, None


def _taken(ctx: Any) -> tuple[Tensor | None, ...]:
    """The gradients that forward made, which go to whom they are for, so that there is no second
    copy of them.
    """
    made: tuple[Tensor | None, ...] | None = ctx.made
    if made is None:
        raise RuntimeError(
            "the gradients of a loss in blocks are gone after the first backward; compute it again"
        )
    ctx.made = None
    return made


def _times(gradient: Tensor, above: Tensor) -> Tensor:
    """``gradient * above``, in place, as nobody else has it."""
    return gradient if float(above) == 1.0 else gradient.mul_(above)


class _Product:
    """The rows that a ternary head multiplies, as they are kept for backward, and its logits."""

    def __init__(
        self, state: VoteState, x_MD: Tensor, bias_V: Tensor | None, activations: str
    ) -> None:
        self._state = state
        self._bias_V = bias_V
        self._dtype = x_MD.dtype
        if activations == "int8":
            self.x_MD, scale_M = kernel(state.backend, "quantize_rows")(x_MD)
            self.scale_M: Tensor | None = scale_M
        else:
            self.x_MD = x_MD
            self.scale_M = None

    def logits(self, rows: slice) -> Tensor:
        """``[m, V]``, in the dtype of the head's input."""
        state = self._state
        scale_M = self.scale_M
        scale_m = None if scale_M is None else scale_M[rows]
        run = kernel(state.backend, "linear")
        logits_mV: Tensor = run(
            self.x_MD[rows],
            scale_m,
            state.weight,
            state.exponent,
            self._bias_V,
            state.shape,
            self._dtype,
        )
        return logits_mV


class _TernaryState:
    """What a ternary head multiplies with, and how."""

    def __init__(self, state: VoteState, activations: str, gradients: str) -> None:
        self.state = state
        self.activations = activations
        self.gradients = gradients

    def product(self, x_MD: Tensor, bias_V: Tensor | None) -> _Product:
        """The product with the rows ``x``."""
        return _Product(self.state, x_MD, bias_V, self.activations)


class _TernaryHead(torch.autograd.Function):
    """Mean cross entropy of ``x @ W.T + bias``.

    Backward is that of ``arb_ternary::linear``, to the bit. The gradient of the logits belongs to
    nobody else: it is multiplied by the scales of the rows in place, and freed when it is rounded.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_MD: Tensor,
        anchor: Tensor | None,
        bias_V: Tensor | None,
        targets_M: Tensor,
        logit_scale: float,
        head: _TernaryState,
        guide: Guide | None,
    ) -> Tensor:
        count = len(targets_M)
        ids = head.state.sizes[0]
        state = head.state
        product = head.product(x_MD, bias_V)
        grad_MV = x_MD.new_empty((count, ids))
        losses_M = torch.empty(count, dtype=torch.float32, device=x_MD.device)
        for rows in _blocks(targets_M, ids):
            logits_mV = product.logits(rows)
            loss_m = losses_M[rows]
            block_mV = grad_MV[rows]
            aim = _of_block(guide, rows)
            for few, losses, gradients in _judge(
                logits_mV, targets_M[rows], logit_scale, 1.0 / count, aim
            ):
                loss_m[few] = losses
                block_mV[few] = gradients
        scale_M = torch.empty(0) if product.scale_M is None else product.scale_M
        ctx.save_for_backward(product.x_MD, scale_M, state.weight, state.exponent)
        ctx.made = (grad_MV,)
        ctx.head = head
        ctx.casts = anchor is not None
        ctx.has_bias = bias_V is not None
        ctx.x_dtype = x_MD.dtype
        return losses_M.mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_MD, scale_M, *_ = ctx.saved_tensors
        (grad_MV,) = _taken(ctx)
        assert grad_MV is not None
        grad_MV = _times(grad_MV, grad)
        grad_bias = grad_MV.sum(dim=0, dtype=torch.float32) if ctx.has_bias else None
        owned = [grad_MV]
        del grad_MV  # so that backward can free it
        grad_x = linear_backward(
            owned.pop(),
            x_MD,
            scale_M if ctx.head.activations == "int8" else None,
            ctx.head.state,
            gradients=ctx.head.gradients,
            dtype=ctx.x_dtype,
            needs_input=ctx.needs_input_grad[0],
            casts=ctx.casts,
            owns_grad=True,
        )
        return grad_x, None, grad_bias, None, None, None, None
