"""A gradient that is not finite reaches neither the weights nor a checkpoint."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from arb_ternary import TernaryLinear
from arb_ternary.errors import CheckpointError
from arb_ternary_train import step
from arb_ternary_train.loop import TrainingLoop
from arb_ternary_train.metrics import read_metrics
from arb_ternary_train.optim.joined import JoinedOptimizer
from arb_ternary_train.step import Diverged
from arb_ternary_train.update import ternary_update
from arb_ternary_votes.sign_votes import SignVotes


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put ``inf`` into one float gradient of some steps."""

    def arrange(*steps: int) -> None:
        original = step.gradient_norm
        calls = 0

        def spoiled(parameters: Any, clip_to: float | None) -> float | None:
            nonlocal calls
            calls += 1
            trained = [p for p in parameters if p.grad is not None]
            if calls in steps:
                trained[0].grad.view(-1)[0] = math.inf
            return original(trained, clip_to)

        monkeypatch.setattr(step, "gradient_norm", spoiled)

    return arrange


@pytest.mark.parametrize("clip", ["null", "1.0"])
def test_a_spoiled_step_is_dropped_whole_and_counted(
    clip: str, tiny: Any, spoil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_step = TrainingLoop.count_step
    count_skip = TrainingLoop.count_skip
    kept: dict[str, torch.Tensor] = {}
    compared = []

    def keep(self: TrainingLoop) -> None:
        count_step(self)
        kept.update({name: value.clone() for name, value in self.model.state_dict().items()})

    def compare(self: TrainingLoop, skip: Any, skips: Any) -> None:
        count_skip(self, skip, skips)
        for name, value in self.model.state_dict().items():
            compared.append(name)
            assert torch.equal(value, kept[name]), name

    monkeypatch.setattr(TrainingLoop, "count_step", keep)
    monkeypatch.setattr(TrainingLoop, "count_skip", compare)
    spoil(4)
    directory, _ = tiny.run("run", f"phases.0.grad_clip={clip}")
    events = read_metrics(directory.metrics_file)
    assert [each["what"] for each in events if each["event"] == "skip"] == ["gradient"]
    assert any(name.endswith("votes") for name in compared)
    weights = load_file(directory.checkpoints / "step-00000008" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values() if tensor.is_floating_point())


def test_a_run_stops_before_weights_change(tiny: Any, spoil: Any) -> None:
    spoil(*range(4, 100))
    with pytest.raises(Diverged, match="had no finite gradient"):
        tiny.run("run", "phases.0.max_skipped=2", "checkpoint.every=3", "checkpoint.keep=1")
    (folder,) = (tiny.folder / "run" / "checkpoints").glob("step-*")
    weights = load_file(folder / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values() if tensor.is_floating_point())


def test_a_checkpoint_with_a_value_that_is_not_finite_is_not_written(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = step.as_outcome
    calls = 0

    def spoil_weights(result: Any, optimizer: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            with torch.no_grad():
                next(p for p in parameters if p.requires_grad).view(-1)[0] = math.nan
        return advance(result, optimizer)

    monkeypatch.setattr(step, "as_outcome", spoil_weights)
    with pytest.raises((CheckpointError, Diverged)):
        tiny.run("run", "checkpoint.every=3", "checkpoint.keep=1")
    (folder,) = (tiny.folder / "run" / "checkpoints").glob("step-*")
    assert folder.name == "step-00000003"


class Mixed(nn.Module):
    """A ternary layer below a float one, whose gradient a hook can spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = TernaryLinear(8, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.hidden(x))
        return y


def test_an_update_of_ones_own_loop_is_dropped_whole() -> None:
    torch.manual_seed(0)
    model = Mixed()
    floats = torch.optim.AdamW([{"params": list(model.head.parameters()), "kind": "float"}])
    votes = SignVotes({"hidden": model.hidden}, accum_threshold=1)
    optimizer = JoinedOptimizer({"ternary": votes, "float": floats})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hook = model.head.bias.register_hook(lambda grad: grad / 0)
    loss = model(torch.randn(4, 8)).square().mean()
    assert loss.isfinite()
    outcome = ternary_update(model, optimizer, loss)
    assert (outcome.stepped, outcome.skipped) == (False, True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    hook.remove()
    assert ternary_update(model, optimizer, model(torch.randn(4, 8)).square().mean()).stepped
