from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace as Kit
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import arb_ternary
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_train.build import build_model
from arb_ternary_train.exact_arithmetic import exact_arithmetic
from arb_ternary_train.loading import load_config
from arb_ternary_train.loop import TrainingLoop
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train


def validation(kit: Kit, model: nn.Module) -> float:
    with torch.no_grad():
        return float(kit.loss_of(model, kit.Bigram().batch(10**6, rows=256)))


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_plain_loop_learns_to_near_the_entropy_of_the_text(kit: Kit, precision: str) -> None:
    dtype = getattr(torch, precision)
    model = kit.new_net()
    arb_ternary.ternarize(model, init="random")
    optimizer = arb_ternary.make_optimizer(model, lr=0.3, float_lr=0.02)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=60)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "float16")
    assert validation(kit, model) > math.log(kit.VOCABULARY) - 0.1
    for step in range(60):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = kit.loss_of(model, kit.Bigram().batch(step, rows=32))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
    # The best possible loss is the entropy; a model that ignores its input has log(12) = 2.48.
    assert validation(kit, model) < kit.Bigram.entropy + 0.05


def votes_of_one_backward(kit: Kit, model: nn.Module, forward: Any) -> tuple[Tensor, list[int]]:
    optimizer = arb_ternary.make_optimizer(model, "sign_votes")
    logits = forward(model, kit.Bigram().batch(0)[:, :-1])
    logits.square().mean().backward()
    modules = optimizer.rule.modules
    votes = torch.cat([module.logical_votes().flatten() for module in modules])
    return votes, [module.casts for module in modules]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations_cast_their_votes_once(kit: Kit, reentrant: bool) -> None:
    model = kit.new_net()
    arb_ternary.ternarize(model, gradients="int8")
    twin = copy.deepcopy(model)

    def block(net: nn.Module, x: Tensor) -> Tensor:
        mixed = net.mix(x.transpose(1, 2)).transpose(1, 2)
        return x + mixed + net.down(torch.relu(net.up(net.norm(x))))

    def plain(net: nn.Module, tokens: Tensor) -> Tensor:
        return net.lm_head(block(net, net.embed(tokens)))

    def checkpointed(net: nn.Module, tokens: Tensor) -> Tensor:
        x = checkpoint(block, net, net.embed(tokens), use_reentrant=reentrant)
        return net.lm_head(x)

    expected, casts = votes_of_one_backward(kit, model, plain)
    votes, casts_again = votes_of_one_backward(kit, twin, checkpointed)
    assert casts == casts_again == [1, 1, 1, 1]
    assert torch.equal(votes, expected)
    for name, parameter in model.named_parameters():
        other = dict(twin.named_parameters())[name]
        assert torch.allclose(parameter.grad, other.grad, rtol=1e-6)


EXACT = """
name: tiny
seed: 3
exact: true
data: {{name: text, path: {text}, tokenizer: characters}}
model: {{name: decoder, width: 32, layers: 1, heads: 2, max_length: 16, group_size: 32}}
optimizer: {{name: scaled_votes, lr: 0.4}}
phases:
  - {{name: standard, steps: 6, batch_size: 2, block_size: 8, warmup_steps: 0, eval_every: 0,
     lr_schedule: constant}}
"""


def test_flips_are_those_of_arb_train_on_the_same_batches(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    (tmp_path / "tiny.yaml").write_text(EXACT.format(text=tmp_path / "text.txt"))
    config = load_config(tmp_path / "tiny.yaml").config
    loops: list[TrainingLoop] = []
    drawn = []
    flips = []
    next_microbatch = TrainingLoop.next_microbatch

    def noting(loop: TrainingLoop, index: int) -> Any:
        found = next_microbatch(loop, index)
        drawn.append(found.masked)
        loops[:] = [loop]
        return found

    monkeypatch.setattr(TrainingLoop, "next_microbatch", noting)
    # A loss in blocks rounds its gradient in another order than that of all logits at once.
    monkeypatch.setattr(TrainingLoop, "loss_in_blocks", lambda *_: None)
    train(config, RunRequest(directory=tmp_path / "run", reporter=Silent))
    (loop,) = loops
    trained = kit.integers(loop.model)

    size = loop.context.vocabulary_size
    model = build_model(config, size, loop.voters[0].chosen_backend, torch.device("cpu"))
    assert len(ternary_modules(model)) == len(loop.voters) > 4
    optimizer = arb_ternary.make_optimizer(model, lr=0.4, seed=config.seed)
    # The decoder of this project computes what lies between integers with torch in an exact run.
    with exact_arithmetic():
        for masked in drawn:
            logits = model(masked.inputs)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), masked.targets.flatten())
            loss.backward()
            optimizer.step()
            model.zero_grad()
            flips.append(optimizer.last_outcome.flips)
    assert kit.same(kit.integers(model), trained)
    assert sum(flips) > 0
