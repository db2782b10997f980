"""With ``torch.amp.GradScaler``: overflowing draws are dropped, and scales never mix in a sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradient_quality_control as theirs
import pytest
import torch

import arb_ternary_gqc as gqc
from arb_ternary.optim.protocol import as_outcome

WRAPPERS: dict[str, Callable[[torch.optim.Optimizer], gqc.OptimizerWrapper]] = {
    "gnts": lambda o: gqc.GradientNormThreshold(o, max_batch_draws=5, threshold=1.5),
    "gnr": gqc.GradientNormRescaler,
    "sbc": lambda o: gqc.ScheduledBatch(o, 1, 3),
    "gns": lambda o: gqc.GradientNoiseScale(o, max_batch_draws=5),
    "mht": lambda o: gqc.MetricHypothesisTest(o, error_tolerance=0.2, max_batch_draws=5),
}


def run(
    make: Any, parameters: Any, scaler: torch.amp.GradScaler | None, unscale: bool = False
) -> tuple[Any, Any]:
    weights = parameters(torch.float32)
    wrapper = make(torch.optim.SGD(weights, lr=0.1, momentum=0.5))
    decisions = []
    for seed in range(16):
        metric = (2.0 + 0.1 * (seed % 5),) if isinstance(wrapper, gqc.MetricHypothesisTest) else ()
        generator = torch.Generator().manual_seed(seed)
        loss = sum((p * (0.2 + torch.randn(p.shape, generator=generator))).sum() for p in weights)
        if scaler is None:
            loss.backward()
            decisions.append(wrapper.step(*metric))
        else:
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(wrapper)
            decisions.append(scaler.step(wrapper, *metric))
            scaler.update()
    return decisions, weights


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_changing_loss_scales_change_no_bit(name: str, unscale: bool, parameters: Any) -> None:
    plain, weights = run(WRAPPERS[name], parameters, None)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)
    scaled, others = run(WRAPPERS[name], parameters, scaler, unscale)
    assert scaler.get_scale() == 2.0**17
    assert scaled == plain
    assert any(plain)
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def test_overflow_is_dropped_and_lowers_the_scale(parameters: Any) -> None:
    weights = parameters(torch.float32)
    wrapper = gqc.ScheduledBatch(torch.optim.SGD(weights, lr=1.0), 1, 2, non_finite="raise")
    before = weights[0].detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    decisions = []
    for size in (1.0, float("inf"), 3.0):
        scaler.scale(weights[0].sum() * size).backward()
        decisions.append(scaler.step(wrapper))
        outcome = as_outcome(decisions[-1], wrapper)
        scaler.update()
        if size == float("inf"):
            assert outcome.skipped
            assert scaler.get_scale() == 2.0
            wrapper.zero_grad()  # as a training loop does after an overflow; the first draw stays
    assert decisions == [False, False, True]
    torch.testing.assert_close(weights[0], before - 2.0)
    assert wrapper.statistics()["dropped"] == 1


def test_grad_scaler_fails_with_torch_gqc(parameters: Any) -> None:
    weights = parameters(torch.float32)
    wrapper = theirs.OptimizerWrapperGNTS(torch.optim.SGD(weights, lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(weights[0].sum()).backward()
    with pytest.raises(KeyError, match="params"):
        scaler.step(wrapper)
