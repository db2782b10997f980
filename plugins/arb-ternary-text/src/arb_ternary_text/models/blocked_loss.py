"""Cross entropy through a head in blocks of rows, so that not all logits exist at once.

The gradient of a row's logits, ``(softmax - onehot) / M``, needs that row only. So each block of
logits is replaced by its gradient at once. The same holds for the divergence from another model's
predictions (:class:`Guide`). From the gradient

* a float head computes the gradients of its input and of its weight in forward, and backward
  multiplies them by the gradient from above. In float32, and if the weight does not learn, nothing
  of size ``M x V`` is kept. In bfloat16 the gradient is kept until forward ends, because sums of
  products in blocks would be rounded, or added up in float32, which takes longer than the products;
* a ternary head keeps the gradient, in the dtype of its input, and goes on as from whole logits,
  with fewer copies, so that votes are rounded once, from all rows.

The logits of a row, its loss and its gradient are those of whole logits, except for roundings of
float32 sums.

Shapes: ``M`` rows, ``m`` of them in a block, ``D`` features, ``V`` ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

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

#: Number of logits from which on they are not held all at once: a quarter of a gigabyte of float32,
#: several times in training.
MANY_LOGITS: Final = 1 << 24
#: Logits per block: 32 MiB of float32.
_BLOCK_LOGITS: Final = 1 << 23
#: Logits whose losses are computed at a time on a CPU: several copies of 1 MiB of float32.
_CACHED_LOGITS: Final = 1 << 18
#: Fewest rows per block. With fewer, a product would mostly read its weight.
_FEWEST_ROWS: Final = 128
#: The same for a float weight that learns, whose gradient each block writes.
_FEWEST_ROWS_FLOAT: Final = 512


@frozen(eq=False)
class Guide:
    """Predictions of another model, whose divergence from a head's own is added to the loss.

    The divergence is ``weight * T**2 * KL(guide || head)`` of softmaxes of logits over ``T``. The
    square keeps the size of the gradient (Hinton, Vinyals and Dean, "Distilling the Knowledge in a
    Neural Network", 2015).

    Attributes:
        logits_of: returns the other model's logits of some rows, ``[m, V]``, of any float dtype. It
            is called once per row.
        weight: factor of the divergence.
        temperature: ``T``.
    """

    logits_of: Callable[[slice], Tensor]
    weight: float
    temperature: float = 1.0


class _Loss(NamedTuple):
    """The inputs of a loss besides logits.

    Attributes:
        targets: ids ``[M]``.
        logit_scale: power of two that multiplies logits.
        guide: adds the mean divergence from its predictions; None for none.
    """

    targets: Tensor
    logit_scale: float
    guide: Guide | None

    def blocks(self, ids: int, fewest_rows: int) -> Iterator[slice]:
        """Cut the rows into blocks; IndexError first if a target is not an id."""
        low, high = map(int, self.targets.aminmax())
        if low < 0 or high >= ids:
            raise IndexError(f"targets must lie in 0..{ids - 1}, got {low}..{high}")
        step = max(fewest_rows, _BLOCK_LOGITS // ids // 64 * 64)
        for first in range(0, len(self.targets), step):
            yield slice(first, first + step)

    def losses_and_gradient(self, logits_mV: Tensor, rows: slice, gradient_mV: Tensor) -> Tensor:
        """Return the losses of a block, float32 ``[m]``, and write the gradient of their mean.

        Args:
            logits_mV: the logits of the block.
            rows: the rows of the block.
            gradient_mV: where the gradient of the mean loss of all rows goes. It may be
                ``logits_mV``.
        """
        count, ids = logits_mV.shape
        targets_m = self.targets[rows]
        guide_mV = None if self.guide is None else self.guide.logits_of(rows)
        losses_m = torch.empty(count, dtype=torch.float32, device=logits_mV.device)
        # On a CPU, as few rows at a time as stay in the cache of the processor.
        step = max(1, _CACHED_LOGITS // ids) if logits_mV.device.type == "cpu" else count
        for first in range(0, count, step):
            few = slice(first, first + step)
            losses_m[few], gradient_mV[few] = self._few(
                logits_mV[few], targets_m[few], None if guide_mV is None else guide_mV[few]
            )
        return losses_m

    def _few(
        self, logits_mV: Tensor, targets_m: Tensor, guide_mV: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return losses ``[m]`` and the gradient of the mean of all, both float32."""
        scale = self.logit_scale
        scaled_mV = logits_mV if scale == 1.0 else logits_mV * scale
        logs_mV = scaled_mV.log_softmax(dim=-1, dtype=torch.float32)
        target_m1 = targets_m[:, None]
        losses_m = -logs_mV.gather(1, target_m1).squeeze(1)
        step = scale / len(self.targets)
        if self.guide is None or guide_mV is None:
            gradient_mV = logs_mV.exp_().mul_(step)
        else:
            divergences_m, gradient_mV = _divergences(self.guide, guide_mV, scaled_mV, logs_mV)
            losses_m += divergences_m
            gradient_mV.mul_(step)
        gradient_mV.scatter_add_(1, target_m1, gradient_mV.new_full(target_m1.shape, -step))
        return losses_m, gradient_mV


def _divergences(
    guide: Guide, guide_mV: Tensor, scaled_mV: Tensor, logs_mV: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weighted divergences of some rows, and a gradient.

    The gradient is that of the sum of the divergences, plus ``softmax(scaled)``. It overwrites
    ``logs``, which are ``log_softmax(scaled)``.
    """
    temperature = guide.temperature
    weight = guide.weight
    is_warm = temperature != 1.0
    if is_warm:
        guide_mV = guide_mV / temperature
    guide_logs_mV = guide_mV.log_softmax(dim=-1, dtype=torch.float32)
    guide_mV = guide_logs_mV.exp()
    warm_mV = logs_mV
    if is_warm:
        warm_mV = (scaled_mV / temperature).log_softmax(dim=-1, dtype=torch.float32)

    # As products of rows and columns, which need no memory for the summands.
    ratios_mV = guide_logs_mV.sub_(warm_mV)
    divergences_m = torch.bmm(guide_mV.unsqueeze(1), ratios_mV.unsqueeze(2)).flatten()
    gradient_mV = logs_mV.exp_()
    if is_warm:
        gradient_mV.add_(warm_mV.exp_(), alpha=weight * temperature)
    else:
        gradient_mV.mul_(1.0 + weight)
    gradient_mV.sub_(guide_mV, alpha=weight * temperature)
    return divergences_m.mul_(weight * temperature**2), gradient_mV


# --- heads


def serves(head: nn.Module) -> bool:
    """Return whether this module knows how ``head`` multiplies, and it has no hooks.

    False in float16, in which gradients vanish unless they are scaled before they are rounded.
    """
    if is_watched(head):
        return False
    if isinstance(head, TiedHead):
        (table,) = head._embedding
        if type(table) not in (nn.Embedding, TernaryEmbedding):
            return False
    elif type(head) not in (FloatLinear, TernaryLinear):
        return False
    weights, _ = _weights_of(head)
    tensor = weights if isinstance(weights, Tensor) else weights.weight
    kind = tensor.device.type
    dtype = tensor.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return dtype is not torch.float16


def mean_cross_entropy(
    head: nn.Module,
    x_MD: Tensor,
    targets_M: Tensor,
    logit_scale: float = 1.0,
    guide: Guide | None = None,
) -> Tensor:
    """Return the mean cross entropy of ``logit_scale * head(x)``, a float32 scalar.

    Backward casts the head's votes.

    Args:
        head: a head that :func:`serves` accepts.
        x_MD: the input of the head, at least one row.
        targets_M: ids.
        logit_scale: power of two.
        guide: adds the mean divergence from its predictions.

    Raises:
        IndexError: an id is outside ``0..V-1``.
    """
    weights, activations = _weights_of(head)
    x_MD = TernaryModule.in_autocast(x_MD).contiguous()
    wanted = _Loss(targets_M, logit_scale, guide)
    loss: Tensor
    if isinstance(weights, Tensor):
        x_MD = rounded_to_int8(x_MD) if activations == "int8" else x_MD
        loss = _FloatHead.apply(x_MD, weights.to(x_MD.dtype), wanted)  # type: ignore[no-untyped-call]
        return loss
    anchor = weights.vote_anchor()
    state = weights.vote_state()
    settings = (activations, weights.gradients)
    loss = _TernaryHead.apply(  # type: ignore[no-untyped-call]
        x_MD, anchor, _bias_of(weights), state, settings, wanted
    )
    if anchor is not None:
        weights.expect_votes(loss)
    return loss


@torch.no_grad()
def cross_entropies(
    head: nn.Module, x_MD: Tensor, targets_M: Tensor, logit_scale: float = 1.0
) -> Tensor:
    """Return the cross entropy of each row, float32 ``[M]``, without gradients.

    Arguments and errors are those of :func:`mean_cross_entropy`.
    """
    weights, activations = _weights_of(head)
    x_MD = TernaryModule.in_autocast(x_MD).contiguous()
    logits_of: Callable[[slice], Tensor]
    if isinstance(weights, Tensor):
        rows_MD = rounded_to_int8(x_MD) if activations == "int8" else x_MD
        table_VD = weights.to(x_MD.dtype)
        ids = table_VD.size(0)

        def logits_of(rows: slice) -> Tensor:
            return F.linear(rows_MD[rows], table_VD)

    else:
        ids = weights.shape.out_features
        logits_of = _TernaryProduct(
            weights.vote_state(), x_MD, _bias_of(weights), activations
        ).logits

    losses_M = torch.empty(targets_M.shape, dtype=torch.float32, device=targets_M.device)
    for rows in _Loss(targets_M, logit_scale, None).blocks(ids, _FEWEST_ROWS):
        logits_mV = logits_of(rows)
        scaled_mV = logits_mV if logit_scale == 1.0 else logits_mV * logit_scale
        losses_M[rows] = F.cross_entropy(scaled_mV.float(), targets_M[rows], reduction="none")
    return losses_M


def _weights_of(head: nn.Module) -> tuple[Tensor | TernaryModule, str]:
    """Return the weights of a head, and the precision of its input (``activations``)."""
    if isinstance(head, TiedHead):
        (table,) = head._embedding
        return (table.weight if isinstance(table, nn.Embedding) else table), head.activations
    if isinstance(head, FloatLinear):
        return head.weight, head.activations
    assert isinstance(head, TernaryLinear)
    return head, head.activations


def _bias_of(weights: TernaryModule) -> Tensor | None:
    return weights.integer_bias() if isinstance(weights, TernaryLinear) else None


class _FloatHead(torch.autograd.Function):
    """Mean cross entropy of ``x @ W.T``; forward computes the gradients that are needed."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, weight_VD: Tensor, loss: _Loss) -> Tensor:
        count = len(x_MD)
        ids = weight_VD.size(0)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x_MD = torch.empty_like(x_MD) if needs_x else None
        grad_weight_VD = torch.zeros_like(weight_VD) if needs_weight else None
        # See the beginning of this module.
        keeps_gradient = needs_weight and x_MD.dtype is not torch.float32
        grad_MV = x_MD.new_empty((count, ids)) if keeps_gradient else None
        losses_M = torch.empty(count, dtype=torch.float32, device=x_MD.device)
        fewest_rows = _FEWEST_ROWS_FLOAT if needs_weight else _FEWEST_ROWS
        with torch.autocast(x_MD.device.type, enabled=False):
            for rows in loss.blocks(ids, fewest_rows):
                if grad_MV is not None:
                    block_mV = torch.mm(x_MD[rows], weight_VD.T, out=grad_MV[rows])
                    losses_M[rows] = loss.losses_and_gradient(block_mV, rows, block_mV)
                    continue
                block_mV = F.linear(x_MD[rows], weight_VD)
                losses_M[rows] = loss.losses_and_gradient(block_mV, rows, block_mV)
                if grad_x_MD is not None:
                    torch.mm(block_mV, weight_VD, out=grad_x_MD[rows])
                if grad_weight_VD is not None:
                    grad_weight_VD.addmm_(block_mV.T, x_MD[rows])
            if grad_MV is not None and grad_x_MD is not None:
                torch.mm(grad_MV, weight_VD, out=grad_x_MD)
            if grad_MV is not None and grad_weight_VD is not None:
                torch.mm(grad_MV.T, x_MD, out=grad_weight_VD)
        ctx.gradients = (grad_x_MD, grad_weight_VD)
        return losses_M.mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = _taken(ctx)
        grad_x = None if grad_x is None else _times(grad_x, grad)
        grad_weight = None if grad_weight is None else _times(grad_weight, grad)
        return grad_x, grad_weight, None


def _taken(ctx: Any) -> Any:
    """Take the gradients that forward computed, so that there is no second copy of them."""
    gradients = ctx.gradients
    if gradients is None:
        raise RuntimeError(
            "the gradients of a loss in blocks are gone after the first backward; compute it again"
        )
    ctx.gradients = None
    return gradients


def _times(gradient: Tensor, above: Tensor) -> Tensor:
    """Multiply a gradient that nothing else uses by the one from above, in place."""
    return gradient if float(above) == 1.0 else gradient.mul_(above)


class _TernaryProduct:
    """The rows that a ternary head multiplies, as they are kept for backward, and their logits."""

    def __init__(
        self, state: VoteState, x_MD: Tensor, bias_V: Tensor | None, activations: str
    ) -> None:
        self._state = state
        self._bias_V = bias_V
        self._dtype = x_MD.dtype
        self.x_MD = x_MD
        self.scale_M: Tensor | None = None
        if activations == "int8":
            self.x_MD, self.scale_M = kernel(state.backend, "quantize_rows")(x_MD)

    def logits(self, rows: slice) -> Tensor:
        """Return the logits of some rows, ``[m, V]``, in the dtype of the head's input."""
        state = self._state
        logits_mV: Tensor = kernel(state.backend, "linear")(
            self.x_MD[rows],
            None if self.scale_M is None else self.scale_M[rows],
            state.weight,
            state.exponent,
            self._bias_V,
            state.shape,
            self._dtype,
        )
        return logits_mV


class _TernaryHead(torch.autograd.Function):
    """Mean cross entropy of ``x @ W.T + bias``.

    Nothing else uses the gradient of the logits, so that backward may overwrite and free it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_MD: Tensor,
        anchor: Tensor | None,
        bias_V: Tensor | None,
        state: VoteState,
        settings: tuple[str, str],
        loss: _Loss,
    ) -> Tensor:
        activations, gradients = settings
        count = len(x_MD)
        ids = state.shape.out_features
        product = _TernaryProduct(state, x_MD, bias_V, activations)
        grad_MV = x_MD.new_empty((count, ids))
        losses_M = torch.empty(count, dtype=torch.float32, device=x_MD.device)
        for rows in loss.blocks(ids, _FEWEST_ROWS):
            losses_M[rows] = loss.losses_and_gradient(product.logits(rows), rows, grad_MV[rows])
        # Weights are kept so that torch notices if they change before backward.
        ctx.save_for_backward(product.x_MD, product.scale_M, state.weight, state.exponent)
        ctx.gradients = [grad_MV]
        ctx.state = state
        ctx.rounding = gradients
        ctx.dtype = x_MD.dtype
        ctx.casts = anchor is not None
        ctx.has_bias = bias_V is not None
        return losses_M.mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_MD, scale_M, *_ = ctx.saved_tensors
        gradients = _taken(ctx)
        _times(gradients[0], grad)
        grad_bias = None
        if ctx.has_bias:
            grad_bias = gradients[0].sum(dim=0, dtype=torch.float32)
        grad_x = linear_backward(
            gradients.pop(),  # the only reference, so that it can be freed
            x_MD,
            scale_M,
            ctx.state,
            gradients=ctx.rounding,
            dtype=ctx.dtype,
            needs_input=ctx.needs_input_grad[0],
            casts=ctx.casts,
            owns_grad=True,
        )
        return grad_x, None, grad_bias, None, None, None
