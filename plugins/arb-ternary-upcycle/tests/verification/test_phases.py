"""The phases ``verify`` and ``export``, and the checks at the end of a run, through ``train``."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary.errors import ArbError, ConfigError, Interrupted
from arb_ternary_interchange.export import export_model
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.config import RunConfig
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.report import RunReport
from arb_ternary_train.restore import load_run
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_upcycle.verification import fidelity, kv_cache

CONFIG = """
name: checked
data: {{name: text, path: {text}, tokenizer: bytes}}
model: {{name: decoder, architecture: llama, width: 32, layers: 2, heads: 4, kv_heads: 2,
    feed_forward: 64,
  max_length: 64, group_size: 32}}
optimizer: sign_votes
phases:
  - {{name: verify, checks: [{{name: fidelity, teacher: {teacher}, max_ppl_ratio: {ratio},
      batches: 1, batch_size: 2,
      block_size: 16, fail_fast: {fatal}}}]}}
{phases}
checks: [{checks}]
"""


class Runs:
    """Runs of a random ternary student with a float teacher."""

    def __init__(self, folder: Path, teacher: Path) -> None:
        self.folder = folder
        self.teacher = teacher
        (folder / "text.txt").write_text("to be or not to be, that is the question. " * 40)

    def config(
        self, phases: str = "", checks: str = "", ratio: float = 1e9, fatal: bool = True
    ) -> RunConfig:
        text = CONFIG.format(
            text=self.folder / "text.txt",
            teacher=self.teacher,
            phases=phases,
            checks=checks.replace("TEACHER", str(self.teacher)),
            ratio=ratio,
            fatal=str(fatal).lower(),
        )
        (self.folder / "run.yaml").write_text(text)
        return load_config(self.folder / "run.yaml").config

    def train(self, config: RunConfig, name: str = "run", **request: Any) -> RunReport:
        return train(
            config,
            RunRequest(directory=self.folder / name, backend="torch", reporter=Silent, **request),
        )


@pytest.fixture
def runs(tmp_path: Path, write_stage: Any, teacher: Decoder) -> Runs:
    return Runs(tmp_path, write_stage(tmp_path / "teacher", teacher).path)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_failed_check_in_verify_ends_the_run(runs: Runs) -> None:
    config = runs.config(ratio=0.01)
    with pytest.raises(ArbError, match="failed checks: fidelity") as caught:
        runs.train(config)
    assert caught.value.exit_code == 1
    assert "perplexity ratio" in caught.value.hint
    report = json.loads((runs.folder / "run" / "verify" / "fidelity.json").read_text())
    assert not report["passed"]
    with pytest.raises(ArbError, match="failed checks: fidelity"):
        runs.train(config, resume="auto")


def test_reported_failure_does_not_end_the_run(runs: Runs) -> None:
    report = runs.train(runs.config(ratio=0.01, fatal=False))
    assert report.phases[0]["checks"] == 1.0
    assert report.phases[0]["passed"] == 0.0
    # no phase has changed the model: there is nothing to evaluate
    assert report.validation_loss is None
    found = [record for record in metrics_of(runs.folder / "run") if record["event"] == "check"]
    assert [(each["check"], each["passed"], each["phase"]) for each in found] == [
        ("fidelity", False, "verify")
    ]


def test_final_checks_fail_the_run_unless_only_reported(runs: Runs) -> None:
    limits = (
        "{{name: compare, teacher: TEACHER, logits: {{max_mean_l1: 0}}, batches: 1, "
        "batch_size: 2, block_size: 16{}}}"
    )
    report = runs.train(runs.config(checks=limits.format("")), "first")
    assert report.failed_checks == ("compare",)
    report = runs.train(runs.config(checks=limits.format(", fail_fast: false")), "second")
    assert report.failed_checks == ()
    assert not report.checks[0][1].passed
    outcome = json.loads((runs.folder / "second" / "result.json").read_text())["checks"][0]
    assert (outcome["passed"], outcome["fails_run"]) == (False, False)
    assert (
        "check compare: FAILED, which is only reported: logits"
        in (runs.folder / "second" / "logs" / "train.log").read_text()
    )


def test_duplicate_report_names_are_refused(runs: Runs) -> None:
    check = "{name: fidelity, max_ppl_ratio: 9, teacher: TEACHER%s}"
    with pytest.raises(
        ConfigError, match=r"2 checks of this run write verify/fidelity.json"
    ) as caught:
        runs.config(checks=check % "")
    assert len(caught.value.faults) == 2
    runs.config(checks=check % ", label: late")
    with pytest.raises(ConfigError, match="names a file"):
        runs.config(checks=check % ", label: ../late")
    with pytest.raises(ConfigError, match="128 exceeds the context of the model"):
        runs.config(checks=check % ", label: late, block_size: 128")


def test_missing_teacher_names_its_phase(runs: Runs) -> None:
    config = runs.config(checks="{name: fidelity, label: own, max_ppl_ratio: 9}")
    with pytest.raises(ArbError, match="no complete stage") as caught:
        runs.train(config)
    assert "load_teacher" in caught.value.hint


def test_resume_between_two_checks(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    second = (
        "{name: fidelity, label: a, teacher: TEACHER, max_ppl_ratio: 1e9, batches: 1, "
        "block_size: 16}"
    )
    third = "{name: kvcache, teacher: TEACHER, min_reduction_ratio: 1}"
    phase = f"  - {{name: verify, checks: [{second}, {third}]}}"
    config = runs.config(phases=phase.replace("TEACHER", str(runs.teacher)))
    whole = runs.train(config, "whole")
    made: list[str] = []
    measure = fidelity.measure_fidelity
    keep = kv_cache.student_bytes_per_token

    def stopping(*arguments: Any) -> Any:
        made.append("fidelity")
        if len(made) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(*arguments)

    def counted(*arguments: Any) -> int:
        made.append("kvcache")
        return keep(*arguments)

    monkeypatch.setattr(fidelity, "measure_fidelity", stopping)
    monkeypatch.setattr(kv_cache, "student_bytes_per_token", counted)
    with pytest.raises(Interrupted):
        runs.train(config, "cut")
    assert made == ["fidelity", "fidelity"]
    resumed = runs.train(config, "cut", resume="auto")
    assert made == ["fidelity", "fidelity", "kvcache"]
    assert resumed.phases == whole.phases
    assert (runs.folder / "cut/metrics.jsonl").read_bytes() == (
        runs.folder / "whole/metrics.jsonl"
    ).read_bytes()


def test_export_equals_the_command(runs: Runs) -> None:
    report = runs.train(runs.config(phases="  - {name: export, exporter: safetensors}"))
    run = runs.folder / "run"
    written = (run / "export" / "model.safetensors").read_bytes()
    assert report.phases[1]["bytes"] == len(written)
    export_model(run, runs.folder / "command.safetensors", "safetensors")
    assert (runs.folder / "command.safetensors").read_bytes() == written


def test_export_takes_options_and_a_destination(runs: Runs) -> None:
    pytest.importorskip("arb_ternary_interchange.gguf")
    exporter = "{name: gguf, type: q4_0}"
    phase = f"  - {{name: export, exporter: {exporter}, destination: out/deep/tiny.gguf}}"
    runs.train(runs.config(phases=phase))
    assert (runs.folder / "run/out/deep/tiny.gguf").read_bytes().startswith(b"GGUF")


@pytest.mark.parametrize("destination", ["/tmp/x.gguf", "../x.gguf", "a/../../x", "."])
def test_export_outside_the_run_is_refused(runs: Runs, destination: str) -> None:
    with pytest.raises(ConfigError, match="a path inside the run directory"):
        runs.config(
            phases=f"  - {{name: export, exporter: safetensors, destination: '{destination}'}}"
        )


def test_phases_change_neither_weights_nor_generators(runs: Runs) -> None:
    runs.train(runs.config(), "without")
    runs.train(runs.config(phases="  - {name: export, exporter: safetensors}"), "with")
    first, second = (load_run(runs.folder / name) for name in ("without", "with"))
    for name, value in first.checkpoint.model.items():
        assert torch.equal(value, second.checkpoint.model[name])
    assert torch.equal(
        first.checkpoint.state["rng"]["torch"], second.checkpoint.state["rng"]["torch"]
    )
