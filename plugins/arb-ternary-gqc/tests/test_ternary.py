"""Ternary modules: no step means no flip, and norms come from statistics of the vote kernels."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import arb_ternary_gqc as gqc
from arb_ternary import TernaryLinear
from arb_ternary.backends.select import candidates
from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import as_outcome, collect_trainable
from arb_ternary.plugins.manager import manager
from arb_ternary_signgsd.config import SignGSDConfig
from arb_ternary_signgsd.optimizer import build as build_signgsd
from arb_ternary_testing.component import make_choice
from arb_ternary_train.optim.joined import JoinedOptimizer
from arb_ternary_votes.config import SignVotesConfig
from arb_ternary_votes.scaled_votes import ScaledVotes
from arb_ternary_votes.sign_votes import SignVotes

INNER: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sign_votes": lambda m: SignVotes(collect_trainable(m).ternary, accum_threshold=2),
    "scaled_votes": lambda m: ScaledVotes(collect_trainable(m).ternary, lr=0.8),
    "signgsd": lambda m: build_signgsd(
        SignGSDConfig(votes=SignVotesConfig(accum_threshold=2)), collect_trainable(m)
    ),
}


def layer(gradients: str = "float") -> nn.Module:
    torch.manual_seed(3)
    activations = "int8" if gradients == "int8" else "float"
    return nn.Sequential(
        TernaryLinear(
            64, 8, group_size=32, activations=activations, gradients=gradients, backend="torch"
        )
    )


def backward(model: nn.Module, seed: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 64, generator=generator)
    y = torch.randn(16, 8, generator=generator)
    device = next(iter(model.state_dict().values())).device
    ((model(x.to(device)) - y.to(device)).square().mean() * size).backward()


def gradient(model: nn.Module, seed: int) -> np.ndarray:
    """Return the weight gradient of a micro-batch, from a float layer of the same weights."""
    dense = nn.Linear(64, 8, bias=False)
    with torch.no_grad():
        dense.weight.copy_(model[0].dense_weight())
    backward(nn.Sequential(dense), seed)
    return dense.weight.grad.double().numpy()


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("inner", sorted(INNER))
def test_votes_at_every_draw_and_flips_at_steps_only(inner: str) -> None:
    model = layer()
    wrapper = gqc.ScheduledBatch(INNER[inner](model), 1, 5)
    flips = 0
    for seed in range(40):
        before = state(model)
        backward(model, seed)
        voted = state(model)
        for name in ("0.weight", "0.exponent"):
            assert torch.equal(voted[name], before[name])
        stepped = wrapper.step()
        assert stepped == (seed % 5 == 4)
        if not stepped:
            # Not a bit of the module's state moves when a step is put off.
            assert all(torch.equal(value, voted[name]) for name, value in state(model).items())
            assert as_outcome(stepped, wrapper).flips == 0
        flips += wrapper.last_outcome.flips
        if seed > 5:
            assert not torch.equal(voted["0.votes"], before["0.votes"])
    assert flips > 0


@pytest.mark.parametrize("gradients", ["float", "int8"])
@pytest.mark.parametrize("inner", sorted(INNER))
def test_one_draw_per_step_equals_the_inner_optimizer(inner: str, gradients: str) -> None:
    ends = []
    for wrap in (
        lambda o: o,
        lambda o: gqc.ScheduledBatch(o, 1),
        lambda o: gqc.GradientNormThreshold(o, 1),
    ):
        model = layer(gradients)
        optimizer = wrap(INNER[inner](model))
        for seed in range(25):
            backward(model, seed)
            optimizer.step()
            if not isinstance(optimizer, gqc.OptimizerWrapper):
                optimizer.zero_grad()
        ends.append(state(model))
    for other in ends[1:]:
        assert all(torch.equal(ends[0][name], value) for name, value in other.items())


def _takes(spec: Any) -> bool:
    """Whether a component trains float parameters or ternary modules by itself."""
    return spec.accepts <= {"float", "ternary"} and not spec.name.startswith("gqc.")


@pytest.mark.parametrize(
    "name", [each.spec.name for each in manager().registry.all("optimizer") if _takes(each.spec)]
)
def test_step_of_several_draws_equals_plain_accumulation(
    name: str,
) -> None:
    accepts = manager().registry.get("optimizer", name).spec.accepts
    ends = []
    for wrapped in (True, False):
        torch.manual_seed(3)
        hidden = nn.Linear(64, 64) if "float" in accepts else nn.Identity()
        ternary = (
            TernaryLinear(64, 8, group_size=32, activations="float")
            if "ternary" in accepts
            else nn.Identity()
        )
        model = nn.Sequential(hidden, ternary)
        inner = make_choice("optimizer", name, {}).build(collect_trainable(model))
        wrapper = gqc.ScheduledBatch(inner, 1, 3)
        before = state(model)
        for seed in range(60):
            generator = torch.Generator().manual_seed(seed)
            model(torch.randn(16, 64, generator=generator)).square().mean().backward()
            if wrapped:
                assert wrapper.step() == (seed % 3 == 2)
            elif seed % 3 == 2:
                for parameter in model.parameters():
                    parameter.grad /= 3
                inner.step()
                inner.zero_grad()
        ends.append(state(model))
        for part, present in (("0.", "float" in accepts), ("1.", "ternary" in accepts)):
            assert present == any(
                not torch.equal(value, before[key])
                for key, value in ends[-1].items()
                if key.startswith(part)
            )
    assert all(torch.equal(value, ends[1][key]) for key, value in ends[0].items())


def device_for(backend: str) -> str:
    """A device of this machine on which the backend works; without one the test is skipped."""
    reasons = []
    for device in manager().registry.get("backend", backend).spec.devices:
        found = next(candidate for candidate in candidates(device) if candidate.name == backend)
        if found.usable:
            return device
        reasons.append(f"{device}: {found.reason}")
    pytest.skip(f"no device for {backend}: {'; '.join(reasons)}")


def backends() -> Iterator[Any]:
    """Every backend; one that compiles kernels for long is tested on request only."""
    for found in manager().registry.all("backend"):
        name = found.spec.name
        yield pytest.param(name, marks=pytest.mark.slow if name == "tilelang" else ())


@pytest.mark.parametrize("backend", list(backends()))
def test_norms_equal_the_reference_on_every_backend(
    backend: str,
) -> None:
    model = layer().to(device_for(backend))
    reference = layer()
    model[0].set_backend(backend)
    threshold = 0.6 * float(np.linalg.norm(gradient(reference, 0)))
    wrappers = [
        gqc.GradientNormThreshold(INNER["sign_votes"](each), threshold=threshold)
        for each in (model, reference)
    ]
    squares: list[float] = []
    steps = 0
    for seed in range(20):
        squares.append(float((gradient(reference, seed) ** 2).sum()))
        for each in (model, reference):
            backward(each, seed)
        decisions = [wrapper.step() for wrapper in wrappers]
        assert decisions[0] == decisions[1]
        # Squared norms of the draws add up, as those of independent noise do.
        expected = np.sqrt(sum(squares)) / len(squares)
        for wrapper in wrappers:
            assert wrapper.last_grad_norm == pytest.approx(expected, rel=1e-5)
        assert decisions[0] == (expected < threshold)
        if decisions[0]:
            squares = []
            steps = steps + 1
    assert 0 < steps < 20
    assert all(
        torch.equal(a, b)
        for a, b in zip(state(model).values(), state(reference).values(), strict=True)
    )


def test_norm_of_a_mixed_model_has_both_parts(parameters: Any) -> None:
    model = layer()
    weight = nn.Parameter(torch.zeros(4))
    inner = JoinedOptimizer(
        {"ternary": INNER["sign_votes"](model), "float": torch.optim.SGD([weight], lr=0.1)}
    )
    wrapper = gqc.GradientNormThreshold(inner, threshold=1e-9)
    squares = 0.0
    for seed in range(3):
        squares += float((gradient(model, seed) ** 2).sum())
        backward(model, seed)
        (weight * torch.tensor([1.0, -1.0, 2.0, 0.0])).sum().backward()
        wrapper.step()
    assert wrapper.last_grad_norm == pytest.approx(np.sqrt(squares + 9 * 6.0) / 3, rel=1e-5)


def test_many_draws_do_not_multiply_the_votes() -> None:
    """64 times the votes would turn every trit, and every later step would fail."""

    def quanta(draws: int) -> float:
        model = layer()
        optimizer = ScaledVotes(collect_trainable(model).ternary, lr=0.1, leak=0.0)
        wrapper = gqc.ScheduledBatch(optimizer, 1, 1)
        for _ in range(20):
            backward(model, 1)
            wrapper.step()
        before = model[0].trits().double() * 64 + model[0].logical_votes().double()
        wrapper.param_groups[0]["lr"] = float(draws)
        for _ in range(draws):
            backward(model, 1)
            wrapper.step()
        after = model[0].trits().double() * 64 + model[0].logical_votes().double()
        return float((after - before).abs().mean())

    # 1 + 1/2 + ... + 1/16 is 3.4; the rest is rounding, and the spread of the cells.
    assert quanta(16) < 5 * quanta(1)


@pytest.mark.parametrize("inner", sorted(INNER))
@pytest.mark.parametrize("stop", [0, 1, 3, 7])
def test_ternary_resume_at_any_draw_is_bitwise(inner: str, stop: int) -> None:
    def begin() -> tuple[nn.Module, gqc.OptimizerWrapper]:
        model = layer("int8")
        return model, gqc.ScheduledBatch(INNER[inner](model), 1, 4)

    def go_on(
        model: nn.Module, wrapper: gqc.OptimizerWrapper, start: int, stop: int
    ) -> list[float | None]:
        norms = []
        for seed in range(start, stop):
            backward(model, seed)
            wrapper.step()
            norms.append(wrapper.last_grad_norm)
        return norms

    model, wrapper = begin()
    go_on(model, wrapper, 0, stop)
    saved = copy.deepcopy((model.state_dict(), wrapper.state_dict()))
    norms = go_on(model, wrapper, stop, 24)
    other, resumed = begin()
    go_on(other, resumed, 50, 52)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert go_on(other, resumed, stop, 24) == norms
    assert all(
        torch.equal(a, b) for a, b in zip(state(model).values(), state(other).values(), strict=True)
    )


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))]
)
@pytest.mark.parametrize("inner", sorted(INNER))
def test_copied_model_and_wrapper_give_the_same_bits(inner: str, duplicate: Any) -> None:
    model = layer()
    wrapper = gqc.ScheduledBatch(INNER[inner](model), 1, 3)
    for seed in range(4):
        backward(model, seed)
        wrapper.step()
    other, copied = duplicate((model, wrapper))
    for seed in range(4, 20):
        for net, optimizer in ((model, wrapper), (other, copied)):
            backward(net, seed)
            optimizer.step()
    assert all(
        torch.equal(a, b) for a, b in zip(state(model).values(), state(other).values(), strict=True)
    )
    assert copied.statistics() == wrapper.statistics()


def test_nan_gradient_is_no_draw() -> None:
    model = layer()
    wrapper = gqc.ScheduledBatch(INNER["signgsd"](model), 1, 3)
    decisions = []
    for seed in range(4):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        backward(model, seed, float("nan") if seed == 1 else 1.0)
        decisions.append(wrapper.step())
        if seed == 1:
            assert [
                name
                for name, value in model.state_dict().items()
                if not torch.equal(value, before[name])
            ] == []
    assert decisions == [False, False, False, True]
    assert wrapper.statistics()["dropped"] == 1
    squares = sum(float((gradient(layer(), seed) ** 2).sum()) for seed in (0, 2, 3))
    assert wrapper.last_grad_norm == pytest.approx(np.sqrt(squares) / 3, rel=1e-5)


def test_rescaling_only_votes_warns() -> None:
    model = layer()
    plain = layer()
    with pytest.warns(
        UserWarning, match="rescaling a gradient does not change the votes"
    ) as caught:
        wrapper = gqc.GradientNormRescaler(INNER["sign_votes"](model), target_norm=7.0)
    assert len(caught) == 1
    inner = INNER["sign_votes"](plain)
    for seed in range(20):
        backward(model, seed)
        wrapper.step()
        backward(plain, seed)
        inner.step()
        inner.zero_grad()
    assert all(
        torch.equal(a, b) for a, b in zip(state(model).values(), state(plain).values(), strict=True)
    )


def test_noise_scale_needs_float_parameters() -> None:
    model = layer()
    with pytest.raises(ConfigError, match="a ternary module only has the norm of each"):
        gqc.GradientNoiseScale(INNER["sign_votes"](model))
    assert (
        gqc.GradientNoiseScale(INNER["sign_votes"](model), estimator="norm_variance").step()
        is False
    )
    weight = nn.Parameter(torch.zeros(()))
    inner = JoinedOptimizer(
        {"ternary": INNER["sign_votes"](model), "float": torch.optim.SGD([weight], lr=0.1)}
    )
    wrapper = gqc.GradientNoiseScale(inner, noise_multiplier=1e-9)
    for seed, value in enumerate((1.0, 2.0, 3.0)):
        backward(model, seed)
        (weight * value).backward()
        wrapper.step()
    # Of 1, 2 and 3: the variance is 1, the squared mean 4, less 1 / 3.
    assert wrapper.estimated_gns == pytest.approx(1.0 / (4 - 1 / 3))


def test_mean_loss_reaches_the_inner_rule() -> None:
    model = layer()
    inner = SignVotes(collect_trainable(model).ternary, gain=1.0)
    wrapper = gqc.ScheduledBatch(inner, 1, 2)
    for seed, loss in enumerate((1.0, 3.0)):
        backward(model, seed)
        wrapper.step(loss_signal=loss)
    assert inner.signal == 2.0


def test_waiting_part_of_a_joined_optimizer_keeps_its_draws() -> None:
    ternary = layer()
    weights = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))]
    plain, waiting = (torch.optim.SGD([weight], lr=1.0) for weight in weights)
    wrapper = gqc.ScheduledBatch(waiting, 1, 3)
    optimizer = JoinedOptimizer(
        {
            "ternary": SignVotes(collect_trainable(ternary).ternary),
            "plain": plain,
            "waiting": wrapper,
        }
    )
    gradients = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    assert optimizer.defers
    for draw, gradient_3 in enumerate(gradients):
        for weight in weights:
            (weight * gradient_3).sum().backward()
        # The third micro-batch is dropped by the ternary part, and then by all.
        assert optimizer.step(loss_signal=float("nan") if draw == 2 else 1.0).skipped == (draw == 2)
        optimizer.zero_grad()
        assert all(weight.grad is None for weight in weights)
        assert wrapper.num_draws == [1, 2, 2, 0, 1][draw]
    torch.testing.assert_close(weights[0].detach(), -gradients[[0, 1, 3, 4]].sum(0))
    torch.testing.assert_close(weights[1].detach(), -gradients[[0, 1, 3]].mean(0))
