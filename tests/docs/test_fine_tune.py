"""The commands of docs/how-to/fine-tune.md run with fewer steps, and its files are as it says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from arb_ternary_train.checkpoint import CheckpointStore, read_checkpoint
from arb_ternary_train.directory import RunDirectory

PAGE = (Path(__file__).parents[2] / "docs/how-to/fine-tune.md").read_text(encoding="utf-8")
LINES = [
    line for text in re.findall(r"```console\n(.*?)```", PAGE, re.S) for line in text.splitlines()
]


def arb(folder: Path, line: str, *more: str) -> str:
    words = [*shlex.split(line)[1:], *more]
    done = subprocess.run(
        [sys.executable, "-m", "arb_ternary", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout if done.returncode == 0 else f"FAILED {done.stderr}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of the page, and with those that its Python writes."""
    made = tmp_path_factory.mktemp("page")
    for name, text in re.findall(r'```yaml title="([^"]+)"\n(.*?)```', PAGE, re.S):
        (made / name).write_text(text)
    for code in re.findall(r"<!-- run -->\n```python\n(.*?)```", PAGE, re.S):
        subprocess.run([sys.executable, "-c", code], cwd=made, check=True)
    return made


@pytest.mark.slow
def test_a_classifier_gets_another_head(folder: Path) -> None:
    digits, parity, slow = LINES[:3]
    short = ("-o", "phases.0.steps=3", "-o", "checkpoint.every=3")
    for line in (digits, parity, slow):
        assert not (said := arb(folder, line, *short)).startswith("FAILED"), said
    tensors = []
    for name in ("digits", "parity", "slow"):
        run = RunDirectory(folder / "runs" / name)
        model = read_checkpoint(CheckpointStore(run.checkpoints).latest()).model
        tensors.append({key: model[key] for key in model})
    before, frozen, learnt = tensors
    assert [len(each["head.votes"]) for each in tensors] == [10, 2, 2]
    body = [
        key
        for key in before
        if key.startswith(("embedding", "blocks")) and not key.endswith("control")
    ]
    assert all(before[key].equal(frozen[key]) for key in body)
    assert not all(before[key].equal(learnt[key]) for key in body)


@pytest.mark.slow
def test_text_model_continues_or_says_what_to_do(folder: Path) -> None:
    (line,) = [line for line in LINES if "hamlet" in line]
    (folder / "hamlet.txt").write_text("to be or not to be, that is the question. " * 200)
    short = (
        "-o",
        "phases.0.steps=2",
        "-o",
        "phases.0.batch_size=2",
        "-o",
        "phases.0.eval_batches=1",
    )
    first = arb(folder, "arb train hamlet.yaml --run-dir runs/shakespeare", *short)
    assert not first.startswith("FAILED"), first
    again = arb(folder, line, *short)
    assert not again.startswith("FAILED"), again
    (folder / "hamlet.txt").write_text("".join(map(chr, range(0x100, 0x300))) * 20)
    larger = arb(folder, line, *short, "-o", "data.tokenizer=characters")
    assert (
        "Everything else fits. To start embedding and head afresh, add: --init-skip embedding "
        "--init-skip" in larger
    )
