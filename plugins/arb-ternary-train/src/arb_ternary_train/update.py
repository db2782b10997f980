"""One training update and the thresholds of votes, for those who write their own loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from arb_ternary.optim.protocol import StepOutcome, may_refuse
from arb_ternary.optim.ternary import TernaryOptimizer, is_finite
from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.module import OPTIMIZERS
from arb_ternary_train.optim.joined import JoinedOptimizer


def configure_ternary_training(
    model: nn.Module, accum_threshold: int = 32, e_accum_threshold: int = 32
) -> int:
    """Set the vote thresholds of every ternary module; returns ``accum_threshold``.

    Optimizers that are built afterwards start from these thresholds; ``scaled_votes`` has a cell of
    two quanta a vote (one with accumulators of 4 or 2 bits), and ``momentum_votes`` refuses others
    than its own. Low ones (3 to 8) move signs and scales early and make the loss spike. ValueError,
    and no change: a threshold is outside 1..127 or beyond the accumulators of a module (7 for 4
    bits, 1 for 2), or a module has its optimizer already.
    """
    for name, value in (
        ("accum_threshold", accum_threshold),
        ("e_accum_threshold", e_accum_threshold),
    ):
        if not 1 <= value <= 127:
            raise ValueError(f"{name} must be in 1..127, got {value}")
    for name, module in ternary_modules(model):
        if accum_threshold > module.shape.largest_vote:
            raise ValueError(
                f"{name}: accumulators of {module.shape.vote_bits} bits end at "
                f"{module.shape.largest_vote}, below accum_threshold {accum_threshold}"
            )
        if (optimizer := OPTIMIZERS.get(module)) is not None and optimizer() is not None:
            raise ValueError(
                f"{name}: its optimizer is built and keeps the thresholds that it found: set them "
                "before, or in the optimizer's param_groups"
            )
    for _, module in ternary_modules(model):
        module.accum_threshold = accum_threshold
        module.e_accum_threshold = e_accum_threshold
    return accum_threshold


def ternary_update(
    model: nn.Module,
    optimizer: TernaryOptimizer | JoinedOptimizer,
    loss: Tensor | None = None,
    *,
    loss_signal: Tensor | float | None = None,
    loss_components: Mapping[str, Tensor] | None = None,
    **settings: Any,
) -> StepOutcome:
    """One training update, for those who write their own loop: run backward once, step, and clear
    the gradients.

    Args:
        model: whose ternary modules show whether backward has run since the last step; then it is
            not run again.
        optimizer: steps after backward.
        loss: scalar; may be None when ``loss_components`` are given, else ValueError.
        loss_signal: scalar that modulates the vote threshold; it is detached and never carries a
            graph.
        loss_components: named scalar losses, summed into the loss.
        settings: what the rule's ``step`` takes for one update, as ``sign_votes`` takes
            ``accum_threshold`` and ``update_scales``; TypeError for another one.

    A loss, component or signal that is not finite skips the whole update: every buffer is
    bit-identical to what it was before the forward pass, also if the caller has already run
    backward, and the optimizer counts the skip. A loss that is passed here before running backward
    saves the copy of the accumulators that this takes.
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
            module.commit_votes(ahead=True)
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        total.backward()  # type: ignore[no-untyped-call]
    outcome = optimizer.step(loss_signal=signal, **settings)
    optimizer.zero_grad()
    return outcome
