"""Sign votes: direction, thresholds, schedules, signal, skips, stability, and one whole run against
numpy.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from arb_ternary import TernaryEmbedding, TernaryLinear, TernaryRMSNorm
from arb_ternary.errors import ConfigError
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_train.update import configure_ternary_training, ternary_update
from arb_ternary_votes import MomentumVotes
from arb_ternary_votes.config import SignVotesConfig
from arb_ternary_votes.scaled_votes import ScaledVotes
from arb_ternary_votes.sign_votes import SignVotes, effective_threshold


def layer_and_optimizer(**options: float) -> tuple[TernaryLinear, SignVotes]:
    layer = TernaryLinear(16, 8, group_size=32, activations="float")
    return layer, SignVotes({"layer": layer}, **options)  # type: ignore[arg-type]


def regression_loss(layer: TernaryLinear, x: Tensor, target: Tensor) -> Tensor:
    return ((layer(x) - target) ** 2).mean()


def dense_state(layer: TernaryLinear) -> list[np.ndarray]:
    return [
        t.numpy().copy() for t in (layer.trits(), layer.exponent, layer.votes, layer.exponent_votes)
    ]


def test_fifty_updates_equal_a_numpy_restatement_of_the_rule() -> None:
    layer, optimizer = layer_and_optimizer(accum_threshold=3, e_accum_threshold=5, band=1)
    rng = np.random.default_rng(0)
    T, E, A, B = (array.astype(np.int64) for array in dense_state(layer))
    origin = E.copy()
    for _ in range(50):
        # Small integers: products are exact in float32, so signs cannot differ by rounding.
        x = rng.integers(-3, 4, (5, 16)).astype(np.float32)
        g = rng.integers(-3, 4, (5, 8)).astype(np.float32)
        layer(torch.from_numpy(x)).backward(torch.from_numpy(g))
        optimizer.step()
        s = np.sign(g.T @ x).astype(np.int64)
        B = np.clip(B - np.sign((s * T).sum(axis=1, keepdims=True)), -128, 127)
        A = np.clip(A - s, -128, 127)
        up = (B >= 5).astype(int) - (B <= -5).astype(int)
        E = np.clip(E + up, origin - 1, origin + 1)
        B = B - 5 * up
        f = (A >= 3).astype(int) - (A <= -3).astype(int)
        T = np.clip(T + f, -1, 1)
        A = np.where(f != 0, 0, A)
    for got, expected in zip(dense_state(layer), (T, E, A, B), strict=True):
        assert np.array_equal(got, expected)


@pytest.mark.parametrize("sign", [1, -1])
def test_loss_falls_with_minus_the_gradient(sign: int) -> None:
    torch.manual_seed(3)
    layer, optimizer = layer_and_optimizer(accum_threshold=4, band=0)
    teacher = TernaryLinear(16, 8, group_size=32, activations="float")
    x = torch.randn(256, 16)
    target = teacher(x).detach()
    first = float(regression_loss(layer, x, target).detach())
    for _ in range(60):
        (sign * regression_loss(layer, x, target)).backward()
        optimizer.step()
    last = float(regression_loss(layer, x, target).detach())
    assert last < 0.5 * first if sign == 1 else last > 1.2 * first


def train_on_a_teacher(band: int, steps: int) -> tuple[nn.Sequential, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(TernaryLinear(32, 64), nn.ReLU(), TernaryLinear(64, 8))
    teacher = nn.Sequential(TernaryLinear(32, 64), nn.ReLU(), TernaryLinear(64, 8))
    optimizer = SignVotes({"0": model[0], "2": model[2]}, band=band)  # type: ignore[dict-item]
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 32)
        with torch.no_grad():
            target = teacher(x)
        loss = ((model(x) - target) ** 2).mean()
        losses.append(float(loss.detach()))
        ternary_update(model, optimizer, loss)
    return model, losses


def farthest_exponent(model: nn.Sequential) -> int:
    return max(int((model[i].exponent - model[i].exponent_origin).abs().max()) for i in (0, 2))


def test_two_thousand_steps_with_the_defaults_do_not_run_away() -> None:
    model, losses = train_on_a_teacher(band=2, steps=2000)
    start = float(np.mean(losses[:10]))
    windows = np.array(losses).reshape(20, 100).mean(axis=1)
    assert windows[-5:].max() < 0.5 * start
    assert windows[1:].max() < start
    assert farthest_exponent(model) <= 2


@pytest.mark.extended
def test_free_exponents_run_away_without_the_band() -> None:
    model, _ = train_on_a_teacher(band=127, steps=1000)
    assert farthest_exponent(model) > 2


@pytest.mark.parametrize(
    ("theta", "lr", "gain", "signal", "mean", "expected"),
    [
        (32, 1.0, 0.0, None, None, 32),
        (32, 0.5, 0.0, None, None, 64),
        (32, 0.1, 0.0, None, None, 127),
        (32, 100.0, 0.0, None, None, 1),
        (10, 0.3, 0.0, None, None, 34),
        (32, 1.0, 0.0, 5.0, 1.0, 32),
        (32, 1.0, 2.0, 2.0, 1.0, math.ceil(32 / (2 / (1 + math.exp(-2.0))))),
        (32, 1.0, 2.0, 0.5, 1.0, math.ceil(32 / (2 / (1 + math.exp(1.0))))),
        (32, 1.0, 5.0, 1e9, 1.0, 16),
    ],
)
def test_the_effective_threshold_follows_its_formula(
    theta: int, lr: float, gain: float, signal: float | None, mean: float | None, expected: int
) -> None:
    assert effective_threshold(theta, lr, gain, signal, mean) == expected


def test_an_ordinary_scheduler_drives_the_threshold() -> None:
    layer, optimizer = layer_and_optimizer(accum_threshold=4, band=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 1 else 0.5)
    layer.votes.fill_(4)
    assert optimizer.step().flips > 0
    schedule.step()
    layer.votes.fill_(7)
    assert optimizer.step().flips == 0
    layer.set_trits(
        torch.zeros(8, 16, dtype=torch.int8), votes=torch.full((8, 16), 8, dtype=torch.int8)
    )
    assert optimizer.step().flips == 8 * 16


def test_a_rate_of_zero_keeps_votes_and_flips_nothing() -> None:
    layer, optimizer = layer_and_optimizer(accum_threshold=1)
    optimizer.param_groups[0]["lr"] = 0.0
    layer.votes.fill_(100)
    before = layer.trits()
    assert optimizer.step().flips == 0
    assert torch.equal(layer.trits(), before)
    assert bool((layer.votes == 100).all())


def test_modules_keep_their_own_thresholds() -> None:
    model = nn.ModuleDict({"a": TernaryLinear(4, 4), "b": TernaryLinear(4, 4)})
    configure_ternary_training(model["b"], accum_threshold=8, e_accum_threshold=16)
    own = SignVotes(dict(model.items()))  # type: ignore[arg-type]
    assert [(g["accum_threshold"], g["e_accum_threshold"]) for g in own.param_groups] == [
        (32, 32),
        (8, 16),
    ]
    given = SignVotes(dict(model.items()), accum_threshold=5)  # type: ignore[arg-type]
    assert {g["accum_threshold"] for g in given.param_groups} == {5}


def test_thresholds_cannot_change_under_an_optimizer() -> None:
    layer = TernaryLinear(4, 4)
    optimizer = SignVotes({"layer": layer})
    with pytest.raises(
        ValueError, match="its optimizer is built and keeps the thresholds that it found"
    ):
        configure_ternary_training(layer, accum_threshold=8)
    assert layer.accum_threshold == optimizer.param_groups[0]["accum_threshold"] == 32
    del optimizer
    assert configure_ternary_training(layer, accum_threshold=8) == 8


@pytest.mark.parametrize(
    ("bits", "threshold", "cell"), [(8, 32, 64), (8, 8, 16), (8, 63, 126), (4, 7, 7), (4, 3, 3)]
)
def test_a_threshold_is_the_cell_of_scaled_votes(bits: int, threshold: int, cell: int) -> None:
    """A given cell and one from the threshold train alike, bit for bit."""
    ends = []
    for options in ({}, {"cell": cell}):
        torch.manual_seed(0)
        layer = TernaryLinear(16, 8, vote_bits=bits, scale_rule="frozen")
        if not options:
            configure_ternary_training(layer, accum_threshold=threshold)
        optimizer = ScaledVotes({"layer": layer}, **options)
        x = torch.randn(12, 16)
        for _ in range(12):
            ternary_update(layer, optimizer, layer(x).square().mean())
        ends.append((layer.trits(), layer.logical_votes()))
    assert all(map(torch.equal, *ends))


def test_a_threshold_beyond_what_a_rule_can_do_is_refused() -> None:
    layer = TernaryLinear(4, 4)
    configure_ternary_training(layer, accum_threshold=64)
    with pytest.raises(
        ValueError,
        match="accum_threshold: 64 makes a cell: 128 does not fit the 8-bit accumulators",
    ):
        ScaledVotes({"layer": layer})
    with pytest.raises(ConfigError, match="momentum_votes moves its thresholds by itself"):
        MomentumVotes({"layer": layer})


def test_leak_moves_accumulators_towards_zero() -> None:
    layer, optimizer = layer_and_optimizer(leak=3, band=0)
    layer.votes.fill_(10)
    layer.exponent_votes.fill_(-10)
    seen = []
    for _ in range(7):
        optimizer.step()
        seen.append((int(layer.votes[0, 0]), int(layer.exponent_votes[0, 0])))
    assert seen == [(10, -10), (10, -10), (9, -9), (9, -9), (9, -9), (8, -8), (8, -8)]


def test_exponents_move_before_trits_and_only_within_the_band() -> None:
    layer, optimizer = layer_and_optimizer(e_accum_threshold=2, band=2)
    start = int(layer.exponent[0, 0])
    for _ in range(10):
        layer.exponent_votes.fill_(2)
        optimizer.step()
    assert bool((layer.exponent == start + 2).all())


def test_frozen_exponents_do_not_move() -> None:
    layer = TernaryLinear(16, 8, scale_rule="frozen")
    optimizer = SignVotes({"layer": layer}, e_accum_threshold=1)
    before = layer.exponent.clone()
    layer(torch.randn(4, 16)).sum().backward()
    layer.exponent_votes.fill_(100)
    optimizer.step()
    assert torch.equal(layer.exponent, before)


def test_an_integer_bias_moves_by_one_when_its_votes_cross() -> None:
    layer = TernaryLinear(4, 3, bias=True)
    optimizer = SignVotes({"layer": layer}, accum_threshold=2)
    assert layer.bias is not None
    assert layer.bias_votes is not None
    layer.bias_votes.copy_(torch.tensor([2, -3, 1]))
    optimizer.step()
    assert layer.bias.tolist() == [1, -1, 0]
    assert layer.bias_votes.tolist() == [0, 0, 1]


def test_votes_are_applied_only_when_the_optimizer_steps() -> None:
    layer, optimizer = layer_and_optimizer(accum_threshold=1)
    packed = layer.weight.clone()
    x = torch.randn(4, 16)
    for _ in range(3):
        layer(x).backward(torch.randn(4, 8))
    assert torch.equal(layer.weight, packed)
    assert optimizer.step().draws == 3
    assert not torch.equal(layer.weight, packed)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["loss", "component", "signal"])
def test_nonfinite_loss_leaves_every_buffer_unchanged(bad: float, where: str) -> None:
    layer, optimizer = layer_and_optimizer(accum_threshold=1, e_accum_threshold=1)
    x = torch.randn(4, 16)
    ternary_update(layer, optimizer, layer(x).sum())
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    loss = layer(x).sum()
    outcome = ternary_update(
        layer,
        optimizer,
        loss * bad if where == "loss" else loss,
        loss_components={"extra": loss * bad} if where == "component" else None,
        loss_signal=torch.tensor(bad) if where == "signal" else None,
    )
    assert (outcome.stepped, outcome.skipped, optimizer.skipped_updates) == (False, True, 1)
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, before[name]), name


def everything(model: nn.Module) -> dict[str, Tensor]:
    found = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, module in model.named_modules():
        if isinstance(module, TernaryModule):
            found[f"{name}.stats"] = module.stats.clone()
    return found


def assert_unchanged(model: nn.Module, before: dict[str, Tensor]) -> None:
    assert [
        name for name, tensor in everything(model).items() if not torch.equal(tensor, before[name])
    ] == []


@pytest.mark.parametrize("where", ["loss", "component", "signal", "step", "closure"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_skip_after_backward_restores_everything(where: str, microbatches: int) -> None:
    model = nn.Sequential(
        TernaryEmbedding(32, 16, scale_rule="correlation"),
        TernaryRMSNorm(16),
        TernaryLinear(16, 8, bias=True, activations="float"),
    )
    optimizer = SignVotes(
        {name: m for name, m in model.named_modules() if isinstance(m, TernaryModule)}
    )
    ids = torch.arange(4)
    for _ in range(2):
        ternary_update(model, optimizer, model(ids).square().sum())
    before = everything(model)
    nan = float("nan")
    for _ in range(microbatches - 1):
        model(ids).square().sum().backward()

    def closure() -> Tensor:
        loss = model(ids).square().sum() * (nan if where in ("loss", "closure") else math.inf)
        loss.backward(retain_graph=True)
        return loss.detach() * 0 + (nan if where == "closure" else 1)

    if where == "closure":
        outcome = optimizer.step(closure)
    else:
        loss = closure()
        assert not torch.equal(model[2].control, before["2.control"])
        if where == "step":
            outcome = optimizer.step(loss_signal=nan)
        else:
            outcome = ternary_update(
                model,
                optimizer,
                loss * nan if where == "loss" else loss,
                loss_components={"extra": loss * nan} if where == "component" else None,
                loss_signal=nan if where == "signal" else None,
            )
    assert (outcome.stepped, outcome.skipped, optimizer.skipped_updates) == (False, True, 1)
    assert_unchanged(model, before)
    x = model[0](ids).detach().requires_grad_()
    assert ternary_update(model, optimizer, model[2](x).square().sum()).stepped
    assert x.grad is not None
    assert not torch.equal(model[2].votes, before["2.votes"])


@pytest.mark.parametrize("shared", [False, True])
def test_skip_undoes_votes_of_shared_or_saturated_modules(
    shared: bool,
) -> None:
    layer = TernaryLinear(16, 16, group_size=32)
    layer.set_votes(torch.full((16, 16), -128, dtype=torch.int8))
    layer.votes[::2] = 127
    optimizer = SignVotes({"layer": layer})
    before = everything(layer)
    x = layer(torch.randn(4, 16))
    (layer(x) if shared else x).sum().backward()
    assert not torch.equal(layer.votes, before["votes"])
    optimizer.skip_update()
    assert_unchanged(layer, before)


def test_the_accumulators_are_copied_in_a_backward_by_hand_alone() -> None:
    layer, optimizer = layer_and_optimizer()
    x = torch.randn(4, 16)
    loss = layer(x).sum()
    assert layer.kept_votes is None
    loss.backward()
    assert layer.kept_votes is not None
    assert torch.equal(layer.kept_votes["votes"], torch.zeros_like(layer.votes))
    optimizer.step()
    assert layer.kept_votes is None
    kept: list[object] = []
    x.requires_grad_().register_hook(lambda _: kept.append(layer.kept_votes))
    ternary_update(layer, optimizer, layer(x).sum())  # it has seen that the loss is finite
    assert kept == [{}]
    layer.undoable = False
    layer(x).sum().backward()
    assert layer.kept_votes is None


@pytest.mark.slow
def test_votes_of_a_skipped_update_of_a_compiled_model_go_too() -> None:
    layer, optimizer = layer_and_optimizer()
    before = everything(layer)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        run(torch.randn(4, 16)).sum().backward()
    assert not torch.equal(layer.votes, before["votes"])
    optimizer.step(loss_signal=math.nan)
    assert_unchanged(layer, before)


def test_groups_follow_a_module_to_another_backend() -> None:
    layer, optimizer = layer_and_optimizer(accum_threshold=1)
    layer.weight = layer.weight.clone()
    optimizer.step()
    assert optimizer.param_groups[0]["params"][0] is layer.weight


def test_a_backward_that_has_run_is_not_run_again() -> None:
    layer, optimizer = layer_and_optimizer()
    loss = layer(torch.randn(4, 16)).sum()
    loss.backward()
    votes = layer.votes.clone()
    ternary_update(layer, optimizer, loss)  # a second backward through the freed graph would raise
    assert torch.equal(layer.votes, votes)


def test_components_are_summed_into_one_set_of_votes() -> None:
    x = torch.randn(4, 16)
    a = torch.randn(4, 8)
    b = torch.randn(4, 8)
    votes = []
    for split in (True, False):
        torch.manual_seed(0)
        layer, optimizer = layer_and_optimizer()
        y = layer(x)
        if split:
            ternary_update(layer, optimizer, (y * a).sum(), loss_components={"b": (y * b).sum()})
        else:
            ternary_update(layer, optimizer, (y * (a + b)).sum())
        votes.append(layer.votes)
    assert torch.equal(votes[0], votes[1])
    assert torch.equal(votes[0], -((a + b).t() @ x).sign().to(torch.int8))
    with pytest.raises(ValueError, match="needs a loss"):
        ternary_update(layer, optimizer)


def test_signal_alone_applies_the_votes_of_a_backward_by_hand() -> None:
    x = torch.randn(4, 16)
    layer, optimizer = layer_and_optimizer(accum_threshold=1)
    with pytest.raises(ValueError, match="needs a loss"):
        ternary_update(layer, optimizer, loss_signal=1.0)

    trits = layer.trits()
    loss = layer(x).sum()
    loss.backward()
    outcome = ternary_update(layer, optimizer, loss_signal=loss)
    # The gradient of a sum is that of its inputs: one vote moves each trit against its sign.
    wanted = (trits - x.sum(dim=0).sign()).clamp(-1, 1).to(torch.int8)
    assert torch.equal(layer.trits(), wanted)
    assert outcome.flips == int((wanted != trits).sum())
    assert optimizer.signal == loss.item()
    with pytest.raises(ValueError, match="needs a loss"):
        ternary_update(layer, optimizer, loss_signal=loss)

    layer(x).sum().backward()
    assert ternary_update(layer, optimizer, loss_signal=math.nan).skipped
    assert torch.equal(layer.trits(), wanted)


def test_signal_is_compared_with_its_running_mean() -> None:
    layer, optimizer = layer_and_optimizer(gain=2.0)
    x = torch.randn(4, 16)
    for value in (2.0, 4.0):
        signal = layer(x).sum() * 0 + value
        ternary_update(layer, optimizer, layer(x).sum(), loss_signal=signal)
    assert optimizer.signal == 4.0
    assert optimizer.mean_signal == pytest.approx(0.99 * 2.0 + 0.01 * 4.0)


def test_a_resumed_optimizer_continues_with_the_same_bits() -> None:
    def build() -> tuple[nn.ModuleDict, SignVotes]:
        torch.manual_seed(0)
        model = nn.ModuleDict(
            {
                "e": TernaryEmbedding(9, 16, gradients="int8"),
                "l": TernaryLinear(16, 9, gradients="int8"),
            }
        )
        return model, SignVotes(dict(model.items()), accum_threshold=2, leak=3, gain=1.0)  # type: ignore[arg-type]

    def run(model: nn.ModuleDict, optimizer: SignVotes, start: int, stop: int) -> None:
        for step in range(start, stop):
            ids = torch.randint(0, 9, (6,), generator=torch.Generator().manual_seed(step))
            loss = nn.functional.cross_entropy(model["l"](model["e"](ids)), ids.roll(1))
            ternary_update(model, optimizer, loss, loss_signal=loss)

    whole, optimizer = build()
    run(whole, optimizer, 0, 20)
    half, optimizer = build()
    run(half, optimizer, 0, 11)
    resumed, second = build()
    resumed.load_state_dict(half.state_dict())
    second.load_state_dict(optimizer.state_dict())
    run(resumed, second, 11, 20)
    for key, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accum_threshold", 0),
        ("e_accum_threshold", 128),
        ("band", -1),
        ("leak", -1),
        ("gain", -1.0),
        ("lr", 0.0),
    ],
)
def test_an_option_outside_its_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        SignVotesConfig(**{name: value})  # type: ignore[arg-type]


def test_an_optimizer_without_modules_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        SignVotes({})


def test_int8_gradients_cast_unbiased_votes() -> None:
    layer = TernaryLinear(4, 3, gradients="int8")
    x = torch.tensor([[127.0, -127.0, 64.0, 0.0]])
    for _ in range(3):
        layer(x).backward(torch.tensor([[100.0, -100.0, 0.0]]))
    assert layer.votes.tolist() == [[-3, 3, -3, 0], [3, -3, 3, 0], [0, 0, 0, 0]]
