"""Faults of torch-gqc 0.7.0 that these wrappers do not have: each test shows both packages.

The numbers are those of the list in the README.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any

import gradient_quality_control as theirs
import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

import arb_ternary_gqc as ours
from arb_ternary_gqc.errors import PendingGradientError

NAMES = ["GNTS", "GNR", "SBC", "MHT", "GNS"]
FIRST = {"SBC": {"physical_batch_size": 1}}


def sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, **{"lr": 0.1, "momentum": 0.9, **options})


def wrap(package: Any, name: str, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    return getattr(package, f"OptimizerWrapper{name}")(optimizer, **FIRST.get(name, {}), **options)


def step(wrapper: Any, name: str, metric: float = 1.0) -> Any:
    return wrapper.step(metric) if name == "MHT" else wrapper.step()


# --- 1: state


@pytest.mark.parametrize("name", ["GNTS", "GNR", "SBC"])
def test_1_state_dicts_and_new_groups_work(name: str, parameters: Any) -> None:
    new = torch.nn.Parameter(torch.ones(2))
    wrapper = wrap(theirs, name, sgd(parameters()))
    with pytest.raises((KeyError, AttributeError)):
        wrapper.load_state_dict(torch.optim.Optimizer.state_dict(wrapper))
    with pytest.raises((KeyError, AttributeError)):
        wrapper.add_param_group({"params": [new]})

    wrapper = wrap(ours, name, sgd(parameters()))
    wrapper.load_state_dict(wrapper.state_dict())
    wrapper.add_param_group({"params": [new]})
    assert any(p is new for p in wrapper.param_groups[0]["params"])
    assert any(p is new for p in wrapper.inner.param_groups[1]["params"])


@pytest.mark.parametrize("name", NAMES)
def test_1_counters_are_in_the_state(name: str, parameters: Any, backward: Any) -> None:
    seen = {}
    for package in (theirs, ours):
        weights = parameters()
        wrapper = wrap(package, name, sgd(weights))
        for seed in range(3):
            backward(weights, seed)
            step(wrapper, name)
        try:
            state = wrapper.state_dict()
        except (KeyError, AttributeError):
            state = {}
        fresh = wrap(package, name, sgd(parameters()))
        if state:
            try:
                fresh.load_state_dict(state)
            except (KeyError, AttributeError):
                state = {}
        seen[package] = (wrapper.statistics(), fresh.statistics())
    assert seen[ours][0] == seen[ours][1]
    assert seen[theirs][0] != seen[theirs][1]


# --- 2: parameters without a gradient, parameters added later


@pytest.mark.parametrize(("name", "options"), [("GNTS", {}), ("GNR", {"mode": "global"})])
def test_2_parameters_without_a_gradient_are_left_alone(
    name: str, options: Any, parameters: Any, backward: Any
) -> None:
    for package in (theirs, ours):
        weights = parameters()
        before = weights[1].detach().clone()
        wrapper = wrap(package, name, sgd(weights), **options)
        backward(weights[:1], 0)
        if package is theirs:
            with pytest.raises((AttributeError, RuntimeError, TypeError)):
                wrapper.step()
        else:
            wrapper.step()
            assert torch.equal(weights[1], before)


def test_2_parameters_added_later_are_averaged(parameters: Any) -> None:
    moved = {}
    for package in (theirs, ours):
        first = torch.nn.Parameter(torch.zeros(2))
        later = torch.nn.Parameter(torch.zeros(2))
        inner = torch.optim.SGD([first], lr=1.0)
        wrapper = wrap(package, "SBC", inner, initial_logical_batch_size=4)
        inner.add_param_group({"params": [later]})
        for _ in range(4):
            (first.sum() + later.sum()).backward()
            stepped = wrapper.step()
        assert stepped
        moved[package] = (first[0].item(), later[0].item())
    assert moved[theirs] == (-1.0, -4.0)
    assert moved[ours] == (-1.0, -1.0)


# --- 3: gradients that are not finite


@pytest.mark.parametrize("name", ["GNTS", "GNR", "SBC", "GNS", "MHT"])
def test_3_nan_is_dropped_and_counted(name: str, parameters: Any, backward: Any) -> None:
    ends = {}
    for package in (theirs, ours):
        weights = parameters()
        wrapper = wrap(
            package, name, sgd(weights), **({} if name == "GNR" else {"max_batch_draws": 4})
        )
        for seed in range(8):
            backward(weights, seed, float("nan") if seed == 2 else 1.0)
            step(wrapper, name)
        ends[package] = (weights, wrapper)
    assert any(torch.isnan(p).any() for p in ends[theirs][0])
    weights, wrapper = ends[ours]
    assert all(torch.isfinite(p).all() for p in weights)
    assert wrapper.statistics()["dropped"] == 1
    assert wrapper.statistics()["batches"] == 8

    # It is as if that micro-batch had never been.
    others = parameters()
    wrapper = wrap(ours, name, sgd(others), **({} if name == "GNR" else {"max_batch_draws": 4}))
    for seed in (0, 1, 3, 4, 5, 6, 7):
        backward(others, seed)
        step(wrapper, name)
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def test_3_policy_raise_names_the_parameter_and_keeps_the_sum(
    parameters: Any, backward: Any
) -> None:
    weights = parameters()
    wrapper = ours.ScheduledBatch(sgd(weights), 1, 3, non_finite="raise")
    backward(weights, 0)
    wrapper.step()
    (weights[1].sum() * float("inf")).backward()
    with pytest.raises(
        ours.NonFiniteGradientError, match=r"micro-batch 2: the gradient of parameter 1.* 1 before"
    ):
        wrapper.step()
    assert wrapper.statistics()["num_draws"] == 1
    assert wrapper.statistics()["dropped"] == 1
    backward(weights, 1)
    wrapper.step()
    backward(weights, 2)
    assert wrapper.step()


def test_3_overflowing_squares_are_not_dropped(parameters: Any) -> None:
    weights = parameters(torch.float32)
    before = [p.detach().clone() for p in weights]
    wrapper = ours.ScheduledBatch(sgd(weights, lr=1e-30), 1)
    sum((p * 1e30).sum() for p in weights).backward()
    assert wrapper.step()
    assert wrapper.statistics()["dropped"] == 0
    assert not torch.equal(weights[0], before[0])


# --- 4: zero_grad


@pytest.mark.parametrize("name", NAMES)
def test_4_clearing_from_outside_is_explained(name: str, parameters: Any, backward: Any) -> None:
    weights = parameters()
    with pytest.raises(TypeError):
        wrap(theirs, name, sgd(weights)).zero_grad(set_to_none=True)
    wrapper = wrap(ours, name, sgd(weights))
    with pytest.raises(PendingGradientError, match="clears them itself when it steps") as caught:
        wrapper.zero_grad(set_to_none=True)
    assert "Remove the call" in caught.value.hint
    backward(weights, 0)
    with pytest.raises(PendingGradientError):
        wrapper.zero_grad()


def test_4_zero_grad_right_after_a_step_is_a_no_op(parameters: Any, backward: Any) -> None:
    weights = parameters()
    wrapper = ours.ScheduledBatch(sgd(weights), 1, 2)
    backward(weights, 0)
    assert not wrapper.step()
    with pytest.raises(PendingGradientError, match=r"\(1 so far\)"):
        wrapper.zero_grad()
    backward(weights, 1)
    assert wrapper.step()
    wrapper.zero_grad()


# --- 5: NormWarmupScheduler


def warmed_up(
    package: Any, make: Callable[[Any], Any], steps: int, count: int, parameters: Any
) -> list[float]:
    wrapper = package.OptimizerWrapperGNTS(sgd(parameters()))
    warmup = package.NormWarmupScheduler(make(wrapper), steps)
    values = []
    for _ in range(count):
        values.append(wrapper.param_groups[0]["lr"])
        wrapper.last_optimizer_result = None
        if package is ours:
            wrapper.step()
        warmup.step()
    return values


def alone(make: Callable[[Any], Any], count: int, parameters: Any) -> list[float]:
    optimizer = torch.optim.SGD(parameters(), lr=1.0)
    schedule = make(optimizer)
    values = []
    for _ in range(count):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return values


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    "make",
    [
        lambda w: LambdaLR(w, lambda t: 1 / (1 + t)),
        lambda w: CosineAnnealingLR(w, T_max=20, eta_min=0.1),
    ],
    ids=["closed form", "recursive"],
)
def test_5_warm_up_does_not_disturb_the_wrapped_schedule(make: Any, parameters: Any) -> None:
    expected = alone(make, 15, parameters)
    wrong, right = (warmed_up(package, make, 5, 15, parameters) for package in (theirs, ours))
    assert right[5:] == expected[5:]
    assert right[:5] == pytest.approx([10.0 - 9.0 * t / 5 for t in range(5)])
    assert wrong[5:] != pytest.approx(expected[5:])


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
def test_5_warm_up_is_copied_exactly(parameters: Any) -> None:
    wrapper = theirs.OptimizerWrapperGNTS(sgd(parameters()))
    warmup = theirs.NormWarmupScheduler(CosineAnnealingLR(wrapper, 9), 3)
    # Their copy never ends. Libraries raise the limit of recursion, and the stack would end first.
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(min(limit, 900))
    try:
        with pytest.raises((RecursionError, AttributeError, TypeError, pickle.PicklingError)):
            copy.deepcopy(warmup)
    finally:
        sys.setrecursionlimit(limit)
    for steps in (1, 5):
        wrapper = ours.OptimizerWrapperGNTS(sgd(parameters()))
        warmup = ours.NormWarmupScheduler(CosineAnnealingLR(wrapper, 9), 3)
        for _ in range(steps):
            wrapper.step()
            warmup.step()
        copies = [copy.deepcopy(warmup), pickle.loads(pickle.dumps(warmup))]
        for other in copies:
            for _ in range(4):
                other.optimizer.step()
                other.step()
        for _ in range(4):
            wrapper.step()
            warmup.step()
        for other in copies:
            assert other.optimizer.param_groups[0]["lr"] == wrapper.param_groups[0]["lr"]
            assert other.get_last_lr() == warmup.get_last_lr()


# --- 6: types and metrics


def test_6_step_returns_a_bool(parameters: Any, backward: Any) -> None:
    kinds = {}
    for package in (theirs, ours):
        weights = parameters()
        wrapper = wrap(package, "MHT", sgd(weights), error_tolerance=0.5)
        for seed in range(3):
            backward(weights, seed)
            decision = wrapper.step(1.0 + 0.001 * seed)
            kinds.setdefault(package, set()).add(type(decision))
    assert np.bool_ in kinds[theirs]
    assert kinds[ours] == {bool}


def test_6_negative_metrics_are_accepted(parameters: Any, backward: Any) -> None:
    decisions = {}
    for package in (theirs, ours):
        for sign in (1, -1):
            weights = parameters()
            wrapper = wrap(package, "MHT", sgd(weights), max_batch_draws=50)
            for seed in range(20):
                backward(weights, seed)
                decisions.setdefault((package, sign), []).append(
                    bool(wrapper.step(sign * (2.0 + 0.01 * (seed % 3))))
                )
    assert not any(decisions[theirs, -1])
    assert decisions[ours, -1] == decisions[ours, 1] == decisions[theirs, 1]
    assert any(decisions[ours, 1])


def test_6_nan_metrics_are_dropped(parameters: Any, backward: Any) -> None:
    averages = {}
    for package in (theirs, ours):
        weights = parameters()
        wrapper = wrap(package, "MHT", sgd(weights), max_batch_draws=3)
        for seed in range(9):
            backward(weights, seed)
            wrapper.step(float("nan") if seed == 4 else 2.0)
        averages[package] = wrapper.statistics()["running_avg_metric"]
    assert np.isnan(averages[theirs])
    assert averages[ours] == pytest.approx(2.0)


# --- 7: groups, AMP, closures, ranks


def test_7_groups_can_have_schedules_of_their_own(parameters: Any, backward: Any) -> None:
    def groups() -> list[dict[str, Any]]:
        return [{"params": [p]} for p in parameters()]

    wrapper = theirs.OptimizerWrapperGNTS(sgd(groups()))
    with pytest.raises(ValueError):
        LambdaLR(wrapper, [lambda t: 1.0, lambda t: 2.0])
    inner = sgd(groups())
    wrapper = ours.OptimizerWrapperGNTS(inner, per_group=True)
    schedule = LambdaLR(wrapper, [lambda t: 5.0, lambda t: 1.0 / (t + 1)])
    weights = [group["params"][0] for group in inner.param_groups]
    # The thresholds are 5 and 1; the second gradient, of norm 4, meets its own only at the fifth
    # draw.
    decisions = []
    for _ in range(5):
        (weights[0].sum() * 0.1).backward()
        if not decisions:
            (weights[1].sum() * 2.0).backward()
        decisions.append(wrapper.step())
    assert decisions == [False, False, False, False, True]
    schedule.step()
    assert [group["lr"] for group in wrapper.param_groups] == [5.0, 0.5]


def test_7_groups_can_be_rescaled_separately(parameters: Any) -> None:
    first, second = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    wrapper = ours.GradientNormRescaler(
        torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=1.0), per_group=True
    )
    wrapper.param_groups[1]["lr"] = 3.0
    (first.sum() * 7 + second.sum() * 0.1).backward()
    wrapper.step()
    assert first.norm().item() == pytest.approx(1.0)
    assert second.norm().item() == pytest.approx(3.0)


def test_7_a_closure_is_a_microbatch() -> None:
    """The mean of gradients 1, 2 and 3 is 2; torch-gqc runs the closure once more."""
    ends = {}
    for package in (theirs, ours):
        weight = torch.nn.Parameter(torch.zeros(()))
        wrapper = wrap(
            package, "SBC", torch.optim.SGD([weight], lr=1.0), initial_logical_batch_size=3
        )
        calls = []
        for gradient in (1.0, 2.0, 3.0):

            def closure(
                gradient: float = gradient, weight: Any = weight, calls: list[float] = calls
            ) -> Any:
                calls.append(gradient)
                loss = weight * gradient
                loss.backward()
                return loss

            if package is theirs:
                closure()
            wrapper.step(closure)
        ends[package] = (weight.item(), calls)
    assert ends[ours] == (-2.0, [1.0, 2.0, 3.0])
    assert ends[theirs] == (-5.0, [1.0, 2.0, 3.0, 3.0])


def test_7_a_closure_may_clear_its_own_gradients() -> None:
    weight = torch.nn.Parameter(torch.zeros(()))
    wrapper = ours.ScheduledBatch(torch.optim.SGD([weight], lr=1.0), 1, 2)
    for gradient in (1.0, 3.0):

        def closure(gradient: float = gradient) -> Any:
            wrapper.zero_grad()
            loss = weight * gradient
            loss.backward()
            return loss

        wrapper.step(closure)
    assert weight.item() == -2.0


def test_7_the_metric_of_a_closure_is_its_loss() -> None:
    weight = torch.nn.Parameter(torch.zeros(()))
    wrapper = ours.MetricHypothesisTest(
        torch.optim.SGD([weight], lr=1.0), ema_alpha=0.5, max_batch_draws=2
    )

    def closure() -> Any:
        (weight * 2.0).backward()
        return torch.tensor(3.0)

    assert [wrapper.step(closure=closure) for _ in range(2)] == [False, True]
    assert wrapper.statistics()["running_avg_metric"] == 3.0
    assert [wrapper.step(5.0, closure) for _ in range(2)] == [False, True]
    assert wrapper.statistics()["running_avg_metric"] == 4.0
    assert weight.item() == -4.0


def test_7_optimizers_that_need_a_closure_are_refused() -> None:
    from arb_ternary.errors import ConfigError

    inner = torch.optim.LBFGS([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(ConfigError, match="LBFGS evaluates a closure several times"):
        ours.GradientNormThreshold(inner)


def test_counts_start_at_zero(parameters: Any, backward: Any) -> None:
    for package, first in ((theirs, 1), (ours, 0)):
        weights = parameters()
        wrapper = wrap(package, "SBC", sgd(weights), initial_logical_batch_size=2)
        assert (wrapper.statistics()["batches"], wrapper.statistics()["num_draws"]) == (
            first,
            first,
        )
        for seed in range(3):
            backward(weights, seed)
            wrapper.step()
        assert (wrapper.statistics()["batches"], wrapper.statistics()["steps"]) == (3 + first, 1)
