"""One training update, for those who write their own loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from arb_ternary.optim.protocol import StepOutcome, may_refuse
from arb_ternary.optim.ternary import TernaryOptimizer, is_finite
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_train.optim.joined import JoinedOptimizer

__all__ = ["ternary_update"]


def ternary_update(
    model: nn.Module,
    optimizer: TernaryOptimizer | JoinedOptimizer,
    loss: Tensor | None = None,
    *,
    loss_signal: Tensor | float | None = None,
    loss_components: Mapping[str, Tensor] | None = None,
    **settings: Any,
) -> StepOutcome:
    """One training update, for those who write their own loop: run backward once, step, and clear the gradients.

    Args:
        model: whose ternary modules show whether backward has run since the last step; then it is not run again.
        optimizer: steps after backward.
        loss: scalar; may be None when ``loss_components`` are given, else ValueError.
        loss_signal: scalar that modulates the vote threshold; it is detached and never carries a graph.
        loss_components: named scalar losses, summed into the loss.
        settings: what the rule's ``step`` takes for one update, as ``sign_votes`` takes ``accum_threshold`` and
            ``update_scales``; TypeError for another one.

    A loss, component or signal that is not finite skips the whole update: every buffer is bit-identical to what it was
    before the forward pass, also if the caller has already run backward, and the optimizer counts the skip. A loss that
    is passed here before running backward saves the copy of the accumulators that this takes.
    """
    terms = [*([] if loss is None else [loss]), *(loss_components or {}).values()]
    if not terms:
        raise ValueError("ternary_update needs a loss or loss_components")
    signal = loss_signal.detach() if isinstance(loss_signal, Tensor) else loss_signal
    if not all(is_finite(term.detach()) for term in terms) or not is_finite(signal):
        return optimizer.skip_update()
    modules = ternary_modules(model)
    if not any(module.casts > 0 for _, module in modules):
        for _, module in () if may_refuse(optimizer) else modules:
            module.take_votes(ahead=True)
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        total.backward()  # type: ignore[no-untyped-call]
    outcome = optimizer.step(loss_signal=signal, **settings)
    optimizer.zero_grad()
    return outcome
