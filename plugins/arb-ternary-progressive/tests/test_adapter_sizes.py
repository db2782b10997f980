"""Rank and alpha of adapters by strategy and pattern."""

from __future__ import annotations

from typing import Any

import pytest

from arb_ternary.errors import ConfigError
from arb_ternary_progressive.config import ProgressivePhaseConfig, pattern_value
from arb_ternary_progressive.stackwise import ProgressiveConfig


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("constant", [16, 16, 16, 16]),
        ("increasing", [16, 32, 64, 128]),
        ("decreasing", [16, 8, 4, 2]),
        ("linear", [16, 24, 32, 40]),
    ],
)
def test_each_pattern_gives_its_ranks(pattern: str, expected: list[int]) -> None:
    config = ProgressiveConfig(qlora_strategy="progressive", qlora_rank_pattern=pattern)  # type: ignore[arg-type]
    ranks = [config.adapter_size(stack)[0] for stack in range(4)]
    assert ranks == expected
    assert all(type(rank) is int for rank in ranks)
    alphas = ProgressiveConfig(
        qlora_strategy="progressive", qlora_alpha=16, qlora_alpha_pattern=pattern
    )  # type: ignore[arg-type]
    assert [alphas.adapter_size(stack)[1] for stack in range(4)] == expected


def test_a_decreasing_rank_ends_at_one() -> None:
    assert [pattern_value(4, "decreasing", stack) for stack in range(6)] == [4, 2, 1, 1, 1, 1]


def test_the_simplified_strategy_ignores_patterns() -> None:
    config = ProgressiveConfig(qlora_rank=4, qlora_alpha=8, qlora_rank_pattern="increasing")
    assert [config.adapter_size(stack) for stack in range(3)] == [(4, 8)] * 3


def test_the_variable_strategy_needs_an_entry_per_stack() -> None:
    config = ProgressiveConfig(qlora_strategy="variable")
    config.qlora_configs = {0: {"rank": 8, "alpha": 16}, 1: {"rank": 16, "alpha": 32}}
    assert [config.adapter_size(stack) for stack in range(2)] == [(8, 16), (16, 32)]
    with pytest.raises(ConfigError, match="no entry for stack 2"):
        config.adapter_size(2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        # 16 * 2^13 is more than 65,536 features; 2^1 * 2^127 is more than float32 holds.
        ({"qlora_rank_pattern": "increasing", "target_stacks": 14}, "'qlora_rank_pattern'"),
        (
            {"qlora_alpha_pattern": "increasing", "qlora_alpha": 2.0, "target_stacks": 128},
            "'qlora_alpha_pattern'",
        ),
        (
            {"qlora_alpha_pattern": "increasing", "qlora_alpha": 2.0, "target_stacks": 4096},
            "'qlora_alpha_pattern'",
        ),
    ],
)
def test_a_pattern_that_doubles_out_of_range_is_refused(options: dict[str, Any], said: str) -> None:
    common = {
        "max_stacks": 4096,
        "qlora_enabled": True,
        "qlora_strategy": "progressive",
        "qlora_rank_pattern": "constant",
    }
    with pytest.raises(ValueError, match=f"^{said}: increasing doubles"):
        ProgressivePhaseConfig(**{**common, **options})
    within = {**common, **options, "target_stacks": options["target_stacks"] - 1}
    if options["target_stacks"] < 4096:
        ProgressivePhaseConfig(**within)
