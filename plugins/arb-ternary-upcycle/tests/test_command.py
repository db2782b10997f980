"""``arb upcycle`` and ``trainer.upcycle``, of a small teacher that a run of this program
trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.cli.main import main
from arb_ternary.config.fields import to_plain
from arb_ternary.errors import ArbError
from arb_ternary_text.data.shakespeare import load_text
from arb_ternary_train.loading import load_config
from arb_ternary_train.manifest.document import read_manifest
from arb_ternary_train.manifest.plan import PlannedRun, plan
from arb_ternary_train.restore import load_run

SIZES = (
    "architecture: llama, width: 32, layers: 2, heads: 4, kv_heads: 2, feed_forward: 48, "
    "max_length: 64"
)
TEACHER = f"""
name: teacher
threads: 1
data: {{name: text, path: text.txt}}
model: {{name: decoder, {SIZES}, activations: float, float_parts: [embedding, head, norms,
    linears]}}
optimizer: {{name: adamw, lr: 0.005}}
phases: [{{name: standard, steps: 40, batch_size: 8, block_size: 32, eval_every: 0}}]
"""
#: Few tokens everywhere.
SHORT = ["--blockwise-steps", "2", "--steps", "2", "--batch-size", "2", "--block-size", "32"]
TOKENS = ["calibration_tokens=256", "held_out_tokens=128"]


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
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def config(*arguments: str, out: str) -> Any:
    assert main(["upcycle", "teacher", "--out", out, "--config-only", *arguments]) == 0
    return load_config(Path(out, "config.yaml")).config


def fault(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["upcycle", *arguments]) != 0
    return capsys.readouterr().err


# --- the command


def test_a_teacher_becomes_a_ternary_student_and_the_run_resumes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokens = [part for text in TOKENS for part in ("-o", f"phases.2.{text}")]
    small = [
        "-o",
        "phases.5={name: benchmark, measure: [perplexity], batches: 1}",
        "-o",
        "threads=1",
    ]
    assert main(["upcycle", "teacher", "--out", "made", *SHORT, *tokens, *small]) == 0
    run = load_run(Path("made/run"))
    assert [phase.name for phase in run.config.phases] == [
        "load_teacher",
        "fold_rotate",
        "projection",
        "blockwise",
        "global",
        "benchmark",
    ]
    result = json.loads(Path("made/run/result.json").read_text())
    # Two blocks of two steps, and two of the whole.
    assert result["steps"] == 2 * 2 + 2
    assert result["audit"]["ternary_weights"] == 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48)
    newest = run.checkpoint.path / "model.safetensors"
    before = newest.read_bytes()
    capsys.readouterr()
    assert main(["upcycle", "teacher", "--out", "made", "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 6
    assert newest.read_bytes() == before

    assert "made: exists and is not empty" in fault(capsys, "teacher", "--out", "made")
    assert "--steps: has no effect with --resume" in fault(
        capsys, "teacher", "--out", "made", "--resume", "--steps", "3"
    )
    assert "-o: has no effect" in fault(
        capsys, "teacher", "--out", "made", "--resume", "-o", "seed=3"
    )
    assert "there is nothing to continue" in fault(
        capsys, "teacher", "--out", "nothing", "--resume"
    )


def test_presets_and_options_decide_the_config() -> None:
    quick = config(out="quick")
    paper = config("--preset", "paper", out="paper")
    for made, blockwise, steps, measured in (
        (quick, 50, 100, ("perplexity",)),
        (paper, 500, 2000, ("perplexity", "latency", "memory")),
    ):
        options = {phase.name: phase.options for phase in made.phases}
        assert (options["blockwise"].steps, options["global"].steps) == (blockwise, steps)
        assert options["benchmark"].measure == measured
        # The context of the teacher, which is less than the preset's and than the default of the
        # phase.
        assert options["global"].block_size == options["projection"].block_size == 64
        assert made.model.options.group_size == "row"
        assert made.optimizer.options.ternary.options.lr == 0.015
    chosen = config(
        "--policy",
        "ls",
        "--blockwise-steps",
        "0",
        "--steps",
        "7",
        "--batch-size",
        "3",
        "--block-size",
        "16",
        "--data",
        "text.txt",
        "--seed",
        "5",
        "--device",
        "mps",
        "-o",
        "model.vote_bits=4",
        out="chosen",
    )
    options = {phase.name: phase.options for phase in chosen.phases}
    assert list(options) == ["load_teacher", "fold_rotate", "projection", "global", "benchmark"]
    assert (options["projection"].policy, options["global"].steps) == ("ls", 7)
    assert (options["global"].batch_size, options["global"].block_size) == (3, 16)
    assert (chosen.data.options.path, chosen.seed, chosen.device) == ("text.txt", 5, "mps")
    assert chosen.model.options.vote_bits == 4


def test_decoupled_attention_keeps_the_teachers_planes(capsys: pytest.CaptureFixture[str]) -> None:
    made = config("--attention", "dba", out="dba")
    model = made.model.options
    assert (model.attention, model.sem_dim, model.geo_dim, model.rotary_dim) == (
        "decoupled",
        4,
        4,
        8,
    )
    assert "surgery" in [phase.name for phase in made.phases]
    model = config(
        "--attention", "dba", "--sem-dim", "3", "--geo-dim", "2", out="dba-small"
    ).model.options
    assert (model.sem_dim, model.geo_dim) == (3, 2)
    assert "--geo-dim 3: must be even and at most 8" in fault(
        capsys, "teacher", "--out", "no", "--attention", "dba", "--geo-dim", "3"
    )
    assert "at most 8" in fault(
        capsys, "teacher", "--out", "no", "--attention", "dba", "--geo-dim", "10"
    )
    assert "--sem-dim: has no effect without --attention dba" in fault(
        capsys, "teacher", "--out", "no", "--sem-dim", "3"
    )
    assert not Path("no").exists()


def test_what_is_wrong_leaves_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no such file or folder" in fault(capsys, "missing", "--out", "no")
    assert "unknown key" in fault(capsys, "teacher", "--out", "no", "-o", "model.widht=3")
    assert "exceeds the context of the model" in fault(
        capsys, "teacher", "--out", "no", "--block-size", "65"
    )
    assert not Path("no").exists()


def test_inspect_counts_what_would_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["upcycle", "inspect", "teacher", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    block = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48
    assert found["teacher"]["parameters"] == 2 * block + 2 * 256 * 32 + 5 * 32
    assert sum(row["weights"] for row in found["linears"]) == 2 * block
    by_name = {row["name"]: row for row in found["linears"]}
    # Two bits a trit and eight for the exponent of a row of 32; in training an accumulator of eight
    # bits for each.
    assert by_name["blocks.*.attention.query"]["bits"] == 2 + 8 / 32
    assert by_name["blocks.*.attention.query"]["training_bits"] == 10 + 16 / 32
    stages = {row["phase"]: row for row in found["stages"]}
    assert stages["load_teacher"]["disk"] == 4 * found["teacher"]["parameters"]
    sizes = {(row["sem_dim"], row["geo_dim"]): row["of_teacher"] for row in found["decoupled"]}
    assert sizes[4, 4] == 1.0  # keys of 8 features again
    assert sizes[2, 2] == (2 + 2 + 8) / 16
    assert main(["upcycle", "inspect", "teacher"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "becomes ternary",
        "blocks.*.feed_forward.down",
        "weights in memory",
        "--sem-dim",
    ):
        assert words in shown


# --- the trainer


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
def test_a_key_is_an_option_of_its_phase_and_refused_in_others(
    key: str, value: Any, phase: int
) -> None:
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


def test_keys_of_autotuning_and_convergence_reach_the_phase() -> None:
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
    # The guide's default is null, where the phase alone has 2000.
    assert (
        planned(FIRST % ", convergence_target: 0.5")[0]
        .config.phases[-1]
        .options.convergence_max_steps
        is None
    )


def test_the_first_run_makes_the_student_and_others_go_on() -> None:
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


def test_the_student_may_be_trained_as_any_other() -> None:
    (run,) = planned("{id: a, train: {phase: standard, teacher_ckpt: teacher, block_size: 32}}")
    assert [phase.name for phase in run.config.phases] == [
        "load_teacher",
        "fold_rotate",
        "projection",
        "standard",
    ]


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
def test_what_is_wrong_is_told_before_anything_is_computed(
    runs: str, target: str, message: str
) -> None:
    with pytest.raises(ArbError) as error:
        planned(runs, target)
    assert message in error.value.what
    assert "manifest.yaml:" in error.value.what
