"""Resume at any draw, copies and pickles give the same bits."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

import arb_ternary_gqc as gqc
from arb_ternary.errors import ConfigError
from arb_ternary_train.audit import optimizer_state_bytes
from arb_ternary_train.optim.planned_state import planned_state_bytes

WRAPPERS: dict[str, Callable[[torch.optim.Optimizer], gqc.OptimizerWrapper]] = {
    "gnts": lambda o: gqc.GradientNormThreshold(o, max_batch_draws=7, threshold=1.2),
    "gnts-groups": lambda o: gqc.GradientNormThreshold(o, max_batch_draws=7, per_group=True),
    "gnr": lambda o: gqc.GradientNormRescaler(o, "independent"),
    "sbc": lambda o: gqc.ScheduledBatch(
        o, 2, 7, schedule=gqc.QuantitySchedule(batches=15, final=2.0)
    ),
    "mht": lambda o: gqc.MetricHypothesisTest(o, error_tolerance=0.1, max_batch_draws=6),
    "gns": lambda o: gqc.GradientNoiseScale(o, noise_multiplier=0.3, max_batch_draws=6),
    "nested": lambda o: gqc.GradientNormRescaler(gqc.ScheduledBatch(o, 1, 3)),
}


def start(name: str, parameters: Any) -> tuple[list[torch.nn.Parameter], gqc.OptimizerWrapper]:
    weights = parameters()
    inner = torch.optim.AdamW(
        [{"params": [weights[0]]}, {"params": [weights[1]], "lr": 0.01}], lr=0.05
    )
    return weights, WRAPPERS[name](inner)


def go_on(wrapper: Any, weights: Any, backward: Any, start: int, stop: int) -> list[bool]:
    decisions = []
    for seed in range(start, stop):
        backward(weights, seed, float("nan") if seed == 9 else 1.0)
        metric = (2.0 + 0.1 * (seed % 5),) if isinstance(wrapper, gqc.MetricHypothesisTest) else ()
        decisions.append(wrapper.step(*metric))
    return decisions


@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_resume_at_any_draw_is_bitwise(name: str, parameters: Any, backward: Any) -> None:
    weights, wrapper = start(name, parameters)
    decisions = go_on(wrapper, weights, backward, 0, 24)
    assert any(decisions)
    for stop in range(24):
        first, before = start(name, parameters)
        go_on(before, first, backward, 0, stop)
        stored = io.BytesIO()
        torch.save({"wrapper": before.state_dict(), "weights": [p.detach() for p in first]}, stored)
        stored.seek(0)
        saved = torch.load(stored, weights_only=True)

        second, after = start(name, parameters)
        go_on(after, second, backward, 100, 102)
        with torch.no_grad():
            for parameter, value in zip(second, saved["weights"], strict=True):
                parameter.copy_(value)
        after.load_state_dict(saved["wrapper"])
        assert go_on(after, second, backward, stop, 24) == decisions[stop:]
        assert all(torch.equal(a, b) for a, b in zip(second, weights, strict=True))
        assert after.statistics() == wrapper.statistics()


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))]
)
@pytest.mark.parametrize("name", sorted(WRAPPERS))
@pytest.mark.parametrize("stop", [0, 5, 11])
def test_copied_wrapper_gives_the_same_bits(
    name: str, duplicate: Any, stop: int, parameters: Any, backward: Any
) -> None:
    weights, wrapper = start(name, parameters)
    go_on(wrapper, weights, backward, 0, stop)
    others, other = duplicate((weights, wrapper))
    assert go_on(wrapper, weights, backward, stop, 20) == go_on(other, others, backward, stop, 20)
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    assert wrapper.statistics() == other.statistics()


@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_planned_state_bytes_is_the_maximum(name: str, parameters: Any, backward: Any) -> None:
    weights, wrapper = start(name, parameters)
    planned = planned_state_bytes(wrapper)
    kept = []
    for draw in range(24):
        go_on(wrapper, weights, backward, draw, draw + 1)
        kept.append(optimizer_state_bytes(wrapper))
    assert planned == max(kept)


def test_state_of_another_wrapper_is_refused(parameters: Any) -> None:
    _, threshold = start("gnts", parameters)
    for name in ("mht", "gnts-groups"):
        _, other = start(name, parameters)
        with pytest.raises(
            ConfigError, match="not of a GradientNormThreshold with the same groups"
        ):
            threshold.load_state_dict(other.state_dict())


# --- torch's schedulers

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: LambdaLR(o, lambda t: 1 / (1 + t)),
    "cosine": lambda o: CosineAnnealingLR(o, T_max=6, eta_min=0.05),
    "one cycle": lambda o: OneCycleLR(o, max_lr=2.0, total_steps=12, cycle_momentum=False),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=1, factor=0.5),
    "sequential": lambda o: SequentialLR(
        o, [LambdaLR(o, lambda t: 5.0 - t), CosineAnnealingLR(o, T_max=5)], milestones=[4]
    ),
}


def advance(scheduler: Any) -> None:
    scheduler.step(*((1.0,) if isinstance(scheduler, ReduceLROnPlateau) else ()))


@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_every_scheduler_drives_a_wrapper(
    name: str, scheduler: str, parameters: Any, backward: Any
) -> None:
    """Without a warning from torch, too: they would be errors here."""
    weights, wrapper = start(name.removesuffix("-groups"), parameters)
    if name == "sbc":
        wrapper.schedule = None
    groups = [
        {"params": [p], "lr": g["lr"]}
        for p, g in zip(parameters(), wrapper.param_groups, strict=False)
    ]
    reference = torch.optim.SGD(groups, lr=1.0)
    one = SCHEDULERS[scheduler](wrapper)
    two = SCHEDULERS[scheduler](reference)
    for seed in range(11):
        go_on(wrapper, weights, backward, 20 + seed, 21 + seed)
        reference.step()
        advance(one)
        advance(two)
        assert [g["lr"] for g in wrapper.param_groups] == [g["lr"] for g in reference.param_groups]


def test_schedules_of_the_wrapper_and_of_the_inner_optimizer(
    parameters: Any, backward: Any
) -> None:
    weights, wrapper = start("gnts", parameters)
    outer = LambdaLR(wrapper, lambda t: 1 / (1 + t))
    inner = LambdaLR(wrapper.inner, lambda t: 0.5**t)
    for seed in range(3):
        backward(weights, seed, 50.0)
        assert not wrapper.step()
        outer.step()
        inner.step()
    assert wrapper.statistics()["norm_threshold"] == 1.2 / 4
    assert [group["lr"] for group in wrapper.inner.param_groups] == [0.05 / 8, 0.01 / 8]


@pytest.mark.parametrize("name", ["mht", "gns"])
def test_schedule_without_a_quantity_drives_the_inner_rate(name: str, parameters: Any) -> None:
    weights = parameters()
    wrapper = WRAPPERS[name](torch.optim.SGD(weights, lr=0.1, momentum=0.9))
    OneCycleLR(wrapper, max_lr=0.5, total_steps=10)
    assert wrapper.inner.param_groups[0]["lr"] == pytest.approx(0.02)
    assert wrapper.inner.param_groups[0]["momentum"] == pytest.approx(0.95)


@pytest.mark.parametrize("stop", [0, 2, 3, 8])
def test_warm_up_resumes_exactly_at_any_step(stop: int, parameters: Any, backward: Any) -> None:
    def begin() -> tuple[Any, Any, Any]:
        weights, wrapper = start("gnts", parameters)
        return (
            weights,
            wrapper,
            gqc.NormWarmupScheduler(CosineAnnealingLR(wrapper, T_max=10), warmup_steps=3),
        )

    weights, wrapper, warmup = begin()
    thresholds = []
    for seed in range(12):
        go_on(wrapper, weights, backward, seed, seed + 1)
        warmup.step()
        thresholds.append(wrapper.norm_threshold)

    first, before, scheduler = begin()
    for seed in range(stop):
        go_on(before, first, backward, seed, seed + 1)
        scheduler.step()
    states = copy.deepcopy((before.state_dict(), scheduler.state_dict()))
    second, after, resumed = begin()
    with torch.no_grad():
        for parameter, value in zip(second, first, strict=True):
            parameter.copy_(value)
    after.load_state_dict(states[0])
    resumed.load_state_dict(states[1])
    seen = []
    for seed in range(stop, 12):
        go_on(after, second, backward, seed, seed + 1)
        resumed.step()
        seen.append(after.norm_threshold)
    assert seen == thresholds[stop:]
    assert all(torch.equal(a, b) for a, b in zip(second, weights, strict=True))


def test_warm_up_passes_the_metric_to_reduce_on_plateau(parameters: Any) -> None:
    wrapper = gqc.GradientNormThreshold(torch.optim.SGD(parameters(), lr=0.1))
    warmup = gqc.NormWarmupScheduler(
        ReduceLROnPlateau(wrapper, patience=0, factor=0.5), 2, warmup_start=3.0
    )
    values = [wrapper.norm_threshold]
    for _ in range(4):
        warmup.step(1.0)
        values.append(wrapper.norm_threshold)
    assert values == [3.0, 2.0, 0.5, 0.25, 0.125]


def test_warm_up_steps_must_be_given_once(parameters: Any) -> None:
    wrapper = gqc.GradientNormThreshold(torch.optim.SGD(parameters(), lr=0.1))
    schedule = LambdaLR(wrapper, lambda t: 1.0)
    for wrong in ({}, {"num_warmup_steps": -1}, {"num_warmup_steps": 1, "warmup_steps": 2}):
        with pytest.raises(ConfigError, match="give num_warmup_steps"):
            gqc.NormWarmupScheduler(schedule, **wrong)


def test_config_schedule_is_a_function_of_the_microbatch(parameters: Any, backward: Any) -> None:
    schedule = gqc.QuantitySchedule(
        batches=11, kind="linear", final=0.5, warmup_batches=4, warmup_start=3.0
    )
    weights = parameters()
    wrapper = gqc.GradientNormThreshold(
        torch.optim.SGD(weights, lr=0.1), threshold=2.0, schedule=schedule
    )
    seen = []
    for seed in range(14):
        backward(weights, seed)
        wrapper.step()
        seen.append(wrapper.norm_threshold)
    # 3 times the threshold, down a line to it at micro-batch 4, down another to half of it at
    # micro-batch 10.
    expected = [6.0, 5.0, 4.0, 3.0, *(2.0 - (t - 4) / 6 for t in range(4, 11)), 1.0, 1.0, 1.0]
    assert seen == pytest.approx(expected)


# --- the rest of the surface


def test_impossible_combinations_are_refused(parameters: Any) -> None:
    inner = torch.optim.SGD(parameters(), lr=0.1)
    for make, words in (
        (
            lambda: gqc.GradientNormThreshold(parameters()),
            "wraps a torch.optim.Optimizer, not a list",
        ),
        (lambda: gqc.GradientNormThreshold(inner, 0), "max_batch_draws must be at least 1"),
        (lambda: gqc.GradientNormThreshold(inner, non_finite="zero"), "non_finite must be"),
        (
            lambda: gqc.GradientNormThreshold(inner, local_gradients=True),
            "local_gradients needs the process_group",
        ),
        (lambda: gqc.GradientNormRescaler(inner, "both"), "mode must be 'global' or 'independent'"),
        (lambda: gqc.ScheduledBatch(inner, 0), "physical_batch_size must be at least 1"),
        (lambda: gqc.MetricHypothesisTest(inner, 1.0), "confidence must lie between 0 and 1"),
        (
            lambda: gqc.MetricHypothesisTest(inner, error_tolerance=-1),
            "error_tolerance must not be negative",
        ),
        (
            lambda: gqc.MetricHypothesisTest(inner, ema_alpha=2),
            "ema_alpha must lie between 0 and 1",
        ),
        (lambda: gqc.GradientNoiseScale(inner, estimator="other"), "estimator must be"),
    ):
        with pytest.raises(ConfigError, match=words):
            make()
    with pytest.raises(TypeError, match="needs the metric"):
        gqc.MetricHypothesisTest(inner).step()


def test_sparse_gradients_are_summed_like_dense_ones() -> None:
    ends = []
    for sparse in (True, False):
        torch.manual_seed(0)
        table = torch.nn.Embedding(6, 3, sparse=sparse, dtype=torch.float64)
        wrapper = gqc.GradientNormThreshold(
            torch.optim.SGD(table.parameters(), lr=0.5), threshold=6.5
        )
        decisions = []
        for seed in range(8):
            ids = torch.randint(0, 6, (4,), generator=torch.Generator().manual_seed(seed))
            table(ids).square().sum().backward()
            decisions.append(wrapper.step())
        ends.append((decisions, table.weight.detach().clone()))
    assert ends[0][0] == ends[1][0]
    assert 0 < sum(ends[0][0]) < 8
    torch.testing.assert_close(ends[0][1], ends[1][1], rtol=1e-12, atol=1e-12)


def test_torch_hooks_and_names_of_torch_gqc(parameters: Any, backward: Any) -> None:
    weights = parameters()
    wrapper = gqc.OptimizerWrapperGNTS(torch.optim.SGD(weights, lr=0.1))
    calls: list[str] = []
    wrapper.register_step_pre_hook(lambda *_: calls.append("before"))
    wrapper.register_step_post_hook(lambda *_: calls.append("after"))
    backward(weights, 0)
    wrapper.step()
    assert calls == ["before", "after"]
    assert wrapper.optimizer is wrapper.inner
    assert "GradientNormThreshold(SGD, batches=1" in repr(wrapper)
    assert isinstance(wrapper, torch.optim.Optimizer)
    assert gqc.OptimizerWrapperGNS(wrapper.inner).estimator == "norm_variance"
    assert gqc.GradientNoiseScale(wrapper.inner).estimator == "mccandlish"
    for name in gqc.__all__:
        assert getattr(gqc, name) is not None
