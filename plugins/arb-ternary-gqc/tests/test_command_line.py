"""Wrappers named in a config: statistics, metrics, a figure, and resume between draws."""

from __future__ import annotations

import json
import shutil
import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.cli.main import main
from arb_ternary_gqc.gns import GradientNoiseScale
from arb_ternary_gqc.gnts import GradientNormThreshold
from arb_ternary_gqc.mht import MetricHypothesisTest
from arb_ternary_gqc.sbc import ScheduledBatch

CONFIG = """
name: drawn
data: {name: text, path: text.txt}
model: {name: decoder, width: 16, layers: 1, heads: 2, max_length: 8, group_size: 32,
    float_parts: [head, norms]}
optimizer: OPTIMIZER
checkpoint: {every: 1000, keep: 2}
phases: [{name: standard, steps: 6, batch_size: 2, block_size: 8, log_every: 2, eval_every: 0}]
"""
PURE = "model.float_parts=[]"
SIGN_VOTES = "{name: sign_votes, accum_threshold: 2}"
SPLIT = f"{{name: split, ternary: {SIGN_VOTES}, float: {{name: adamw}}}}"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be or not to be, that is the question. " * 40)


def train(optimizer: str, *arguments: str) -> int:
    Path("drawn.yaml").write_text(CONFIG.replace("OPTIMIZER", optimizer))
    return main(["train", "drawn.yaml", "--run-dir", "run", *arguments])


def steps(run: str = "run") -> list[dict[str, Any]]:
    records = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["event"] == "train"]


@pytest.mark.parametrize(
    ("inner", "overrides"),
    [("{name: signgsd, votes: {accum_threshold: 2}}", []), (SPLIT, []), (SIGN_VOTES, [PURE])],
    ids=["signgsd", "sign_votes in split", "sign_votes"],
)
def test_wrapper_statistics_reach_screen_metrics_and_figure(
    inner: str, overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer = f"{{name: gqc.gnts, threshold: 0.5, max_batch_draws: 5, inner: {inner}}}"
    assert train(optimizer, *(part for override in overrides for part in ("-o", override))) == 0
    shown = capsys.readouterr().err
    assert "norm_threshold 0.5" in shown
    assert "draws " in shown
    recorded = steps()
    assert len(recorded) == 6
    assert all(record["norm_threshold"] == 0.5 and 1 <= record["draws"] <= 5 for record in recorded)
    assert any(record["draws"] > 1 for record in recorded)
    for record in recorded:
        assert record["draws"] == 5 or record["grad_norm"] < 0.5
    assert sum(record["flips"] for record in recorded) > 0

    assert main(["plot", "run", "-o", "run/figure.svg"]) == 0
    drawn = Path("run/figure.svg").read_text()
    assert "<!-- draws per step -->" in drawn
    assert main(["plot", "run"]) == 0
    assert Path("run/loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("optimizer", "keys"),
    [
        (f"{{name: gqc.gnr, inner: {SPLIT}}}", {"target_norm"}),
        (
            f"{{name: gqc.sbc, physical_batch_size: 2, initial_logical_batch_size: 6, inner: "
            f"{SPLIT}}}",
            {"target_draws", "target_logical_batch_size", "physical_batch_size"},
        ),
        (f"{{name: gqc.mht, max_batch_draws: 4, inner: {SPLIT}}}", {"running_avg_metric"}),
        (f"{{name: gqc.gns, max_batch_draws: 4, inner: {SPLIT}}}", {"noise_multiplier"}),
    ],
    ids=["gnr", "sbc", "mht", "gns"],
)
def test_every_wrapper_trains_from_a_config(optimizer: str, keys: set[str]) -> None:
    assert train(optimizer) == 0
    assert all(keys <= set(record) for record in steps())
    if "gnr" in optimizer:
        assert main(["plot", "run", "-o", "figure.svg"]) == 0
        assert "draws per step" not in Path("figure.svg").read_text()


WRAPPERS = {
    "gnts, threshold: 0.05": GradientNormThreshold,
    "mht, error_tolerance: 0.001": MetricHypothesisTest,
    "gns, noise_multiplier: 0.01": GradientNoiseScale,
    "sbc, initial_logical_batch_size: 4": ScheduledBatch,
}
RULES = ("sign_votes", "scaled_votes")


# Each wrapper around one rule of votes; around the other one it is slow.
@pytest.mark.parametrize(
    ("name", "wrapper", "ternary"),
    [
        pytest.param(*wrapper, rule, marks=() if (i + j) % 2 == 0 else pytest.mark.slow)
        for i, wrapper in enumerate(WRAPPERS.items())
        for j, rule in enumerate(RULES)
    ],
)
def test_resume_between_two_draws_is_bitwise(
    name: str, wrapper: Any, ternary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = f"{{name: split, ternary: {ternary}, float: {{name: adamw}}}}"
    optimizer = f"{{name: gqc.{name}, max_batch_draws: 4, inner: {split}}}"
    assert train(optimizer) == 0
    Path("run").rename("whole")
    calls = []
    decide = wrapper._wants_step

    def stopped(self: Any, draw: Any) -> bool:
        calls.append(self.num_draws)
        if len(calls) == 10:
            signal.raise_signal(signal.SIGTERM)
        return bool(decide(self, draw))

    monkeypatch.setattr(wrapper, "_wants_step", stopped)
    assert train(optimizer) == 130
    assert calls[-1] == 2  # four draws per step, so that the tenth is the second of the third step
    assert train(optimizer, "--resume") == 0
    assert [record["draws"] for record in steps()] == [4] * 6
    assert Path("run/metrics.jsonl").read_bytes() == Path("whole/metrics.jsonl").read_bytes()
    ends = [sorted(Path(run, "checkpoints").glob("step-00000006*"))[0] for run in ("run", "whole")]
    for file in ("model.safetensors", "state.safetensors", "state.json"):
        assert (ends[0] / file).read_bytes() == (ends[1] / file).read_bytes()


def test_contradictions_are_found_before_building(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("{name: gqc.gnts, threshold: -1, inner: adamw}") == 2
    assert "optimizer.threshold: must be greater than 0" in capsys.readouterr().err
    assert train("{name: gqc.gnts, threshold: 1}") == 2
    assert "inner" in capsys.readouterr().err
    assert train("{name: gqc.gnts, inner: adamw}") == 2
    assert "optimizer.inner: 'adamw' cannot train ternary modules" in capsys.readouterr().err
    shutil.rmtree("run", ignore_errors=True)
    assert train(f"{{name: gqc.gnts, inner: {SPLIT}}}", "-o", "phases.0.grad_clip=1.0") == 2
    assert "clipping would act on a partial sum" in capsys.readouterr().err


WRAPPERS = [
    "gnts, threshold: 0.05",
    "sbc, initial_logical_batch_size: 3",
    "mht",
    "gns, noise_multiplier: 0.01",
]


@pytest.mark.parametrize(
    ("wrapper", "inside"), [("gnr", "float"), *product(WRAPPERS, ("ternary", "float", "both"))]
)
def test_wrapper_inside_split_resumes_between_draws(wrapper: str, inside: str) -> None:
    parts = {"ternary": "{name: scaled_votes, lr: 0.8}", "float": "adamw"}
    for part in parts if inside == "both" else [inside]:
        estimator = ", estimator: norm_variance" if "gns" in wrapper and part == "ternary" else ""
        draws = "" if "gnr" in wrapper else ", max_batch_draws: 4"
        parts[part] = f"{{name: gqc.{wrapper}{draws}{estimator}, inner: {parts[part]}}}"
    optimizer = f"{{name: split, ternary: {parts['ternary']}, float: {parts['float']}}}"
    assert train(optimizer, "-o", "checkpoint={every: 1, keep: 9}") == 0
    shutil.copytree("run", "whole")
    for later in sorted(Path("run", "checkpoints").glob("step-*"))[2:]:
        shutil.rmtree(later)
    assert train(optimizer, "-o", "checkpoint={every: 1, keep: 9}", "--resume", "auto") == 0
    for file in ("model.safetensors", "state.safetensors"):
        ends = [
            Path(run, "checkpoints", "step-00000006", file).read_bytes() for run in ("run", "whole")
        ]
        assert ends[0] == ends[1], file


def test_grad_clip_with_a_wrapper_in_split_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    optimizer = "{name: split, ternary: scaled_votes, float: {name: gqc.gnts, inner: adamw}}"
    assert train(optimizer, "-o", "phases.0.grad_clip=1.0") == 2
    assert "clipping would act on a partial sum" in capsys.readouterr().err
