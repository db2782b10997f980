from __future__ import annotations

import copy
import functools
import gc
import io
import math
import pickle
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace as Kit
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import arb_ternary
from arb_ternary.errors import ConfigError, UsageProblem


def ternary_net(kit: Kit, **options: Any) -> nn.Module:
    model = kit.new_net()
    arb_ternary.ternarize(model, **options)
    return model


def train(
    kit: Kit,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    clear: Callable[[], object] | None = None,
    first: int = 0,
) -> list[int]:
    """Train in the plainest loop and return the flips of each step."""
    flips = []
    for step in range(first, first + steps):
        loss = kit.loss_of(model, kit.Bigram().batch(step))
        loss.backward()
        optimizer.step()
        flips.append(optimizer.last_outcome.flips)
        (clear or optimizer.zero_grad)()
    return flips


def test_groups_have_names_and_rates(kit: Kit) -> None:
    model = ternary_net(kit)
    optimizer = arb_ternary.make_optimizer(model, lr=0.3, float_lr=0.02)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert [(g["name"], g["lr"]) for g in optimizer.param_groups] == [
        ("votes", 0.3),
        ("floats", 0.02),
    ]
    floats = {id(p) for p in model.parameters()}
    assert {id(p) for p in optimizer.param_groups[1]["params"]} == floats
    default = arb_ternary.make_optimizer(model)
    assert [g["lr"] for g in default.param_groups] == [0.1, 1e-3]
    kind = functools.partial(torch.optim.SGD, momentum=0.5)
    sgd = arb_ternary.make_optimizer(model, "sign_votes", float=kind, float_lr=0.5)
    assert [g["lr"] for g in sgd.param_groups] == [1.0, 0.5]
    assert sgd.param_groups[1]["momentum"] == 0.5


@pytest.mark.parametrize("votes", ["scaled_votes", "sign_votes", "momentum_votes"])
def test_a_scheduler_drives_both_rates(kit: Kit, votes: str) -> None:
    model = ternary_net(kit)
    optimizer = arb_ternary.make_optimizer(model, votes, float_lr=0.02)
    peak = optimizer.param_groups[0]["lr"]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    for step in range(4):
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([peak / (1 + step), 0.02 / (1 + step)])
        train(kit, model, optimizer, 1, first=step)
        scheduler.step()
    # With a rate of 0 neither part moves.
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert train(kit, model, optimizer, 2) == [0, 0]
    after = model.state_dict()
    for name in ("up.ternary.weight", "up.bias", "lm_head.weight"):
        assert torch.equal(before[name], after[name])


@pytest.mark.parametrize("votes", ["scaled_votes", "sign_votes"])
def test_whoever_clears_gradients_the_flips_are_the_same(kit: Kit, votes: str) -> None:
    flips = []
    for how in ("optimizer", "model", "floats"):
        model = ternary_net(kit)
        optimizer = arb_ternary.make_optimizer(model, votes, float_lr=0.01)

        def clear_floats(model: nn.Module = model) -> None:
            for parameter in model.parameters():
                parameter.grad = None

        clear = {"optimizer": optimizer.zero_grad, "model": model.zero_grad, "floats": clear_floats}
        flips.append(train(kit, model, optimizer, 12, clear[how]))
    assert flips[0] == flips[1] == flips[2]
    assert sum(flips[0]) > 0


def test_zero_grad_drops_the_votes_since_the_last_step(kit: Kit) -> None:
    model = ternary_net(kit)
    optimizer = arb_ternary.make_optimizer(model, "sign_votes")
    train(kit, model, optimizer, 2)
    before = copy.deepcopy(model.state_dict())
    kit.loss_of(model, kit.Bigram().batch(7)).backward()
    assert not kit.same(before, model.state_dict())
    optimizer.zero_grad()
    assert kit.same(before, model.state_dict())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_calls_the_closure_once_and_returns_its_loss(kit: Kit) -> None:
    model = ternary_net(kit)
    plain = copy.deepcopy(model)
    optimizer = arb_ternary.make_optimizer(model, lr=0.3)
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = kit.loss_of(model, kit.Bigram().batch(len(calls)))
        loss.backward()
        calls.append(loss)
        return loss

    for step in range(5):
        assert optimizer.step(closure) is calls[step]
    other = arb_ternary.make_optimizer(plain, lr=0.3)
    train(kit, plain, other, 5)
    assert kit.same(model.state_dict(), plain.state_dict())


def test_hooks_of_a_step_are_called_once(kit: Kit) -> None:
    model = ternary_net(kit)
    optimizer = arb_ternary.make_optimizer(model)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    train(kit, model, optimizer, 1)
    assert called == ["before", "after"]


def saved(optimizer: Any, how: str) -> dict[str, Any]:
    if how == "torch":
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        return torch.load(file, weights_only=True)
    return pickle.loads(pickle.dumps(optimizer.state_dict()))


@pytest.mark.parametrize("how", ["torch", "pickle"])
@pytest.mark.parametrize("votes", ["scaled_votes", "sign_votes", "momentum_votes"])
def test_a_saved_state_continues_with_the_same_bits(kit: Kit, votes: str, how: str) -> None:
    model = ternary_net(kit)
    optimizer = arb_ternary.make_optimizer(model, votes, float_lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for step in range(4):
        train(kit, model, optimizer, 1, first=step)
        scheduler.step()
    # Between backward and step, too.
    kit.loss_of(model, kit.Bigram().batch(90)).backward()

    twin = ternary_net(kit, init="random")
    other = arb_ternary.make_optimizer(twin, votes, float_lr=0.01)
    resumed = torch.optim.lr_scheduler.StepLR(other, 2, gamma=0.5)
    optimizer.zero_grad()
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    other.load_state_dict(saved(optimizer, how))
    resumed.load_state_dict(scheduler.state_dict())
    for step in range(4, 10):
        assert train(kit, model, optimizer, 1, first=step) == train(kit, twin, other, 1, first=step)
        scheduler.step()
        resumed.step()
        assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in optimizer.param_groups]
    assert kit.same(model.state_dict(), twin.state_dict())


def test_a_copy_of_model_and_optimizer_continues_with_the_same_bits(kit: Kit) -> None:
    model = ternary_net(kit)
    optimizer = arb_ternary.make_optimizer(model, lr=0.3)
    train(kit, model, optimizer, 3)
    for made in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        net, steps = made((model, optimizer))
        twin, other = made((model, optimizer))
        assert train(kit, net, steps, 4) == train(kit, twin, other, 4)
        assert steps.param_groups[0] is steps.rule.param_groups[0]
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(kit.loss_of(net, kit.Bigram().batch(0))).backward()
        scaler.step(steps)
        scaler.update()


def test_state_of_another_kind_is_refused(kit: Kit) -> None:
    model = ternary_net(kit)
    optimizer = arb_ternary.make_optimizer(model)
    with pytest.raises(UsageProblem, match="not the state of an optimizer of votes and floats"):
        optimizer.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())


def test_clipping_sees_float_gradients_and_never_trits(kit: Kit) -> None:
    model = ternary_net(kit)
    optimizer = arb_ternary.make_optimizer(model, "sign_votes", float_lr=0.01)
    kit.loss_of(model, kit.Bigram().batch(0)).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    squares = sum(float(gradient.double().square().sum()) for gradient in gradients)
    before = kit.integers(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert float(norm) == pytest.approx(math.sqrt(squares), rel=1e-5)
    # The groups of the optimizer have the same gradients, and one of 0.
    every = [p for group in optimizer.param_groups for p in group["params"]]
    assert float(nn.utils.clip_grad_norm_(every, 1.0)) == pytest.approx(1e-3, rel=1e-3)
    nn.utils.clip_grad_value_(every, 1e-9)
    assert kit.same(before, kit.integers(model))
    optimizer.step()


def test_several_backward_passes_make_one_step(kit: Kit) -> None:
    """Float gradients of k micro-batches are those of one batch; votes are cast k times."""
    whole = ternary_net(kit, activations="float")
    parts = copy.deepcopy(whole)
    tokens = kit.Bigram().batch(0, rows=16)
    kit.loss_of(whole, tokens).backward()
    one = arb_ternary.make_optimizer(parts, "sign_votes")
    for part in tokens.chunk(4):
        (kit.loss_of(parts, part) / 4).backward()
    for (name, left), (_, right) in zip(
        whole.named_parameters(), parts.named_parameters(), strict=True
    ):
        if not name.startswith("mix"):  # the convolution is not used
            assert torch.allclose(left.grad, right.grad, rtol=1e-4, atol=1e-7), name
    assert {module.casts for module in one.rule.modules} == {4, 0}
    one.step()
    assert one.last_outcome.draws == 4


def poison(model: nn.Module, where: str) -> None:
    if where == "float":
        model.up.bias.grad[0] = math.inf
    else:
        model.up.ternary.stats[0] = 1.0  # one NaN was counted


@pytest.mark.parametrize("where", ["float", "ternary"])
def test_a_gradient_that_is_not_finite_skips_both_parts(kit: Kit, where: str) -> None:
    model = ternary_net(kit)
    optimizer = arb_ternary.make_optimizer(model, "sign_votes")
    train(kit, model, optimizer, 2)
    before = copy.deepcopy(model.state_dict())
    kit.loss_of(model, kit.Bigram().batch(5)).backward()
    poison(model, where)
    with pytest.warns(UserWarning, match="a gradient is not finite: the update is skipped"):
        optimizer.step()
    assert kit.same(before, model.state_dict())
    assert optimizer.last_outcome.skipped
    assert optimizer.skipped_updates == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(kit, model, optimizer, 1)


def scaled_training(
    kit: Kit, votes: str, scale: float | None, *, unscale: bool, steps: int = 8
) -> tuple[nn.Module, list[int]]:
    """Train with a scaler, whose scale is constant, or without one."""
    model = ternary_net(kit, activations="float")
    optimizer = arb_ternary.make_optimizer(model, votes, float=torch.optim.SGD, float_lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    flips = []
    for step in range(steps):
        scaler.scale(kit.loss_of(model, kit.Bigram().batch(step))).backward()
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
        flips.append(optimizer.last_outcome.flips)
        optimizer.zero_grad()
    return model, flips


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("votes", ["scaled_votes", "sign_votes", "momentum_votes"])
def test_a_loss_scale_changes_no_bit_in_float32(kit: Kit, votes: str, unscale: bool) -> None:
    plain, expected = scaled_training(kit, votes, None, unscale=unscale)
    scaled, flips = scaled_training(kit, votes, 2.0**16, unscale=unscale)
    assert flips == expected
    assert sum(flips) > 0
    assert kit.same(kit.integers(plain), kit.integers(scaled))
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, dict(scaled.named_parameters())[name])


@pytest.mark.parametrize("unscale", [False, True])
def test_votes_cast_at_an_old_loss_scale_are_dropped_and_the_next_are_right(
    kit: Kit, unscale: bool
) -> None:
    model = ternary_net(kit, activations="float")
    optimizer = arb_ternary.make_optimizer(model, lr=0.5, float=torch.optim.SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def step(seed: int) -> None:
        scaler.scale(kit.loss_of(model, kit.Bigram().batch(seed))).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)

    for seed in range(4):
        step(seed)
        scaler.update()
        optimizer.zero_grad()
    factors = model.up.ternary.vote_scale[96:].clone()
    scaler.update(256.0)
    step(5)
    ternary = model.up.ternary
    assert optimizer.last_outcome.draws == 1
    assert optimizer.last_outcome.flips == 0
    # No gradient was taken in, so the factors are exactly those for gradients 4 times as large.
    assert torch.equal(ternary.vote_scale[96:], factors / 4)
    scaler.update()
    optimizer.zero_grad()
    step(6)
    assert optimizer.last_outcome.flips > 0
    state = optimizer.state_dict()
    assert state["loss_scale"] == 256.0


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("where", ["float", "ternary"])
def test_a_scaler_skips_both_parts_and_lowers_its_scale(
    kit: Kit, where: str, unscale: bool
) -> None:
    model = ternary_net(kit)
    optimizer = arb_ternary.make_optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    train(kit, model, optimizer, 3)
    before = copy.deepcopy(model.state_dict())
    scaler.scale(kit.loss_of(model, kit.Bigram().batch(5))).backward()
    poison(model, where)
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert kit.same(before, model.state_dict())
    assert scaler.get_scale() == 32.0
    assert optimizer.skipped_updates == 1


def test_a_scaler_works_without_float_parameters(kit: Kit) -> None:
    model = nn.Sequential(nn.Embedding(12, 32), nn.Linear(32, 12, bias=False))
    arb_ternary.ternarize(model)
    optimizer = arb_ternary.make_optimizer(model, lr=0.5)
    assert [group["name"] for group in optimizer.param_groups] == ["votes"]
    scaler = torch.amp.GradScaler("cpu")
    for seed in range(5):
        scaler.scale(kit.loss_of(model, kit.Bigram().batch(seed))).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.last_outcome.flips > 0


def test_float16_parameters_with_a_scaler_are_refused_by_torch(kit: Kit) -> None:
    model = ternary_net(kit).half()
    optimizer = arb_ternary.make_optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(kit.loss_of(model, kit.Bigram().batch(0))).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.step(optimizer)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"votes": "scaled_vote"}, UsageProblem, "did you mean 'scaled_votes'"),
        ({"votes": "adamw"}, UsageProblem, "available: "),
        ({"votes_options": {"orthogonl": True}}, ConfigError, "orthogonal"),
        ({"votes_options": {"clip": -1.0}}, ConfigError, "clip"),
        ({"lr": -1.0}, ConfigError, "lr"),
        ({"votes": "momentum_votes", "lr": 0.1}, ConfigError, "lr"),
        ({"votes_options": {"lr": "auto"}}, ConfigError, "lr is the argument lr"),
    ],
)
def test_unknown_rules_and_options_are_refused(
    kit: Kit, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        arb_ternary.make_optimizer(ternary_net(kit), **options)
    assert words in str(caught.value)


def test_options_of_the_rule_reach_it(kit: Kit) -> None:
    options = {"orthogonal": True, "clip": 3.0}
    model = ternary_net(kit)
    optimizer = arb_ternary.make_optimizer(model, votes_options=options)
    assert optimizer.param_groups[0]["clip"] == 3.0
    assert model.up.ternary.transform is not None
    assert model.embed.ternary.transform is None
    train(kit, model, optimizer, 2)


def test_a_model_that_cannot_learn_by_votes_is_refused(kit: Kit) -> None:
    with pytest.raises(UsageProblem, match="the model has no ternary weights"):
        arb_ternary.make_optimizer(kit.new_net())
    model = ternary_net(kit)
    for module in model.modules():
        if hasattr(module, "ternary"):
            module.ternary.frozen = True
    with pytest.raises(UsageProblem, match="all ternary weights of the model are frozen"):
        arb_ternary.make_optimizer(model)


class FullyShardedDataParallel(nn.Sequential):
    """It has the name of torch's, which needs several processes."""


def test_wrappers_for_several_devices_are_refused(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ternary_net(kit)
    for wrapped in (nn.DataParallel(model), FullyShardedDataParallel(model)):
        with pytest.raises(UsageProblem, match="does not exchange the votes") as caught:
            arb_ternary.make_optimizer(wrapped)
        assert "torchrun --nproc_per_node N -m arb_ternary train" in caught.value.hint
    optimizer = arb_ternary.make_optimizer(model)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UsageProblem, match="2 processes train, and nothing exchanges their votes"):
        optimizer.step()


def test_a_replica_of_data_parallel_refuses_to_cast_votes(kit: Kit) -> None:
    model = ternary_net(kit)
    for module in model.modules():
        module._is_replica = True
    with pytest.raises(UsageProblem, match="DataParallel: its copies of a model are thrown away"):
        kit.loss_of(model, kit.Bigram().batch(0))


def test_seed_decides_the_rounding_of_votes(kit: Kit) -> None:
    flips = []
    for seed in (0, 0, 1):
        model = ternary_net(kit)
        optimizer = arb_ternary.make_optimizer(model, lr=0.5, seed=seed)
        flips.append(train(kit, model, optimizer, 4))
    assert flips[0] == flips[1] != flips[2]


def test_an_optimizer_is_freed_when_nothing_uses_it(kit: Kit) -> None:
    model = ternary_net(kit)
    optimizer = weakref.ref(arb_ternary.make_optimizer(model))
    gc.collect()
    assert optimizer() is None


@pytest.mark.parametrize("when", ["untrained", "optimizer is gone", "frozen", "trained", "other"])
def test_a_step_that_leaves_votes_warns(kit: Kit, when: str) -> None:
    model = ternary_net(kit)
    trained = kit.new_net() if when == "other" else model
    floats = torch.optim.SGD(trained.parameters(), lr=0.1)
    optimizer = None
    if when in ("trained", "optimizer is gone"):
        optimizer = arb_ternary.make_optimizer(model)
    if when == "optimizer is gone":
        del optimizer
        gc.collect()
    if when == "frozen":
        for module in model.modules():
            if hasattr(module, "ternary"):
                module.ternary.frozen = True
    floats.step()  # no votes yet
    kit.loss_of(model, kit.Bigram().batch(0)).backward()
    if when in ("frozen", "trained", "other"):
        floats.step()
        return
    with pytest.warns(UserWarning, match="3 ternary weights have cast votes that no optimizer"):
        floats.step()


class Adapter(nn.Module):
    """It stands where peft puts the layers of LoRA."""

    __module__ = "peft.tuners.lora.layer"

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def test_adapters_of_ternary_layers_are_refused(kit: Kit) -> None:
    model = ternary_net(kit)
    model.up = Adapter(model.up)
    with pytest.raises(UsageProblem, match="peft: Adapter adapts a ternary layer") as caught:
        arb_ternary.make_optimizer(model)
    assert "Train the ternary weights themselves" in caught.value.hint
    model.up = model.up.base_layer
    model.lm_head = Adapter(model.lm_head)  # a float layer
    arb_ternary.make_optimizer(model)
