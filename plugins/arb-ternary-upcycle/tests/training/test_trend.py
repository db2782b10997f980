"""Convergence and autotuning, against a restatement of their rules."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from attrs import asdict

from arb_ternary_upcycle.trend import Autotune, Convergence, Trend


def means_of(losses: list[float]) -> list[float]:
    """The weighted means ``sum 0.9**(n - i) l_i / sum 0.9**(n - i)``."""
    found = []
    for n in range(1, len(losses) + 1):
        weights = 0.9 ** np.arange(n)[::-1]
        found.append(float(np.dot(weights, losses[:n]) / weights.sum()))
    return found


def random_losses(seed: int) -> list[float]:
    """A noisy fall to a floor, with jumps."""
    generator = np.random.default_rng(seed)
    steps = np.arange(200)
    smooth = 0.2 + np.exp(-steps / generator.uniform(5, 60))
    jumps = np.where(generator.random(200) < 0.03, generator.uniform(1.2, 3.0, 200), 1.0)
    return [float(each) for each in smooth * generator.uniform(0.9, 1.1, 200) * jumps]


@pytest.mark.parametrize("seed", range(8))
def test_convergence_at_the_target_or_without_progress(seed: int) -> None:
    losses = random_losses(seed)
    patience = 12
    target = 0.2 + 0.03 * seed
    convergence = Convergence(target, patience, Trend())
    never = Convergence(None, patience, Trend())
    means = means_of(losses)
    lowest = math.inf
    at = 0
    for step, (loss, mean) in enumerate(zip(losses, means, strict=True)):
        for each in (convergence, never):
            each.trend.observe(loss)
        if mean < lowest * (1 - 1e-4):
            lowest = mean
            at = step
        assert convergence.trend.mean == pytest.approx(mean)
        assert convergence.done == (mean <= target or step - at >= patience)
        assert not never.done


def test_mean_at_the_target_is_enough() -> None:
    convergence = Convergence(0.5, 3, Trend())
    assert not convergence.done
    convergence.trend.observe(0.5)
    assert convergence.trend.mean == 0.5
    assert convergence.done


@pytest.mark.parametrize("seed", range(8))
def test_rates_fall_at_spikes_and_plateaus(seed: int) -> None:
    losses = random_losses(seed)
    patience = 15
    decay = 0.5
    floor = 0.2
    autotune = Autotune(patience, decay, floor)
    means = means_of(losses)
    factor = 1.0
    lowest = math.inf
    waited = 0
    since = 0
    causes = []
    for step, (loss, mean) in enumerate(zip(losses, means, strict=True)):
        spike = step >= 10 and since >= 10 and loss > 1.5 * means[step - 1]
        waited = 0 if mean < lowest * (1 - 1e-4) else waited + 1
        lowest = mean if waited == 0 else lowest
        since += 1
        decision = autotune.observe(loss)
        if spike or waited >= patience:
            before = factor
            factor = max(floor, factor * decay)
            waited = since = 0
            causes.append("spike" if spike else "plateau")
            assert decision is not None
            assert (decision.cause, decision.factor, decision.lowers) == (
                causes[-1],
                factor,
                factor < before,
            )
        else:
            assert decision is None
        assert autotune.factor == factor
    if seed in (1, 2, 6):
        assert {*causes} == {"spike", "plateau"}
        assert factor == floor


def test_autotune_resumes() -> None:
    losses = random_losses(1)
    whole = Autotune(5, 0.5, 0.01)
    first = Autotune(5, 0.5, 0.01)
    for loss in losses[:70]:
        whole.observe(loss)
        first.observe(loss)
    second = Autotune(5, 0.5, 0.01)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for loss in losses[70:]:
        assert second.observe(loss) == whole.observe(loss)
    assert asdict(second) == asdict(whole)
