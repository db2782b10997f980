"""One training update from one loss, for those who write their own loop."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from arb_ternary.counters.control import MICRO
from arb_ternary.optim.protocol import StepOutcome
from arb_ternary.optim.ternary import TernaryOptimizer, is_finite
from arb_ternary.ternary.models import ternary_modules

__all__ = ["ternary_update"]


def ternary_update(
    model: nn.Module,
    optimizer: TernaryOptimizer,
    loss: Tensor | None = None,
    *,
    loss_signal: Tensor | float | None = None,
    loss_components: Mapping[str, Tensor] | None = None,
) -> StepOutcome:
    """Run backward once, cast votes, step, and clear the gradients.

    Args:
        model: its ternary modules are looked at to see whether backward has already run since the last step; a backward
            that has run is never run again.
        optimizer: steps after backward.
        loss: scalar; may be None when ``loss_components`` are given.
        loss_signal: scalar that modulates the vote threshold; it is detached and never carries a graph.
        loss_components: named scalar losses, summed into the loss.

    A loss, component or signal that is not finite skips the whole update before anything is touched: every buffer stays
    bit-identical, and the optimizer counts the skip. If the caller has already run backward from such a loss, the votes
    that it cast cannot be told from earlier ones; pass the loss here before running backward to keep them out.

    Raises:
        ValueError: neither ``loss`` nor ``loss_components`` is given.
    """
    components = dict(loss_components or {})
    terms = ([] if loss is None else [loss]) + list(components.values())
    if not terms:
        raise ValueError("ternary_update needs a loss or loss_components")
    signal = loss_signal.detach() if isinstance(loss_signal, Tensor) else loss_signal
    if not all(is_finite(term.detach()) for term in terms) or not is_finite(signal):
        return optimizer.skip_update()
    already = any(int(module.control[MICRO]) > 0 for _, module in ternary_modules(model))
    if not already:
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        total.backward()  # type: ignore[no-untyped-call]
    outcome = optimizer.step(loss_signal=signal)
    optimizer.zero_grad()
    return outcome
