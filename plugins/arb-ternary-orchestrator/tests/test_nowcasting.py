"""Nowcasting on trajectories with a known future."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import Optimizer

from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import StepOutcome, Trainable
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_orchestrator import Nowcasting, NowcastingConfig
from arb_ternary_orchestrator.optim.nowcasting import linear_jump
from arb_ternary_testing.component import make_choice


class Along(Optimizer):
    """Sets a parameter to a function of the number of steps since the last jump."""

    def __init__(self, parameter: torch.nn.Parameter, way: Any) -> None:
        super().__init__([parameter], {"lr": 1.0})
        self.way = way
        self.taken = 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        with torch.no_grad():
            self.param_groups[0]["params"][0].copy_(self.way(self.taken))
        return StepOutcome()


def after(way: Any, steps: int, **options: Any) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = Nowcasting(Along(parameter, way), **{"trust_ratio": None, **options})
    for _ in range(steps):
        optimizer.step()
    return parameter.detach()


START = torch.tensor([1.0, -2.0, 0.0, 5.0]).double()
SLOPE = torch.tensor([0.3, 0.0, -1.0, 1e-3]).double()


@pytest.mark.parametrize(
    ("window", "spacing", "horizon"),
    [(2, 1, 1), (5, 4, 10), (3, 2, 25)],
)
def test_jump_along_a_line(window: int, spacing: int, horizon: int) -> None:
    found = after(
        lambda t: START + SLOPE * t,
        20,
        every=20,
        window=window,
        spacing=spacing,
        horizon=horizon,
    )
    np.testing.assert_allclose(found.numpy(), (START + SLOPE * (20 + horizon)).numpy(), rtol=1e-12)


def test_linear_jump_is_least_squares() -> None:
    random = np.random.default_rng(5)
    for count, ahead in ((2, 1.0), (5, 2.5), (8, 0.5)):
        points = random.standard_normal((count, 6))
        slope, level = np.polyfit(np.arange(count), points, 1)
        expected = level + slope * (count - 1 + ahead) - points[-1]
        found = linear_jump([torch.from_numpy(each - points[-1]) for each in points], ahead)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-12)


def test_trust_ratio_bounds_the_jump() -> None:
    way = SLOPE.norm()
    for ratio, expected in ((0.5, 0.5 * 4 * way), (10.0, 40 * way)):
        found = after(
            lambda t: START + SLOPE * t,
            8,
            every=8,
            window=5,
            spacing=1,
            horizon=40,
            trust_ratio=ratio,
        )
        assert float((found - START - 8 * SLOPE).norm()) == pytest.approx(float(expected), rel=1e-9)


def test_jumps_happen_at_the_configured_interval() -> None:
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = Nowcasting(
        torch.optim.SGD([weight], lr=1.0), every=4, window=2, spacing=2, horizon=3, trust_ratio=None
    )
    seen = []
    kept = []
    for _ in range(9):
        weight.grad = -torch.ones(1, dtype=torch.float64)
        outcome = optimizer.step()
        seen.append(float(weight.detach()))
        kept.append(len(optimizer.state.get(weight, {}).get("snapshots", [])))
    assert seen == [1.0, 2.0, 3.0, 7.0, 8.0, 9.0, 10.0, 14.0, 15.0]
    assert kept == [0, 1, 1, 0, 0, 1, 1, 0, 0]
    assert outcome.statistics["jumps"] == 2


def test_snapshots_of_another_spacing_are_dropped() -> None:
    def taken(optimizer: Nowcasting, steps: int) -> float:
        for _ in range(steps):
            weight.grad = -torch.ones(1, dtype=torch.float64)
            optimizer.step()
        return float(weight.detach())

    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    plan = {"every": 8, "horizon": 3, "trust_ratio": None}
    first = Nowcasting(torch.optim.SGD([weight], lr=1.0), window=3, spacing=2, **plan)
    assert taken(first, 6) == 6.0
    second = Nowcasting(torch.optim.SGD([weight], lr=1.0), window=4, spacing=1, **plan)
    second.load_state_dict(first.state_dict())
    assert taken(second, 2) == 8.0
    assert taken(second, 8) == 16.0 + 3.0


def test_unmoved_parameter_keeps_its_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(1000, generator=generator))
    before = weight.detach().clone()
    optimizer = Nowcasting(torch.optim.SGD([weight]), every=10, window=5, spacing=2)
    for _ in range(10):
        optimizer.step()
    assert optimizer.jumps == 1
    assert torch.equal(weight, before)


def test_snapshots_that_do_not_fit_are_refused() -> None:
    text = "must be greater than the 16 steps that 5 snapshots span, 4 apart; 16 is not"
    with pytest.raises(ConfigError, match=text):
        make_choice("optimizer", "nowcasting", {"every": 16})
    with pytest.raises(ConfigError, match=text):
        Nowcasting(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), every=16)


def test_trits_are_refused_with_the_reason() -> None:
    ternary = TernaryLinear(32, 4, group_size=32)
    options: NowcastingConfig = make_choice("optimizer", "nowcasting").options
    with pytest.raises(
        ConfigError, match=r"nowcasting cannot train 'head': .* there is nothing to extrapolate"
    ):
        Nowcasting.build(options, Trainable(ternary={"head": ternary}))
    votes = make_choice("optimizer", "sign_votes").build(Trainable(ternary={"head": ternary}))
    with pytest.raises(
        ConfigError, match=r"trits .* are integers; there is nothing to extrapolate"
    ):
        Nowcasting(votes)
