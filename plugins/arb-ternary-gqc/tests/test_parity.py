"""The same decisions as torch-gqc 0.7.0, and the same weights to the bit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import gradient_quality_control as theirs
import pytest
import torch
from attrs import frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

import arb_ternary_gqc as ours
from arb_ternary_signgsd import SignGSD

# Without a step of the inner optimizer, 0.7.0 lets torch warn about schedulers on it.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")

INNER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    "signgsd": lambda p: SignGSD(p, lr=0.03, weight_decay=0.2),
}
ON_WRAPPER: dict[str, Callable[[Any], Any] | None] = {
    "none": None,
    "lambda": lambda w: LambdaLR(w, lambda t: 1.5 / (1 + t / 4)),
    "cosine": lambda w: CosineAnnealingLR(w, T_max=7, eta_min=0.1),
}
ON_INNER: dict[str, Callable[[Any], Any] | None] = {
    "none": None,
    "steps": lambda o: StepLR(o, step_size=3, gamma=0.5),
    "lambda": lambda o: LambdaLR(o, lambda t: 1 / (1 + t)),
}


@frozen
class Sequence_:
    """Micro-batches: a seed and a size of the noise in each gradient, and a metric."""

    seeds: Sequence[int]
    sizes: Sequence[float]
    metrics: Sequence[float]


sizes = st.floats(0.01, 4.0, allow_subnormal=False)
sequences = st.lists(
    st.tuples(st.integers(0, 10_000), sizes, st.floats(1.9, 2.1) | st.floats(0.1, 5)),
    min_size=1,
    max_size=25,
).map(lambda items: Sequence_(*zip(*items, strict=True)))
setups = st.fixed_dictionaries(
    {
        "inner": st.sampled_from(sorted(INNER)),
        "outer": st.sampled_from(sorted(ON_WRAPPER)),
        "schedule": st.sampled_from(sorted(ON_INNER)),
    }
)
every = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def run(
    package: Any,
    name: str,
    sequence: Sequence_,
    setup: dict[str, str],
    parameters: Any,
    backward: Any,
    **options: Any,
) -> tuple[list[Any], list[torch.Tensor]]:
    """The decisions, and the weights after each micro-batch."""
    weights = parameters()
    inner = INNER[setup["inner"]](weights)
    wrapper = getattr(package, f"OptimizerWrapper{name}")(inner, **options)
    schedulers = [
        make(target)
        for make, target in (
            (ON_WRAPPER[setup["outer"]], wrapper),
            (ON_INNER[setup["schedule"]], inner),
        )
        if make is not None
    ]
    decisions = []
    trajectory = []
    for seed, size, metric in zip(sequence.seeds, sequence.sizes, sequence.metrics, strict=True):
        backward(weights, seed, size)
        decisions.append(wrapper.step(metric) if name == "MHT" else wrapper.step())
        for scheduler in schedulers:
            scheduler.step()
        trajectory.append(torch.cat([p.detach().flatten().clone() for p in weights]))
    return decisions, trajectory


def compare(
    name: str, sequence: Sequence_, setup: dict[str, str], *fixtures: Any, **options: Any
) -> list[bool]:
    mine, my_weights = run(ours, name, sequence, setup, *fixtures, **options)
    their, their_weights = run(theirs, name, sequence, setup, *fixtures, **options)
    assert mine == [bool(decision) for decision in their]
    assert all(type(decision) is bool for decision in mine)
    assert all(torch.equal(a, b) for a, b in zip(my_weights, their_weights, strict=True))
    return mine


@every
@given(sequence=sequences, setup=setups, draws=st.integers(1, 9))
def test_threshold_decides_like_torch_gqc(
    parameters: Any, backward: Any, sequence: Sequence_, setup: Any, draws: int
) -> None:
    compare("GNTS", sequence, setup, parameters, backward, max_batch_draws=draws)


@every
@given(sequence=sequences, setup=setups, mode=st.sampled_from(["global", "independent"]))
def test_rescaled_gradients_equal_torch_gqc(
    parameters: Any, backward: Any, sequence: Sequence_, setup: Any, mode: str
) -> None:
    compare("GNR", sequence, setup, parameters, backward, mode=mode)


@every
@given(
    sequence=sequences,
    setup=setups,
    physical=st.integers(1, 5),
    logical=st.none() | st.integers(1, 30),
    draws=st.integers(1, 9),
)
def test_scheduled_batch_equals_torch_gqc(
    parameters: Any,
    backward: Any,
    sequence: Sequence_,
    setup: Any,
    physical: int,
    logical: int | None,
    draws: int,
) -> None:
    options = {
        "physical_batch_size": physical,
        "initial_logical_batch_size": logical,
        "max_batch_draws": draws,
    }
    compare("SBC", sequence, setup, parameters, backward, **options)


@every
@given(
    sequence=sequences,
    setup=setups,
    draws=st.integers(1, 12),
    confidence=st.sampled_from([0.5, 0.9, 0.98]),
    tolerance=st.sampled_from([0.03, 0.2, 1.0]),
    alpha=st.sampled_from([0.01, 0.5]),
)
def test_metric_test_decides_like_torch_gqc(
    parameters: Any,
    backward: Any,
    sequence: Sequence_,
    setup: Any,
    draws: int,
    confidence: float,
    tolerance: float,
    alpha: float,
) -> None:
    options = {
        "confidence": confidence,
        "error_tolerance": tolerance,
        "ema_alpha": alpha,
        "max_batch_draws": draws,
    }
    compare("MHT", sequence, setup, parameters, backward, **options)


@every
@given(
    sequence=sequences,
    setup=setups,
    draws=st.integers(1, 9),
    multiplier=st.sampled_from([1.0, 0.1, 0.03, 0.001]),
)
def test_norm_variance_decides_like_torch_gqc(
    parameters: Any, backward: Any, sequence: Sequence_, setup: Any, draws: int, multiplier: float
) -> None:
    options = {"noise_multiplier": multiplier, "max_batch_draws": draws}
    compare("GNS", sequence, setup, parameters, backward, **options)


@pytest.mark.parametrize("name", ["GNTS", "SBC", "MHT", "GNS"])
def test_compared_runs_have_steps_of_few_and_many_draws(
    parameters: Any, backward: Any, name: str
) -> None:
    """A comparison of two wrappers that always or never step would show nothing."""
    sequence = Sequence_(range(40), [0.6] * 40, [2.0 + 0.05 * (i % 5) for i in range(40)])
    options = {
        "GNTS": {"max_batch_draws": 8},
        "SBC": {"physical_batch_size": 2, "initial_logical_batch_size": 6},
        "MHT": {"max_batch_draws": 8, "error_tolerance": 0.05},
        "GNS": {"noise_multiplier": 0.01},
    }[name]
    setup = {"inner": "sgd", "outer": "none", "schedule": "none"}
    decisions = compare(name, sequence, setup, parameters, backward, **options)
    assert 0 < sum(decisions) < len(decisions)


@given(steps=st.integers(1, 12), start=st.floats(1.5, 20), end=st.floats(0.5, 1.5))
@every
def test_warm_up_of_closed_form_schedules_equals_torch_gqc(
    parameters: Any, steps: int, start: float, end: float
) -> None:
    values = []
    for package in (ours, theirs):
        wrapper = package.OptimizerWrapperGNTS(torch.optim.SGD(parameters(), lr=0.1))
        warmup = package.NormWarmupScheduler(LambdaLR(wrapper, lambda t: 1.0), steps, start, end)
        seen = []
        for _ in range(steps):
            seen.append(wrapper.param_groups[0]["lr"])
            wrapper.step() if package is ours else None
            warmup.step()
        values.append(seen)
    assert values[0] == pytest.approx(values[1], rel=1e-12)


# --- the surface, and the edges that no random sequence meets


@pytest.mark.parametrize(
    "name",
    [
        *(f"OptimizerWrapper{each}" for each in ("GNTS", "GNR", "SBC", "MHT", "GNS")),
        "NormWarmupScheduler",
    ],
)
def test_signatures_equal_torch_gqc(
    name: str,
) -> None:
    wanted, found = (
        list(inspect.signature(getattr(each, name)).parameters.values()) for each in (theirs, ours)
    )
    for here, there in zip(found, wanted, strict=False):
        assert here.name == there.name
        # The warm-up's number of steps has a second name here, so that either may be left out.
        assert here.default == there.default or (here.name, here.default) == (
            "num_warmup_steps",
            None,
        )
    assert len(found) >= len(wanted)
    if name == "OptimizerWrapperMHT":
        assert list(inspect.signature(ours.OptimizerWrapperMHT.step).parameters)[:3] == [
            "self",
            "metric",
            "closure",
        ]


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("GNTS", {"norm_threshold"}),
        ("GNR", {"target_norm", "mode"}),
        ("SBC", {"target_draws", "target_logical_batch_size", "physical_batch_size"}),
        ("MHT", {"running_avg_metric"}),
        ("GNS", {"noise_multiplier", "estimated_gns"}),
    ],
)
def test_statistics_have_the_names_of_torch_gqc(
    parameters: Any, backward: Any, name: str, own: set[str]
) -> None:
    statistics = {}
    for package in (theirs, ours):
        weights = parameters()
        first = {"physical_batch_size": 1} if name == "SBC" else {}
        wrapper = getattr(package, f"OptimizerWrapper{name}")(
            torch.optim.SGD(weights, lr=0.1), **first
        )
        for seed in range(2):
            backward(weights, seed)
            wrapper.step(*([2.0] if name == "MHT" else []))
        statistics[package] = wrapper.statistics()
    more = {"last_grad_norm", "last_num_draws", "dropped"}
    assert set(statistics[ours]) == {"batches", "steps", "num_draws"} | own | more
    assert set(statistics[theirs]) == set(statistics[ours]) - more
    if name in ("SBC", "GNR"):
        assert statistics[ours]["last_num_draws"] == 1
        expected = torch.cat([(0.2 + noise).flatten() for noise in noises(1)]).norm().item()
        assert statistics[ours]["last_grad_norm"] == pytest.approx(expected, rel=1e-12)


def noises(seed: int) -> list[torch.Tensor]:
    """The noise of one micro-batch of the fixture ``backward``."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 2), (4,))
    ]


def decided(
    package: Any, name: str, gradients: Sequence[Sequence[float]], **options: Any
) -> tuple[list[bool], Any]:
    """The decisions on these gradients of one parameter, and where it ends."""
    weight = torch.nn.Parameter(torch.zeros(len(gradients[0]), dtype=torch.float64))
    quantity = options.pop("quantity", None)
    wrapper = getattr(package, f"OptimizerWrapper{name}")(
        torch.optim.SGD([weight], lr=1.0), **options
    )
    if quantity is not None:
        LambdaLR(wrapper, lambda _: quantity)
    decisions = []
    for gradient in gradients:
        (weight * torch.tensor(gradient, dtype=torch.float64)).sum().backward()
        decisions.append(bool(wrapper.step(2.0) if name == "MHT" else wrapper.step()))
    return decisions, weight.detach()


@pytest.mark.parametrize(
    ("name", "gradients", "options", "expected"),
    [
        # 5 is not below 5, nor is the mean of two; that of three is.
        ("GNTS", [[3, 4], [3, 4], [0, 0]], {"quantity": 5.0}, [False, False, True]),
        # Halves are rounded to even: 2.5 to 2, 3.5 to 4; and there is always one.
        (
            "SBC",
            [[1]] * 4,
            {"physical_batch_size": 2, "initial_logical_batch_size": 5},
            [False, True] * 2,
        ),
        (
            "SBC",
            [[1]] * 4,
            {"physical_batch_size": 2, "initial_logical_batch_size": 7},
            [False] * 3 + [True],
        ),
        ("SBC", [[1]] * 2, {"physical_batch_size": 4, "initial_logical_batch_size": 1}, [True] * 2),
        ("SBC", [[1]] * 4, {"physical_batch_size": 3}, [True] * 4),
        # A norm as small as what is added to it ends at half the target, and nothing stays nothing.
        ("GNR", [[1e-12, 0], [0, 0]], {}, [True, True]),
        ("GNR", [[1e-12, 0], [0, 0]], {"mode": "independent"}, [True, True]),
        # Equal metrics have an interval all the same, which no tolerance of 0 holds.
        (
            "MHT",
            [[1]] * 6,
            {"error_tolerance": 0.0, "max_batch_draws": 3},
            [False, False, True] * 2,
        ),
        ("MHT", [[1]] * 4, {"error_tolerance": 0.01}, [False, True] * 2),
        ("GNS", [[1]] * 6, {}, [False, True] * 3),
    ],
)
def test_decisions_at_the_edge_equal_torch_gqc(
    name: str, gradients: Any, options: dict[str, Any], expected: list[bool]
) -> None:
    (mine, weight), (their, other) = (
        decided(each, name, gradients, **options) for each in (ours, theirs)
    )
    assert mine == their == expected
    assert torch.equal(weight, other)
    if name == "GNR":
        assert weight.tolist() == pytest.approx([-0.5, 0.0])


@pytest.mark.parametrize("name", ["GNTS", "GNR", "SBC", "MHT", "GNS"])
def test_counts_from_one_equal_torch_gqc(name: str, parameters: Any, backward: Any) -> None:
    first = {"SBC": {"physical_batch_size": 1, "initial_logical_batch_size": 3}}.get(name, {})
    logged = []
    for package, more in ((theirs, {}), (ours, {"count_from": 1})):
        weights = parameters()
        wrapper = getattr(package, f"OptimizerWrapper{name}")(
            torch.optim.SGD(weights, lr=0.1), **first, **more
        )
        counts = []
        for seed in range(9):
            for after in (False, True):
                if after:
                    backward(weights, seed, 1.0)
                    wrapper.step(1.0 + 0.1 * seed) if name == "MHT" else wrapper.step()
                statistics = wrapper.statistics()
                counts.append([statistics[key] for key in ("batches", "steps", "num_draws")])
        logged.append(counts)
    assert logged[0] == logged[1]


def test_errors_have_the_classes_of_torch_gqc(parameters: Any, backward: Any) -> None:
    for package in (theirs, ours):
        weights = parameters()
        with pytest.raises(ValueError, match="mode must be 'global' or 'independent'"):
            package.OptimizerWrapperGNR(torch.optim.SGD(weights, lr=0.1), mode="local")
        for name in ("GNTS", "GNR", "MHT", "GNS", "SBC"):
            first = {"physical_batch_size": 1} if name == "SBC" else {}
            wrapper = getattr(package, f"OptimizerWrapper{name}")(
                torch.optim.SGD(weights, lr=0.1), **first
            )
            backward(weights, 0, 1.0)
            with pytest.raises(NotImplementedError):
                wrapper.zero_grad()
