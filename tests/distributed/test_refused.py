"""Components of plugins that several ranks refuse by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from arb_ternary.errors import ConfigError
from arb_ternary_distributed.checks import check_config, check_parts
from arb_ternary_train.build import build_parts
from arb_ternary_train.config import RunConfig
from arb_ternary_train.loading import load_config
from arb_ternary_upcycle.load_teacher import LoadTeacherPhase

CONFIG = """
data: {{name: text, path: {text}, tokenizer: characters}}
model: {{name: decoder, width: 16, layers: 1, heads: 2, max_length: 8, group_size: 32}}
optimizer: {{name: sign_votes, accum_threshold: 2}}
phases: [{{name: standard, steps: 2, batch_size: 2, block_size: 8, gradient_accumulation_steps: 4}}]
"""


@pytest.fixture
def config(tmp_path: Path) -> Any:
    (tmp_path / "text.txt").write_text("to be or not to be that is the question " * 20)
    (tmp_path / "run.yaml").write_text(CONFIG.format(text=tmp_path / "text.txt"))
    return lambda *overrides: load_config(tmp_path / "run.yaml", overrides).config


def refused(config: RunConfig) -> str:
    with pytest.raises(ConfigError, match="2 ranks cannot train this run") as caught:
        check_config(config, 2)
    return caught.value.what


def test_the_config_is_accepted(config: Any) -> None:
    check_config(config(), 2)
    check_parts(config(), build_parts(config()), 2)


def test_a_wrapper_that_defers_steps_is_refused(config: Any) -> None:
    options = "optimizer={name: gqc.mht, inner: {name: sign_votes, accum_threshold: 2}}"
    assert "optimizer 'gqc.mht': it defers steps" in refused(config(options))


def test_a_policy_is_refused(config: Any) -> None:
    assert "phases.0.policy: 'orchestrator' tries steps" in refused(
        config("phases.0.policy={name: orchestrator, eval_horizon: 1}")
    )


def test_a_phase_on_rank_0_that_changes_the_structure_is_refused(
    config: Any, monkeypatch: Any
) -> None:
    standard = "{name: standard, block_size: 8, gradient_accumulation_steps: 2}"
    run = config(f"phases=[{standard}, {{name: load_teacher, teacher: here}}]")
    check_config(run, 2)
    for name in ("structure", "restore_structure"):
        monkeypatch.setattr(LoadTeacherPhase, name, lambda *_: None, raising=False)
    assert "phases.1: 'load_teacher' runs on rank 0 alone, and changes" in refused(run)
