"""``arb data prepare`` and ``arb data tokenizer``, and a run on what they make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arb_ternary.cli.main import main
from arb_ternary_text.data.memmap import open_tokens


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    path = tmp_path / "stories.jsonl"
    texts = [f"story {number}: the cat sat on the mat" for number in range(200)]
    path.write_text("".join(json.dumps({"story": text}) + "\n" for text in [*texts, texts[0]]))
    return path


def test_a_trained_tokenizer_prepares_data_for_a_run(
    stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    column = ["--column", "story"]
    options = ["--vocabulary-size", "300", "--out", str(tokenizer)]
    assert main(["data", "tokenizer", str(stories), *options, *column]) == 0
    assert capsys.readouterr().out == f"{tokenizer}: 300 ids\n"
    assert main(["data", "tokenizer", str(stories), *options, *column]) == 2
    out = tmp_path / "tokens"
    command = ["data", "prepare", str(stories), "--tokenizer", str(tokenizer), "--out", str(out)]
    assert main([*command, *column]) == 0
    table = capsys.readouterr().out.splitlines()
    assert "documents" in table[1]
    assert table[1].endswith(" 200")
    assert table[2].endswith(" 1")
    tokens = open_tokens(out / "tokens.bin", 300, dtype="uint16")
    assert (tokens == 0).sum() == 200
    config = tmp_path / "run.yaml"
    config.write_text(
        f"data: {{name: tokens, train: {out}}}\n"
        "model: {name: decoder, width: 32, layers: 1, heads: 2, feed_forward: 64}\n"
        "optimizer: scaled_votes\n"
        "phases: [{name: standard, steps: 2, batch_size: 2, block_size: 16, warmup_steps: 0}]\n"
    )
    assert main(["train", str(config), "--run-dir", str(tmp_path / "run")]) == 0


def test_a_model_names_its_tokenizer(run: Path, stories: Path, tmp_path: Path) -> None:
    command = ["data", "prepare", str(stories), "--tokenizer", str(run), "--column", "story"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out" / "tokenizer.json").read_text())
    assert written == json.loads((run / "tokenizer.json").read_text())


def test_bad_input_is_named(
    stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare = [
        "data",
        "prepare",
        str(stories),
        "--tokenizer",
        "bytes",
        "--out",
        str(tmp_path / "o"),
    ]
    assert main(prepare) == 1
    assert "it has story" in capsys.readouterr().err
    assert main([*prepare, "--separator", ""]) == 2
    tokenizer = ["data", "tokenizer", str(stories), "--out", str(tmp_path / "a.json")]
    assert main([*tokenizer, "--separator", ""]) == 2
    assert main(["data", "tokenizer", str(stories), "--out", str(tmp_path / "a.txt")]) == 2
