from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary_train.schedules import SCHEDULES, apply_schedule, scheduled_groups, scheduled_value

N = 101
W = 10
PEAK = 0.4
FLOOR = 0.1


def value(kind: str, step: int, *, steps: int = N, warmup: int = W) -> float:
    return scheduled_value(kind, step, steps=steps, warmup=warmup, peak=PEAK, floor=FLOOR)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["cosine", "linear", "sqrt", "constant"])
def test_warmup_rises_linearly_to_the_peak(kind: str) -> None:
    assert value(kind, 0) == pytest.approx(PEAK / W)
    assert value(kind, 4) == pytest.approx(PEAK / 2)
    assert value(kind, W - 1) == PEAK
    assert value(kind, W) == PEAK


def test_cosine_values() -> None:
    assert value("cosine", W + 45) == pytest.approx((PEAK + FLOOR) / 2)
    assert value("cosine", W + 30) == pytest.approx(
        FLOOR + (PEAK - FLOOR) * (1 + math.cos(math.pi / 3)) / 2
    )
    assert value("cosine", N - 1) == pytest.approx(FLOOR)


def test_linear_falls_evenly_to_the_floor_on_the_last_step() -> None:
    assert value("linear", W + 30) == pytest.approx(PEAK - (PEAK - FLOOR) / 3)
    assert value("linear", N - 1) == pytest.approx(FLOOR)


def test_sqrt_values() -> None:
    assert value("sqrt", 20, warmup=0, steps=81) == pytest.approx((PEAK + FLOOR) / 2)
    # 4/9 of the way, whose root is 2/3
    assert value("sqrt", W + 40) == pytest.approx(PEAK - (PEAK - FLOOR) * 2 / 3)
    assert value("sqrt", N - 1) == pytest.approx(FLOOR)


def test_two_stage_values() -> None:
    # N = 101: the second stage begins at step 51, 41/90 of the way from the peak at step 10 to the
    # floor at step 100.
    assert [value("two_stage", step) for step in (W, 30, 50)] == [
        value("linear", step) for step in (W, 30, 50)
    ]
    start = (PEAK - (PEAK - FLOOR) * 41 / 90) * 2 / 3
    assert value("two_stage", 51) == pytest.approx(start)
    assert value("two_stage", 65) == pytest.approx(start - (start - FLOOR) * 14 / 49)
    assert value("two_stage", N - 1) == pytest.approx(FLOOR)


def test_two_stage_to_zero_is_two_thirds_of_linear() -> None:
    def rate(kind: str, step: int) -> float:
        return scheduled_value(kind, step, steps=N, warmup=W, peak=PEAK, floor=0.0)  # type: ignore[arg-type]

    assert [rate("two_stage", step) for step in range(51)] == [
        rate("linear", step) for step in range(51)
    ]
    for step in range(51, N):
        assert rate("two_stage", step) == pytest.approx(rate("linear", step) * 2 / 3)


def test_two_stage_never_drops_below_the_floor_nor_leaves_it() -> None:
    rates = [
        scheduled_value("two_stage", step, steps=20, warmup=0, peak=0.4, floor=0.35)
        for step in range(20)
    ]
    assert rates[10:] == [0.35] * 10


def test_two_stage_after_a_long_warmup() -> None:
    assert value("two_stage", 79, warmup=80) == PEAK
    assert value("two_stage", 80, warmup=80) == pytest.approx(PEAK * 2 / 3)
    assert value("two_stage", N - 1, warmup=80) == pytest.approx(FLOOR)


def test_constant_stays_at_the_peak_and_none_has_no_warm_up() -> None:
    assert [value("constant", step) for step in (W, 50, N - 1)] == [PEAK] * 3
    assert [value("none", step) for step in (0, W, N - 1)] == [PEAK] * 3


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_a_schedule_agrees_with_that_of_torch(kind: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=PEAK)
    if kind == "cosine":
        torchs: torch.optim.lr_scheduler.LRScheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=N - 1, eta_min=FLOOR
        )
    else:
        torchs = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, FLOOR / PEAK, total_iters=N - 1)
    for step in range(N):
        assert value(kind, step, warmup=0) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        torchs.step()


@given(st.sampled_from(SCHEDULES), st.integers(1, 50), st.data())
def test_every_rate_lies_between_zero_and_the_peak(
    kind: str, steps: int, data: st.DataObject
) -> None:
    warmup = data.draw(st.integers(0, steps))
    step = data.draw(st.integers(0, steps - 1))
    assert 0.0 < value(kind, step, steps=steps, warmup=warmup) <= PEAK * (1 + 1e-12)


class Wrapper:
    """A wrapper that schedules its own quantity and has the rates inside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups = [{"params": [], "kind": "wrapper", "lr": 64.0}, inner.param_groups[0]]


def two_groups() -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [
        {"params": parameters[:1], "kind": "float", "lr": 0.5},
        {"params": parameters[1:], "kind": "ternary", "lr": 2.0},
    ]
    return torch.optim.SGD(groups, lr=1.0)


def test_float_groups_take_lr_and_ternary_groups_their_own() -> None:
    optimizer = two_groups()

    def at(step: int) -> dict[str, float]:
        return apply_schedule(
            optimizer, "cosine", step, steps=N, warmup=W, lr=PEAK, min_lr=FLOOR, min_rate=0.25
        )

    assert at(0) == pytest.approx({"lr": PEAK / W, "rate": 2.0 / W})
    assert at(W) == pytest.approx({"lr": PEAK, "rate": 2.0})
    assert at(N - 1) == pytest.approx({"lr": FLOOR, "rate": 0.5})
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([FLOOR, 0.5])


def test_float_group_without_lr_keeps_its_own_peak() -> None:
    rates = [
        apply_schedule(
            two_groups(), "linear", step, steps=N, warmup=0, lr=None, min_lr=None, min_rate=0.1
        )["lr"]
        for step in (0, N - 1)
    ]
    assert rates == pytest.approx([0.5, 0.05])


def test_none_leaves_every_rate_alone_but_sets_the_phases_own() -> None:
    assert apply_schedule(
        two_groups(), "none", 7, steps=N, warmup=0, lr=None, min_lr=None, min_rate=0.1
    ) == {
        "lr": 0.5,
        "rate": 2.0,
    }
    assert apply_schedule(
        two_groups(), "none", 7, steps=N, warmup=0, lr=0.3, min_lr=None, min_rate=0.1
    ) == {
        "lr": 0.3,
        "rate": 2.0,
    }


def test_groups_of_wrappers_are_not_scheduled() -> None:
    inner = two_groups()
    groups = list(scheduled_groups(Wrapper(inner)))  # type: ignore[arg-type]
    assert [group["kind"] for group in groups] == ["float", "ternary"]


def test_the_peak_is_remembered_in_the_optimizers_own_state() -> None:
    optimizer = two_groups()
    apply_schedule(optimizer, "cosine", 50, steps=N, warmup=0, lr=None, min_lr=None, min_rate=0.1)
    again = two_groups()
    again.load_state_dict(optimizer.state_dict())
    rates = apply_schedule(
        again, "cosine", 0, steps=N, warmup=0, lr=None, min_lr=None, min_rate=0.1
    )
    assert rates == {"lr": 0.5, "rate": 2.0}
