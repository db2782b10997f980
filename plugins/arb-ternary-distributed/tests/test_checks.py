"""Options and parts that several ranks refuse by name, before there is a run directory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import collect_trainable
from arb_ternary_distributed.checks import (
    check_config,
    check_optimizer,
    check_parts,
    no_global_draws,
)
from arb_ternary_train.build import RunParts, build_parts

TWO = 2
FOUR_MICRO_BATCHES = "phases.0.gradient_accumulation_steps=4"


def refused(tiny: Any, *overrides: str, size: int = TWO) -> str:
    with pytest.raises(ConfigError, match="cannot train this run") as caught:
        check_config(tiny(*overrides), size)
    return caught.value.what


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (
            ("phases.0.gradient_accumulation_steps=1",),
            "phases.0.gradient_accumulation_steps: 1 of all ranks",
        ),
        ((FOUR_MICRO_BATCHES, "phases.0.preserve_state=true"), "phases.0.preserve_state: "),
    ],
    ids=["too few micro-batches", "preserve_state"],
)
def test_an_option_that_needs_one_process_is_refused(
    tiny: Any, overrides: tuple[str, ...], named: str
) -> None:
    assert named in refused(tiny, *overrides)


def test_a_loss_scale_is_refused(tiny: Any) -> None:
    config = tiny(
        FOUR_MICRO_BATCHES, "device=cuda", "phases.0.use_amp=true", "phases.0.amp_dtype=bfloat16"
    )
    check_config(config, TWO)
    object.__setattr__(config.phases[0].options, "amp_dtype", "float16")
    with pytest.raises(ConfigError, match=r"phases\.0\.amp_dtype: the scale of the loss"):
        check_config(config, TWO)


def test_moments_that_cannot_be_sharded_are_refused(tiny: Any) -> None:
    floats = "optimizer={name: split, ternary: scaled_votes, float: adamw}"
    config = tiny(
        FOUR_MICRO_BATCHES, "ranks.optimizer_state=sharded", "model.float_parts=[embedding]", floats
    )
    parts = parts_of(config)
    check_parts(config, parts, TWO)
    parts.model.to(torch.float16)
    with pytest.raises(
        ConfigError, match=r"ranks\.optimizer_state: the state of WideAdamW cannot be sharded"
    ):
        check_parts(config, parts, TWO)


def test_all_faults_are_reported_at_once(tiny: Any) -> None:
    what = refused(tiny, "phases.0.preserve_state=true")
    assert "phases.0.preserve_state" in what
    assert "phases.0.gradient_accumulation_steps" in what


def test_one_rank_per_micro_batch_is_the_limit(tiny: Any) -> None:
    check_config(tiny(FOUR_MICRO_BATCHES), 4)
    assert "use 5 or more" in refused(tiny, FOUR_MICRO_BATCHES, size=5)


def parts_of(config: Any, model: nn.Module | None = None) -> RunParts:
    parts = build_parts(config)
    if model is None:
        return parts
    return RunParts(
        parts.device,
        parts.backend,
        parts.data,
        parts.masking,
        parts.observers,
        model,
        parts.vocabulary_size,
    )


def test_a_scale_rule_of_one_process_is_refused(tiny: Any) -> None:
    options = ("model.float_parts=[norms]", "model.embedding_scale_rule=correlation")
    config = tiny(FOUR_MICRO_BATCHES, *options)
    with pytest.raises(ConfigError, match="model, embedding: scale rule 'correlation' follows"):
        check_parts(config, parts_of(config), TWO)


def test_dropout_is_refused_with_its_module(tiny: Any) -> None:
    config = tiny(FOUR_MICRO_BATCHES)
    dropping = nn.Sequential(build_parts(config).model, nn.Dropout(0.1))
    with pytest.raises(ConfigError, match="model, 1: each rank draws"):
        check_parts(config, parts_of(config, dropping), TWO)
    check_parts(
        config, parts_of(config, nn.Sequential(build_parts(config).model, nn.Dropout(0.0))), TWO
    )


def test_a_rule_that_needs_all_rows_is_refused(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(FOUR_MICRO_BATCHES)
    parts = parts_of(config)
    check_parts(config, parts, TWO)
    optimizer = config.optimizer.build(collect_trainable(parts.model))
    rule = next(part for part in optimizer.parts.values() if hasattr(part, "votes_by_rows"))
    check_optimizer(optimizer, TWO)
    monkeypatch.setattr(type(rule), "votes_by_rows", False)
    for refuse in (
        lambda: check_parts(config, parts, TWO),
        lambda: check_optimizer(optimizer, TWO),
    ):
        with pytest.raises(ConfigError, match=f"optimizer {type(rule).__name__}: its rule needs"):
            refuse()


def test_draws_from_the_global_generator_are_refused() -> None:
    cpu = torch.device("cpu")
    with no_global_draws(cpu):
        torch.rand(3, generator=torch.Generator().manual_seed(1))
    with (
        pytest.raises(ConfigError, match="it draws from torch's global generator"),
        no_global_draws(cpu),
    ):
        nn.functional.dropout(torch.ones(8), 0.5)
