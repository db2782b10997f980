"""``split``: two optimizers as one, and AdamW as torch has it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from arb_ternary import TernaryLinear
from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import (
    StepOutcome,
    Trainable,
    as_outcome,
    collect_trainable,
    inner_optimizers,
    takes_loss_signal,
)
from arb_ternary_testing.component import make_choice
from arb_ternary_train.optim.adamw import build as build_adamw
from arb_ternary_train.optim.config import AdamWConfig
from arb_ternary_train.optim.joined import JoinedOptimizer
from arb_ternary_votes.sign_votes import SignVotes


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = TernaryLinear(8, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.hidden(x))
        return y


def joined(model: Mixed) -> JoinedOptimizer:
    floats = torch.optim.SGD(
        [{"params": list(model.head.parameters()), "kind": "float"}], lr=0.1, momentum=0.9
    )
    return JoinedOptimizer(
        {"ternary": SignVotes({"hidden": model.hidden}, accum_threshold=1), "float": floats}
    )


def test_both_parts_step_and_report_together() -> None:
    model = Mixed()
    optimizer = joined(model)
    weight = model.head.weight.clone()
    packed = model.hidden.weight.clone()
    model(torch.randn(4, 8)).square().sum().backward()
    outcome = optimizer.step()
    assert outcome.flips > 0
    assert not torch.equal(model.head.weight, weight)
    assert not torch.equal(model.hidden.weight, packed)
    optimizer.zero_grad()
    assert model.head.weight.grad is None
    assert not model.hidden.stats.any()


def test_one_scheduler_drives_the_rates_of_both() -> None:
    model = Mixed()
    optimizer = joined(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    schedule.step()
    assert [group["lr"] for part in optimizer.parts.values() for group in part.param_groups] == [
        0.5,
        0.05,
    ]


def test_state_round_trips_and_groups_stay_shared() -> None:
    model = Mixed()
    optimizer = joined(model)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.param_groups[1]["lr"] = 0.03
    other = joined(model)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[1]["lr"] == 0.03
    other.param_groups[1]["lr"] = 0.01
    assert other.parts["float"].param_groups[0]["lr"] == 0.01
    moment = other.parts["float"].state[model.head.weight]["momentum_buffer"]
    assert torch.equal(moment, optimizer.parts["float"].state[model.head.weight]["momentum_buffer"])


def test_a_skipped_ternary_update_keeps_the_float_part_still() -> None:
    model = Mixed()
    optimizer = joined(model)
    model(torch.randn(4, 8)).sum().backward()
    weight = model.head.weight.clone()
    outcome = optimizer.step(loss_signal=float("nan"))
    assert outcome.skipped
    assert torch.equal(model.head.weight, weight)
    assert model.head.weight.grad is None
    assert not model.hidden.stats.any()


def test_a_group_cannot_be_added_past_the_parts() -> None:
    optimizer = joined(Mixed())
    with pytest.raises(ValueError, match="one of the parts: ternary, float"):
        optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})


def test_adamw_equals_torch_and_decays_matrices_only() -> None:
    torch.manual_seed(0)
    one = nn.Linear(4, 3)
    other = nn.Linear(4, 3)
    other.load_state_dict(one.state_dict())
    config = AdamWConfig(lr=0.01, beta1=0.8, beta2=0.9, weight_decay=0.1)
    ours = build_adamw(config, collect_trainable(one))
    theirs = torch.optim.AdamW(
        [
            {"params": [other.weight], "weight_decay": 0.1},
            {"params": [other.bias], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.8, 0.9),
        eps=1e-8,
    )
    x = torch.randn(5, 4)
    for _ in range(5):
        for model, optimizer in ((one, ours), (other, theirs)):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(one.weight, other.weight)
    torch.testing.assert_close(one.bias, other.bias)


def test_adamw_without_float_parameters_says_what_to_use() -> None:
    with pytest.raises(ConfigError, match="scaled_votes"):
        build_adamw(AdamWConfig(), Trainable())


def test_collecting_leaves_out_what_is_frozen() -> None:
    model = Mixed()
    assert set(collect_trainable(model).ternary) == {"hidden"}
    assert set(collect_trainable(model).floats) == {"head.weight", "head.bias"}
    model.hidden.frozen = True
    model.head.bias.requires_grad_(False)
    assert not collect_trainable(model).ternary
    assert set(collect_trainable(model).floats) == {"head.weight"}


def test_results_of_foreign_optimizers_are_read() -> None:
    assert as_outcome(None).stepped
    assert not as_outcome(False).stepped
    assert as_outcome(StepOutcome(flips=3)).flips == 3


def test_split_needs_parts_of_both_kinds() -> None:
    trainable = collect_trainable(nn.Linear(2, 2))
    with pytest.raises(
        ConfigError, match=r"optimizer\.ternary: the model has no ternary parts to train"
    ):
        make_choice("optimizer", "split").build(trainable)


@pytest.mark.parametrize("frozen", ["ternary", "float"])
def test_a_part_that_is_all_frozen_now_is_left_out(frozen: str) -> None:
    model = nn.Sequential(TernaryLinear(4, 4), nn.Linear(4, 4))
    model[0].frozen = frozen == "ternary"  # type: ignore[assignment]
    model[1].requires_grad_(frozen != "float")
    trainable = collect_trainable(model)
    assert trainable.idle == {frozen}
    optimizer = make_choice("optimizer", "split").build(trainable)
    assert list(optimizer.parts) == [kind for kind in ("ternary", "float") if kind != frozen]


def test_a_model_whose_parts_are_all_frozen_has_nothing_to_train() -> None:
    model = nn.Sequential(TernaryLinear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    model[0].frozen = True  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="no ternary parts to train"):
        make_choice("optimizer", "split").build(collect_trainable(model))


class Signalled(torch.optim.SGD):
    takes_loss_signal = True


def test_joined_optimizer_takes_loss_signal_if_a_part_does() -> None:
    def part(kind: type[torch.optim.SGD], group: str) -> torch.optim.Optimizer:
        return kind([{"params": [nn.Parameter(torch.zeros(1))], "kind": group}], lr=1.0)

    plain = part(torch.optim.SGD, "float")
    assert takes_loss_signal(JoinedOptimizer({"a": part(Signalled, "ternary"), "b": plain}))
    assert not takes_loss_signal(
        JoinedOptimizer({"a": part(torch.optim.SGD, "ternary"), "b": plain})
    )
    assert not takes_loss_signal(JoinedOptimizer({"b": plain}))
    assert not takes_loss_signal(plain)


def test_inner_optimizers_yields_each_once_outermost_first() -> None:
    class Wrapper(torch.optim.SGD):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__([nn.Parameter(torch.zeros(1))], lr=1.0)
            self.inner = inner

    leaves = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0) for _ in range(2)]
    joined = JoinedOptimizer({"a": leaves[0], "b": leaves[1]})
    outer = Wrapper(joined)
    assert list(inner_optimizers(outer)) == [outer, joined, *leaves]


def test_packed_weights_that_are_parameters_are_no_float_parts() -> None:
    model = nn.Sequential(TernaryLinear(8, 6))
    before = collect_trainable(model)
    packed = model[0].weight
    del model[0].weight
    model[0].weight = nn.Parameter(packed, requires_grad=False)
    assert collect_trainable(model) == before
    assert before.idle == frozenset()
