"""``trainer.upcycle``, with a small teacher that a run has trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from arb_ternary.cli.main import main
from arb_ternary.config.fields import to_plain
from arb_ternary.errors import ArbError
from arb_ternary_manifests.document import read_manifest
from arb_ternary_manifests.plan import PlannedRun, plan
from arb_ternary_text.data.shakespeare import load_text

TEACHER = """
name: teacher
threads: 1
data: {name: text, path: text.txt}
model: {name: decoder, architecture: llama, width: 32, layers: 2, heads: 4, kv_heads: 2,
    feed_forward: 48, max_length: 64, activations: float,
    float_parts: [embedding, head, norms, linears]}
optimizer: {name: adamw, lr: 0.005}
phases: [{name: standard, steps: 1, batch_size: 2, block_size: 32, eval_every: 0}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, and with ``teacher``, a run."""
    folder = tmp_path_factory.mktemp("upcycle")
    (folder / "text.txt").write_text(load_text("train")[:20_000])
    (folder / "teacher.yaml").write_text(TEACHER)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "teacher.yaml", "--run-dir", "teacher"]) == 0
    return folder


@pytest.fixture(autouse=True)
def _in_folder(_here: None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def planned(runs: str, target: str = "") -> list[PlannedRun]:
    path = Path("manifest.yaml")
    path.write_text(
        f"version: 2\ntargets:\n  - name: t\n    trainer: trainer.upcycle\n{target}    runs:\n"
        + "".join(f"      - {line}\n" for line in runs.splitlines())
    )
    return plan(read_manifest(path), Path("out"), dry=False, files=lambda name: Path("out") / name)


FIRST = "{id: a, train: {phase: blockwise, teacher_ckpt: teacher, block_size: 32%s}}"
SECOND = "{id: b, train: {phase: global, block_size: 32%s}}"


@pytest.mark.parametrize(
    ("key", "value", "phase"),
    [
        ("distill_target", "attention", 0),
        ("cache_teacher_outputs", True, 0),
        ("blockwise_autotune_enabled", True, 0),
        ("kd_weight", 0.5, 1),
        ("force", True, 1),
    ],
)
def test_keys_belong_to_their_phase(key: str, value: Any, phase: int) -> None:
    text = f", {key}: {str(value).lower()}"
    runs = planned(
        f"{FIRST % (text if phase == 0 else '')}\n{SECOND % (text if phase == 1 else '')}"
    )
    assert getattr(runs[phase].config.phases[-1].options, key) == value
    name = ("blockwise", "global")[phase]
    with pytest.raises(
        ArbError, match=f"train.{key}: is of the phase {name}, and this run's phase is "
    ):
        planned(f"{FIRST % (text if phase == 1 else '')}\n{SECOND % (text if phase == 0 else '')}")


def test_keys_of_blockwise_reach_the_phase() -> None:
    keys = {
        "blockwise_autotune_mode": "active",
        "blockwise_autotune_plateau_patience": 7,
        "blockwise_autotune_lr_decay": 0.25,
        "blockwise_autotune_min_lr": 0.5,
        "blockwise_autotune_log_every": 9,
        "convergence_target": 0.5,
        "convergence_patience": 11,
        "convergence_max_steps": 13,
    }
    text = ", blockwise_autotune_enabled: true" + "".join(
        f", {key}: {value}" for key, value in keys.items()
    )
    (run,) = planned(FIRST % text)
    options = to_plain(run.config.phases[-1].options)
    assert {key: options[key] for key in keys} == keys
    # The guide's default is null; the phase's own is 2000.
    assert (
        planned(FIRST % ", convergence_target: 0.5")[0]
        .config.phases[-1]
        .options.convergence_max_steps
        is None
    )


def test_first_run_makes_the_student() -> None:
    first, second = planned(
        f"{FIRST % ', projection: {calibration_tokens: 99}, fold_rotate: {rotate: false}'}\n"
        f"{SECOND % ', export: {exporter: safetensors}, benchmark: {measure: [perplexity]}'}"
    )
    options = {phase.name: phase.options for phase in first.config.phases}
    assert list(options) == ["load_teacher", "fold_rotate", "projection", "blockwise"]
    assert (options["projection"].calibration_tokens, options["fold_rotate"].rotate) == (99, False)
    assert options["load_teacher"].teacher == str(Path("teacher").resolve())
    assert [phase.name for phase in second.config.phases] == ["global", "benchmark", "export"]
    assert second.previous == first.directory
    assert to_plain(first.config.model) == to_plain(second.config.model)


def test_student_can_train_in_the_standard_phase() -> None:
    (run,) = planned("{id: a, train: {phase: standard, teacher_ckpt: teacher, block_size: 32}}")
    assert [phase.name for phase in run.config.phases] == [
        "load_teacher",
        "fold_rotate",
        "projection",
        "standard",
    ]


def test_vote_rate_of_a_student() -> None:
    first, second = planned(f"{FIRST % ''}\n{SECOND % ', vote_rate: 0.003'}")
    rates = [run.config.optimizer.options.ternary.options.lr for run in (first, second)]
    assert rates == [0.015, 0.003]


def test_example_is_forecast_without_its_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    example = Path(__file__).parents[3] / "docs" / "examples" / "llama-dba.yaml"
    if not example.is_file():
        pytest.skip("the examples are not here")
    options = ["--target", "quick", "--dry-run", "--no-probe"]
    assert main(["run", str(example), *options]) == 0
    shown = capsys.readouterr()
    assert "is not in the hub's cache" in shown.err
    # Four blocks of 50 steps of 512 tokens.
    assert "200 steps, 102,400 tokens" in shown.out
    assert "surgery" in shown.out


@pytest.mark.parametrize(
    ("runs", "target", "message"),
    [
        (
            "{id: a, train: {phase: blockwise}}",
            "",
            "manifest.yaml:6: targets[0].runs[0].train: needs 'teacher_ckpt'",
        ),
        (
            FIRST.replace("teacher,", "nobody,") % "",
            "",
            "teacher_ckpt: nobody: there is no such file or folder",
        ),
        (
            f"{FIRST % ''}\n{SECOND % ', teacher_ckpt: text.txt'}",
            "",
            "must be that of the target's first run, teacher",
        ),
        (
            f"{FIRST % ''}\n{SECOND % ', projection: {policy: ls}'}",
            "",
            "which the target's first run does",
        ),
        (FIRST % ", surgery: {policy: fresh}", "", "the student keeps the teacher's attention"),
        (
            FIRST % "",
            "    system: {ref: system.language_model, config: {width: 64}}\n",
            "width: 64, the teacher's is 32",
        ),
        (
            FIRST % "",
            "    system: {ref: system.language_model, config: {attention: decoupled, sem_dim: 4, "
            "geo_dim: 16}}\n",
            "'rotary_dim' must be at least 'geo_dim'",
        ),
        (
            FIRST % ", lr: 0.5",
            "    system: {ref: system.language_model, config: {float_parts: []}}\n",
            "train.lr: has no effect because the model has no float parameters",
        ),
    ],
)
def test_faults_of_upcycling(runs: str, target: str, message: str) -> None:
    with pytest.raises(ArbError) as error:
        planned(runs, target)
    assert message in error.value.what
    assert "manifest.yaml:" in error.value.what
