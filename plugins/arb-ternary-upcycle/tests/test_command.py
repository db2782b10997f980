"""``arb upcycle`` with a small teacher that a run of this program has trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.cli.main import main
from arb_ternary_text.data.shakespeare import load_text
from arb_ternary_train.loading import load_config
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
    """Make a folder with a text, and with the run ``teacher``."""
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


def test_command_upcycles_and_resumes(
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


def test_config_from_presets_and_options() -> None:
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


def test_command_with_decoupled_attention(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_command_faults_leave_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no such file or folder" in fault(capsys, "missing", "--out", "no")
    assert "unknown key" in fault(capsys, "teacher", "--out", "no", "-o", "model.widht=3")
    assert "exceeds the context of the model" in fault(
        capsys, "teacher", "--out", "no", "--block-size", "65"
    )
    assert not Path("no").exists()


def test_inspect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["upcycle", "inspect", "teacher", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    block = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48
    assert found["teacher"]["parameters"] == 2 * block + 2 * 256 * 32 + 5 * 32
    assert sum(row["weights"] for row in found["linears"]) == 2 * block
    by_name = {row["name"]: row for row in found["linears"]}
    # Two bits per trit and eight for the exponent of a row of 32; in training an accumulator of
    # eight bits for each.
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
