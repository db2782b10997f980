"""Stacks of every precision learn in a run and keep their format."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch

from arb_ternary.errors import UsageProblem
from arb_ternary_progressive import (
    ModelConfig,
    ProgressiveRackBuilder,
    ProgressiveTrainer,
    StackWiseConfig,
)
from arb_ternary_progressive.config import PRECISIONS
from arb_ternary_testing import PhaseSuite


def small_config() -> StackWiseConfig:
    config = StackWiseConfig(
        model=ModelConfig(vocab_size=16, d_model=32, d_ff=64, n_heads=2, max_length=16)
    )
    config.training.steps_per_stack = 30
    config.training.lr = 0.01
    config.training.progressive.blocks_per_stack = 1
    config.training.progressive.training_objective = "clm"
    return config


def counting(rows: int = 8) -> list[dict[str, torch.Tensor]]:
    """Return text in which each token is the one before plus three."""
    starts = torch.arange(rows)[:, None]
    return [{"input_ids": (starts + 3 * torch.arange(16) + shift) % 15} for shift in range(3)]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("mode", ["append", "prepend"])
def test_a_run_of_stacks_of_one_precision_learns(precision: str, mode: str) -> None:
    config = small_config()
    progressive = config.training.progressive
    progressive.new_stack_precision = precision  # type: ignore[assignment]
    progressive.building_mode = mode  # type: ignore[assignment]
    progressive.qlora_enabled = precision == "nvfp4"
    progressive.qlora_rank = 4
    builder = ProgressiveRackBuilder(config)
    before = [(name, value.dtype) for name, value in builder.add_stack().state_dict().items()]
    builder = ProgressiveRackBuilder(config)
    history = ProgressiveTrainer(config).train_rack(builder, counting(), target_stacks=2)
    assert [record.precision for record in history] == [precision] * 2
    assert all(record.skipped == 0 for record in history)
    assert history[0].first_loss == pytest.approx(math.log(16), abs=1.5)
    assert history[1].last_loss < 0.6 * history[0].first_loss
    for stack in builder.build_rack().ordered_stacks:
        assert [(name, value.dtype) for name, value in stack.state_dict().items()] == before


def test_a_four_bit_stack_without_adapters_cannot_be_trained() -> None:
    config = small_config()
    builder = ProgressiveRackBuilder(config, default_precision="nvfp4")
    with pytest.raises(
        UsageProblem, match="a base of precision nvfp4 cannot learn, and the stack has no adapters"
    ):
        ProgressiveTrainer(config).train_rack(builder, counting(), target_stacks=1)


class TestStacksOf16Bits(PhaseSuite):
    """A run resumes with the same bits, the optimizer's float32 copies included."""

    component = "progressive"
    options: ClassVar[Any] = {
        "target_stacks": 2,
        "steps_per_stack": 2,
        "batch_size": 2,
        "block_size": 8,
        "new_stack_precision": "half",
        "qlora_enabled": True,
        "qlora_rank": 2,
        "adapter_dtype": "float16",
    }
    steps = 4
    run: ClassVar[Any] = {
        "model": {
            "name": "decoder",
            "width": 32,
            "layers": 1,
            "heads": 2,
            "max_length": 32,
            "activations": "float",
            "float_parts": ["embedding", "head", "norms", "linears"],
        },
        "optimizer": {"name": "adamw"},
    }
