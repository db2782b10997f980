"""Test ``lr: auto``: its value, that a run reports and keeps it, and where it is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from arb_ternary.cli.main import main
from arb_ternary.errors import ConfigError, UsageProblem
from arb_ternary.optim.protocol import Trainable
from arb_ternary_manifests.execution import is_finished
from arb_ternary_manifests.plan import PlannedRun
from arb_ternary_train.auto_rate import TrainingPlan, resolve_auto_rate, training_plan
from arb_ternary_train.config import RunConfig
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_votes import rate
from arb_ternary_votes.config import ScaledVotesConfig
from arb_ternary_votes.rate import rate_of
from arb_ternary_votes.scaled_votes import build

CONFIG = """
name: chosen
data: {name: text, path: text.txt, tokenizer: characters}
model:
  name: decoder
  width: 16
  layers: 1
  heads: 2
  max_length: 8
  group_size: 32
  scale_rule: frozen
  float_parts: [embedding, head]
optimizer:
  name: split
  ternary: {name: scaled_votes, lr: auto}
  float: {name: adamw, lr: 0.003}
checkpoint: {every: 3, keep: 3}
phases:
  - {name: standard, steps: 6, batch_size: 2, block_size: 8, eval_every: 0, lr_schedule: linear,
      warmup_steps: 2}
"""
REFERENCE = TrainingPlan(steps=2400, tokens=2048, mean_rate=0.5, width=128)
#: Of the config above, whose mean rate is 0.6 of the peak: 0.115 * (400 / 1.2)^(1/4) / 128^(1/8) *
#: 8^(1/5).
RATE = 0.406


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be or not to be, that is the question. " * 40)
    Path("run.yaml").write_text(CONFIG)


def config(*overrides: str) -> RunConfig:
    return load_config("run.yaml", overrides).config


def run(name: str, *overrides: str, **request: Any) -> Path:
    train(config(*overrides), RunRequest(directory=Path(name), reporter=Silent, **request))
    return Path(name)


def ends_of(*runs: Path) -> list[dict[str, bytes]]:
    files = ("model.safetensors", "state.safetensors", "state.json")
    ends = [next(each.glob("checkpoints/step-00000006*")) for each in runs]
    return [{file: (end / file).read_bytes() for file in files} for end in ends]


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        ({}, 1.0),
        ({"steps": 2400 * 16}, 0.5),
        ({"tokens": 2048 * 256}, 2.0),
        ({"width": 128 * 32}, 0.5),
        ({"mean_rate": 0.5 / 16}, 2.0),
    ],
)
def test_auto_rate_is_the_power_law(change: dict[str, Any], factor: float) -> None:
    assert rate_of(evolve(REFERENCE, **change)) == pytest.approx(0.115 * factor, rel=1e-9)


def test_training_plan_counts_tokens_and_mean_rate() -> None:
    plan = training_plan(config("phases.0.gradient_accumulation_steps=4"))
    assert (plan.steps, plan.tokens, plan.width) == (6, 64, 16)
    falling = [1.0, 1.0 - 0.95 / 3, 1.0 - 1.9 / 3, 0.05]
    assert plan.mean_rate == pytest.approx((0.5 + 1.0 + sum(falling)) / 6)
    constant = ("phases.0.lr_schedule=constant", "phases.0.warmup_steps=0")
    assert training_plan(config(*constant)).mean_rate == 1.0


def test_the_mean_of_a_long_schedule_is_that_of_all_its_steps() -> None:
    steps = 100_000
    plan = training_plan(config(f"phases.0.steps={steps}", "phases.0.warmup_steps=0"))
    assert plan.mean_rate == pytest.approx(0.525, abs=1e-3)


def test_a_run_trains_as_with_the_number_says_it_and_records_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "run.yaml", "--run-dir", "chosen"]) == 0
    assert f"optimizer.ternary.lr: auto is {RATE}: 6 steps of 16 tokens" in capsys.readouterr().err
    assert json.loads(Path("chosen/run.json").read_text())["chosen"] == {
        "optimizer.ternary.lr": RATE
    }
    written = load_config("chosen/config.yaml").config.optimizer.options
    assert (written.ternary.options.lr, written.float.options.lr) == (RATE, 0.003)
    chosen, given = ends_of(Path("chosen"), run("given", f"optimizer.ternary.lr={RATE}"))
    assert chosen == given
    assert "chosen" not in json.loads(Path("given/run.json").read_text())


@pytest.mark.parametrize("file", ["run.yaml", "part/config.yaml"])
def test_a_resumed_run_keeps_the_rate_that_it_began_with(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run("whole")
    part = run("part")
    for late in part.glob("checkpoints/step-00000006*"):
        for each in late.iterdir():
            each.unlink()
        late.rmdir()
    monkeypatch.setattr(rate, "rate_of", lambda plan: 0.5)
    train(load_config(file).config, RunRequest(directory=part, resume="auto", reporter=Silent))
    first, second = ends_of(whole, part)
    assert first == second


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("phases.0.init_from=other",), "weights of another run"),
        (
            ("data={name: digits}", "masking=labels", "phases.0.block_size=128"),
            "have a size of their own",
        ),
        (
            (
                "masking=absorbing",
                "model.causal=false",
                "data={name: text, path: text.txt, tokenizer: bytes}",
            ),
            "'absorbing' has only hidden tokens predicted",
        ),
        (
            (
                "masking=mlm",
                "model.causal=false",
                "data={name: text, path: text.txt, tokenizer: bytes}",
            ),
            "'mlm' has only hidden tokens predicted",
        ),
        (
            ("model.vote_bits=2", "model.float_parts=[head]", "model.embedding_scale_rule=frozen"),
            "8 or 4 bits",
        ),
        (
            ("phases=[{name: standard, steps: 4}, {name: standard, steps: 8}]",),
            r"phases\[0\] and phases\[1\] differ",
        ),
        (
            ("phases=[{name: progressive, steps_per_stack: 4}]",),
            "'progressive', is not one training loop",
        ),
        (
            (
                "optimizer={name: gqc.gnts, inner: {name: split, ternary: {name: scaled_votes, lr: "
                "auto}}}",
            ),
            "puts steps off",
        ),
        (("optimizer.ternary.lr=-0.1",), "greater than 0, or auto"),
        (("optimizer.ternary.lr=aut",), "did you mean 'auto'"),
    ],
)
def test_what_auto_cannot_be_is_refused_by_name(overrides: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config(*overrides)


def test_phases_that_train_alike_share_one_rate() -> None:
    phase = (
        "{name: standard, steps: 6, batch_size: 2, block_size: 8, lr_schedule: linear, "
        "warmup_steps: 2}"
    )
    assert resolve_auto_rate(config(f"phases=[{phase}, {phase}]")).chosen == {
        "optimizer.ternary.lr": RATE
    }


def test_init_from_with_an_auto_rate_is_an_error() -> None:
    first = run("first")
    with pytest.raises(UsageProblem, match=r"`optimizer\.ternary\.lr: auto`, which is calibrated"):
        run("second", init_from=first)
    assert not Path("second").exists()


def test_config_show_gives_the_rate_and_its_origin(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["config", "show", "run.yaml", "--origin"]) == 0
    (line,) = (
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("optimizer.ternary.lr ")
    )
    assert line.split()[1] == str(RATE)
    assert "auto, 6 steps of 16 tokens" in line


def test_a_config_without_auto_is_left_as_it_is() -> None:
    given = config("optimizer.ternary.lr=0.2")
    resolved = resolve_auto_rate(given)
    assert resolved.config is given
    assert (resolved.chosen, resolved.notes) == ({}, ())


def test_an_optimizer_without_a_run_refuses_to_guess() -> None:
    with pytest.raises(ConfigError, match="auto"):
        build(ScaledVotesConfig(lr="auto"), Trainable())


def test_a_finished_run_of_a_manifest_is_known_again(monkeypatch: pytest.MonkeyPatch) -> None:
    again = PlannedRun(
        target="a", id="b", config=config(), directory=run("done"), previous=None, notes=()
    )
    monkeypatch.setattr(rate, "rate_of", lambda plan: 0.5)
    assert is_finished(again)
    assert not is_finished(evolve(again, config=config("optimizer.ternary.lr=0.5")))
