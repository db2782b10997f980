"""``arb progressive plan``: the plan of a run equals what the run needs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arb_ternary.cli.main import main
from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import collect_trainable
from arb_ternary.protocols.data import MaskedBatch
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_progressive.builder import ProgressiveRackBuilder
from arb_ternary_progressive.config import ProgressivePhaseConfig
from arb_ternary_progressive.growth import Stage
from arb_ternary_progressive.plan import GrowthPlan, StagePlan
from arb_ternary_train.activation_cache import ActivationCache
from arb_ternary_train.audit import audit
from arb_ternary_train.build import build_parts
from arb_ternary_train.evaluate import masked_loss
from arb_ternary_train.loading import load_config
from arb_ternary_votes.scaled_votes import ScaledVotes

CONFIG = """
name: planned
data: {{name: text, path: {text}}}
model: {{name: decoder, width: 32, layers: 2, heads: 2, max_length: 32{model}}}
masking: {masking}
optimizer: {optimizer}
phases:
  - {{name: progressive, target_stacks: 3, blocks_per_stack: 3, steps_per_stack: 5, batch_size: 4,
      block_size: 16
     {more}}}
"""
FLOAT = ", activations: float, float_parts: [embedding, head, norms, linears]"
ADAPTERS = ", trunk_strategy: qlora, qlora_enabled: true, qlora_rank: 2, progressive_qlora: true"
SPLIT = "{name: split, ternary: scaled_votes, float: adamw}"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(
        model: str = "", optimizer: str = "scaled_votes", more: str = "", masking: str = "causal"
    ) -> Path:
        text = tmp_path / "text.txt"
        text.write_text(
            "".join(f"{n}: the quick brown fox, {n * n % 97} lazy dogs\n" for n in range(40))
        )
        path = tmp_path / "planned.yaml"
        path.write_text(
            CONFIG.format(text=text, model=model, optimizer=optimizer, more=more, masking=masking)
        )
        return path

    return write


def plan_file(path: Path, overrides: tuple[str, ...] = ()) -> list[StagePlan]:
    return GrowthPlan(load_config(path, overrides).config).stages()


def nbytes(value: Any) -> int:
    """Return the bytes of all tensors in nested dicts and lists."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(nbytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(nbytes, value))
    return 0


def kept_by(rack: nn.Module, forward: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """Return the result of ``forward`` and the bytes that autograd saves for the backward."""
    own = {each.untyped_storage().data_ptr() for each in (*rack.parameters(), *rack.buffers())}
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: kept.append(each) or each, lambda each: each
    ):
        result = forward()
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}
    return result, sum(size for pointer, size in storages.items() if pointer not in own)


def measured(path: Path) -> list[dict[str, int]]:
    """Build and train the real rack of the config, and count tensors."""
    config = load_config(path).config
    options = config.phases[0].options
    assert isinstance(options, ProgressivePhaseConfig)
    parts = build_parts(config)
    builder = ProgressiveRackBuilder.from_model(parts.model, options)  # type: ignore[arg-type]
    rack = builder.build_rack()
    tokens = torch.randint(0, 100, (4, 16), generator=torch.Generator().manual_seed(0))
    batch = MaskedBatch(tokens, tokens, torch.ones_like(tokens, dtype=torch.bool))
    cache = ActivationCache(options.cache_bytes)
    found = []
    for index in range(options.target_stacks):
        if index:
            builder.add_stack(n_blocks=options.blocks_per_stack)
        stage = Stage.enter(builder, options.trunk_strategy)
        optimizer = config.optimizer.build(collect_trainable(rack))
        stream = stage.trunk_stream(cache, "float32")
        for step in range(options.steps_per_stack or 0):
            optimizer.zero_grad()
            inputs: dict[str, Any] = {}
            if stream is not None:
                inputs = {
                    "hidden": stream.hidden(tokens, torch.arange(4) + 4 * step),
                    "from_stack": stage.position,
                }
            loss, kept = kept_by(
                rack, lambda inputs=inputs: masked_loss(rack(tokens, **inputs), batch)
            )
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        tensors = {id(each): each.nbytes for each in (*rack.parameters(), *rack.buffers())}
        if stream is not None:
            cache.keep_only((stream.version,))
        # Working memory of ternary modules within a step, outside their buffers.
        working = [
            value
            for _, module in ternary_modules(rack)
            for name in ("stats", "magnitudes", "vote_scale", "vote_limits")
            if isinstance(value := getattr(module, name), Tensor)
        ]
        floats = sum(p.grad.nbytes for p in rack.parameters() if p.grad is not None)
        found.append(
            {
                "weights": sum(tensors.values()),
                "optimizer": nbytes(optimizer.state_dict()),
                "cache": 0 if stream is None else cache.nbytes,
                "gradients": floats + sum(each.nbytes for each in working),
                "activations": kept,
                "trainable": sum(p.numel() for p in rack.parameters() if p.requires_grad),
            }
        )
    return found


CASES = {
    "ternary": ("", "scaled_votes", ""),
    "float": (FLOAT, "{name: adamw}", ""),
    "qlora": ("", SPLIT, ADAPTERS),
    "prepended": (FLOAT, "{name: adamw}", ", building_mode: prepend"),
    "half": (FLOAT, "{name: adamw}", ", new_stack_precision: half"),
    "4-bit": (FLOAT, "{name: adamw}", ", new_stack_precision: qlora, qlora_rank: 4"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_plan_equals_the_measured_run(write: Callable[..., Path], case: str) -> None:
    model, optimizer, more = CASES[case]
    path = write(model, optimizer, more)
    plan = plan_file(path)
    real = measured(path)
    assert [stage.blocks for stage in plan] == [2, 3, 3]
    assert [stage.depth for stage in plan] == [2, 5, 8]
    for stage, found in zip(plan, real, strict=True):
        memory = stage.memory
        assert memory.weights == pytest.approx(found["weights"], rel=0.01)
        assert memory.optimizer == pytest.approx(found["optimizer"], rel=0.01, abs=64)
        assert memory.cache == found["cache"]
        assert memory.gradients == pytest.approx(found["gradients"], rel=0.01)
        assert memory.activations == pytest.approx(found["activations"], rel=0.05)
        assert memory.total == pytest.approx(sum(found.values()) - found["trainable"], rel=0.1)
        if model:
            assert stage.trainable == found["trainable"]


def test_undoable_votes_are_counted(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write()
    plain = plan_file(path)[0].memory.gradients
    monkeypatch.setattr(ScaledVotes, "refuses", True, raising=False)
    undone = plan_file(path)[0].memory.gradients
    config = load_config(path).config
    model = build_parts(config).model
    counted = {row.what: row.nbytes for row in audit(model).rows}
    config.optimizer.build(collect_trainable(model))
    statistics = [
        each for _, module in ternary_modules(model) for each in (module.stats, module.magnitudes)
    ]
    kept = counted["votes"] + counted["exponent votes"] + counted["control words"]
    assert undone - plain == kept + sum(each.nbytes for each in statistics if each is not None)


def test_stacks_trained_at_once_have_one_plan(write: Callable[..., Path]) -> None:
    (stage,) = plan_file(write(FLOAT, "{name: adamw}", ", enabled: false"))
    grown = plan_file(write(FLOAT, "{name: adamw}"))[-1]
    assert (stage.index, stage.depth, stage.trunk, stage.memory.cache) == (2, 8, "none", 0)
    assert stage.trainable == stage.parameters == grown.parameters
    assert stage.memory.gradients == 4 * stage.parameters
    assert stage.memory.activations > 2 * grown.memory.activations


def test_activations_are_the_tensors_saved_for_backward(write: Callable[..., Path]) -> None:
    from arb_ternary_progressive.plan import kept_for_backward

    path = write(FLOAT, "{name: adamw}")
    planned: list[StagePlan] = plan_file(path)
    config = load_config(path).config
    model = build_parts(config).model
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    batch = MaskedBatch(tokens, tokens, torch.ones_like(tokens, dtype=torch.bool))
    _, kept = kept_for_backward(model, lambda: masked_loss(model(tokens), batch))
    assert planned[0].memory.activations == pytest.approx(kept, rel=0.02)
    # A stack of three blocks on a frozen trunk saves the same, however deep the trunk is.
    assert planned[1].memory.activations == pytest.approx(planned[2].memory.activations, rel=0.02)
    assert planned[1].memory.activations > planned[0].memory.activations


def test_a_saved_tensor_counts_once_and_weights_never() -> None:
    from arb_ternary_progressive.plan import kept_for_backward

    linear = torch.nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8)
    # The first product saves x, the second its input; the weight belongs to the module.
    _, kept = kept_for_backward(linear, lambda: linear(linear(x)).sum())
    assert kept == 2 * x.nbytes


def test_checkpointed_activations_need_less(write: Callable[..., Path]) -> None:
    whole = plan_file(write(FLOAT, "{name: adamw}"))
    less = plan_file(write(FLOAT, "{name: adamw}", ", activation_checkpointing: true"))
    assert less[2].memory.activations < whole[2].memory.activations / 2
    assert less[2].memory.weights == whole[2].memory.weights


def test_the_cache_keeps_to_its_budget_and_its_format(write: Callable[..., Path]) -> None:
    sample = 16 * 32 * 2
    (_, first, second) = plan_file(
        write(more=f", cache_dtype: bfloat16, cache_bytes: {3 * sample + 5}")
    )
    assert first.memory.cache == second.memory.cache == 3 * sample
    assert [
        stage.memory.cache for stage in plan_file(write(more=", cache_activations: false"))
    ] == [0, 0, 0]


def test_time_steps_span_the_whole_range(write: Callable[..., Path]) -> None:
    plan = plan_file(write(masking="time_step", model=", causal: false"))
    assert [(stage.time_step, stage.hidden_share) for stage in plan] == [
        (0, 0.15),
        (3, 0.45),
        (7, 0.85),
    ]
    drawn = plan_file(
        write(more=", time_interpretation: input, time_embedding_dim: 8", masking="time_step")
    )
    assert [(stage.time_step, stage.hidden_share) for stage in drawn] == [(None, None)] * 3


def test_the_command_prints_the_plan(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write()
    assert main(["progressive", "plan", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:6] == ["stack", "place", "blocks", "depth", "precision", "trunk"]
    assert [line.split()[:6] for line in lines[1:]] == [
        ["0", "0", "2", "2", "ternary", "none"],
        ["1", "1", "3", "5", "ternary", "frozen"],
        ["2", "2", "3", "8", "ternary", "frozen"],
    ]
    for line, stage in zip(lines[1:], plan_file(path), strict=True):
        assert line.split()[6] == str(stage.time_step)
        assert f" {stage.parameters:,} " in line
        assert line.endswith(f" {stage.memory.total / 1024:.1f} KiB")
    assert main(["progressive", "plan", str(path), "--json", "-o", "phases.0.target_stacks=2"]) == 0
    stages = json.loads(capsys.readouterr().out)
    assert [stage["memory"]["total"] for stage in stages] == [
        stage.memory.total for stage in plan_file(path)[:2]
    ]


def test_what_cannot_be_planned_is_an_error(write: Callable[..., Path]) -> None:
    path = write()
    with pytest.raises(ConfigError, match="none of them is progressive"):
        plan_file(path, ("phases=[{name: standard, block_size: 8}]",))
