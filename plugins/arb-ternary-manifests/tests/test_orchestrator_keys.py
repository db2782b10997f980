"""Keys with ``orchestrator_`` in a manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.config.errors import show_path
from arb_ternary.config.fields import config_fields, leaves, to_plain
from arb_ternary.errors import ConfigError
from arb_ternary_manifests.document import read_manifest
from arb_ternary_manifests.dry_run import forecast
from arb_ternary_manifests.plan import plan
from arb_ternary_orchestrator.config import OrchestratorConfig
from arb_ternary_train.config import RunConfig

#: Another value of every key.
KEYS: dict[str, Any] = {
    "decision_interval": 700,
    "eval_horizon": 50,
    "initial_strategy": "conservative_adamw",
    "safety_strategy": "conservative_votes",
    "strategies": ["aggressive_votes", "sgd_escape"],
    "max_candidates": 2,
    "max_loss_increase": 1.25,
    "hysteresis": 50,
    "spike_window": 40,
    "spike_count": 5,
    "phase_hold": 3,
    "window": 77,
    "use_adagc": True,
    "adagc_warmup": 30,
    "adagc_threshold": 2.5,
    "use_nowcasting": True,
    "snapshot_memory": 1000000,
    "snapshot_every": 20,
    "snapshots": 2,
    "max_overhead": 0.5,
    "probe_batches": 0,
    "margin": 0.25,
    "exploration": 1.0,
    "telemetry_every": 5,
}
HEAD = """version: 2
targets:
  - name: one
    system:
      ref: system.language_model
      config: {width: 16, layers: 1, heads: 2, max_length: 64, float_parts: [embedding, head]}
    runs:
      - id: a
        steps: 900
        train:
          batch_size: 2
          block_size: 16
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config_of(*lines: str) -> RunConfig:
    Path("m.yaml").write_text(HEAD + "".join(f"          {line}\n" for line in lines))
    (run,) = plan(read_manifest(Path("m.yaml")), Path("out"), dry=True, files=Path)
    return run.config


def flat(config: RunConfig) -> dict[str, Any]:
    return {show_path(path): value for path, value in leaves(to_plain(config, given=False))}


def test_every_option_of_the_policy_is_a_key() -> None:
    assert set(KEYS) == {str(field.alias) for field in config_fields(OrchestratorConfig)}


def test_every_key_takes_effect() -> None:
    before = flat(config_of("orchestrator_enabled: true"))
    assert before["phases[0].policy.name"] == "orchestrator"
    lines = [f"orchestrator_{key}: {json.dumps(value)}" for key, value in KEYS.items()]
    after = flat(config_of(*lines))
    changed = {path: value for path, value in after.items() if value != before[path]}
    assert changed == {f"phases[0].policy.{key}": value for key, value in KEYS.items()}


def test_policy_needs_a_key() -> None:
    assert config_of().phases[0].options.policy is None
    assert config_of("orchestrator_enabled: false").phases[0].options.policy is None
    off = config_of(
        "orchestrator_enabled: false",
        "orchestrator_use_adagc: true",
        "orchestrator_eval_horizon: 9",
    )
    assert off.phases[0].options.policy is None
    policy = config_of("orchestrator_eval_horizon: 9").phases[0].options.policy
    assert (policy.options.eval_horizon, policy.given) == (9, {"eval_horizon"})


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (
            "orchestrator_eval_horizonn: 9",
            "train.orchestrator_eval_horizonn: unknown key; did you mean 'eval_horizon'?",
        ),
        ("orchestrator_eval_horizon: 0", "train.orchestrator_eval_horizon: must be greater than 0"),
        (
            "orchestrator_eval_horizon: 901",
            "eval_horizon: one/a: 901 steps are more than the 900 of the phase 'standard'",
        ),
        ("orchestrator_initial_strategy: sgd_escap", "no strategy is called 'sgd_escap'"),
        (
            "orchestrator_adagc_warmup: 5",
            "adagc_warmup: one/a: has no effect because 'use_adagc' is false",
        ),
    ],
)
def test_faults_have_the_line_of_the_key(line: str, fault: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_of(line)
    texts = [text for text in str(error.value).splitlines() if fault in text]
    assert texts, str(error.value)
    assert texts[0].removeprefix("error: ").startswith("m.yaml:13: ")


def test_dry_run_says_how_many_comparisons_there_will_be() -> None:
    # Two candidates of 100 steps are lost: of 900 + 200 steps 18.2 %.
    (note,) = forecast(config_of("orchestrator_enabled: true"), probe=False).notes
    assert note.startswith("phases[0]: the orchestrator makes no comparison in the 900 steps")
    assert "loses 200 steps, 18.2% of all, and 'max_overhead' is 10%" in note


def test_dry_run_times_steps_without_the_policy() -> None:
    (phase,) = forecast(config_of("orchestrator_enabled: true"), probe=True).phases
    assert phase.seconds is not None
