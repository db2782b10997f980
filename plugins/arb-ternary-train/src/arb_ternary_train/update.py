"""One training update, and vote thresholds, for training loops of your own."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from arb_ternary.optim.protocol import StepOutcome, may_refuse
from arb_ternary.optim.ternary import TernaryOptimizer, is_finite
from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.module import OPTIMIZERS
from arb_ternary_train.gradients import gradient_norm
from arb_ternary_train.optim.joined import JoinedOptimizer


def configure_ternary_training(
    model: nn.Module, accum_threshold: int = 32, e_accum_threshold: int = 32
) -> int:
    """Set the vote thresholds of every ternary module; return ``accum_threshold``.

    Optimizers that are built afterwards start from these thresholds. ``scaled_votes`` has a cell of
    two quanta per vote (one with accumulators of 4 or 2 bits), and ``momentum_votes`` refuses
    thresholds other than its own. Low thresholds (3 to 8) move signs and scales early and make the
    loss spike.

    Raises:
        ValueError: a threshold is outside 1..127 or beyond the accumulators of a module (7 for 4
            bits, 1 for 2), or a module has its optimizer already. Nothing is changed.
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
        optimizer = OPTIMIZERS.get(module)
        if optimizer is not None and optimizer() is not None:
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
) -> StepOutcome:
    """Run backward once, step, and clear the gradients, for a training loop of your own.

    A loss, component, signal or float gradient that is not finite skips the whole update. Every
    buffer is then bit-identical to what it was before the forward pass, also if the caller has
    already run backward, and the optimizer counts the skip. Undoing backward takes a copy of the
    accumulators, which a model without float parameters saves if the loss is passed here before
    backward is run.

    Args:
        model: the model. If its ternary modules have cast votes since the last step, backward has
            run and is not run again.
        optimizer: the optimizer to step.
        loss: scalar loss; may be None if ``loss_components`` are given or backward has run.
        loss_signal: scalar that modulates the vote threshold; it is detached and never carries a
            graph.
        loss_components: named scalar losses, summed into the loss.

    Raises:
        ValueError: there is neither a loss nor a component, and no vote was cast since the last
            step.
    """
    terms = [*(loss_components or {}).values()]
    if loss is not None:
        terms.insert(0, loss)
    modules = ternary_modules(model)
    backward_has_run = any(module.casts > 0 for _, module in modules)
    if not terms and not backward_has_run:
        raise ValueError("ternary_update needs a loss or loss_components, or backward to have run")
    signal = loss_signal.detach() if isinstance(loss_signal, Tensor) else loss_signal
    if not all(is_finite(term.detach()) for term in terms) or not is_finite(signal):
        return optimizer.skip_update()
    if not backward_has_run:
        if isinstance(optimizer, TernaryOptimizer) and not may_refuse(optimizer):
            for _, module in modules:
                module.commit_votes(ahead=True)
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        total.backward()  # type: ignore[no-untyped-call]
    norm = gradient_norm(p for group in optimizer.param_groups for p in group["params"])
    if not is_finite(norm):
        return optimizer.skip_update()
    outcome = optimizer.step(loss_signal=signal)
    optimizer.zero_grad()
    return outcome
