"""Runs with masking: absorbing, and the generator ``text_diffusion``."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from arb_ternary.cli.main import main
from arb_ternary_train.evaluate import evaluate
from arb_ternary_train.loading import load_config
from arb_ternary_train.restore import load_run
from arb_ternary_train.runner import RunRequest, train

CONFIG = """
name: filling
data: {name: text, path: text.txt}
model: {name: decoder, width: 32, layers: 1, heads: 4, max_length: 32, causal: CAUSAL,
    group_size: row}
masking: MASKING
optimizer: {name: scaled_votes, lr: 0.3}
phases: [{name: standard, steps: STEPS, batch_size: 4, block_size: 32, eval_every: 1000}]
checkpoint: {every: 2, keep: 9}
"""


def configured(
    folder: Path,
    *,
    steps: int = 4,
    masking: str = "absorbing",
    causal: str = "false",
    more: str = "",
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 30)
    text = (
        CONFIG.replace("text.txt", str(folder / "text.txt"))
        .replace("STEPS", str(steps))
        .replace("MASKING", masking)
        .replace("CAUSAL", causal)
    )
    (folder / "config.yaml").write_text(text + more)
    return folder / "config.yaml"


def trained(folder: Path, **options: Any) -> Path:
    train(load_config(configured(folder, **options)).config, RunRequest(directory=folder / "run"))
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("filling"))


def generated(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["generate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


# --- training


def test_every_token_counts_in_a_bound(run: Path) -> None:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["tokens"] for record in records if record["event"] == "train"] == [
        4 * 32 * step for step in (1, 2, 3, 4)
    ]
    assert (
        json.loads((run / "run.json").read_text())["loss_unit"] == "nats per token, an upper bound"
    )
    assert json.loads((run / "result.json").read_text())["baselines"] == [
        "bigram_entropy",
        "unigram_entropy",
    ]


class Uniform(nn.Module):
    """Predicts all 256 ids with equal probability."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*tokens.shape, 256)


def test_evaluation_of_a_uniform_model(tmp_path: Path) -> None:
    """The k of S tokens that are hidden have the weight S / k, so a token costs log 255."""
    config = load_config(configured(tmp_path)).config
    data = config.data.build()
    masking = config.masking.build()
    measured = evaluate(
        Uniform(),
        data,
        masking,
        batch_size=4,
        block_size=16,
        batches=2,
        seed=0,
        device=torch.device("cpu"),
    )
    assert measured.tokens == 2 * 4 * 16
    assert abs(measured.loss - math.log(255)) < 1e-5


@pytest.mark.parametrize("exact", [False, True])
def test_resumed_run_is_bitwise(tmp_path: Path, exact: bool) -> None:
    more = "checks: [pure]\n" + "exact: true\n" * exact
    whole = trained(tmp_path / "whole", more=more)
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    *_, last = sorted((cut / "checkpoints").glob("[!.]*"))
    shutil.rmtree(last)
    train(
        load_config(tmp_path / "whole" / "config.yaml").config,
        RunRequest(directory=cut, resume="auto"),
    )
    assert last.exists()
    ends = [
        (folder / "checkpoints" / last.name / "model.safetensors").read_bytes()
        for folder in (whole, cut)
    ]
    assert ends[0] == ends[1]
    assert load_config(cut / "config.yaml").config.model.options.activations == "int8"


# --- generator


def test_prompt_is_continued(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = generated(capsys, run, "--seed", "1", "--max-new-tokens", "20", "--prompt", "the ")
    assert text.startswith("the ")
    shown = text.removesuffix("\n")
    assert 4 < len(shown) <= 4 + 20, "a token is a byte, and a character at least one byte"


def test_gaps_are_filled(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "the qu__k brown"
    for order in ("ancestral", "confidence"):
        text = generated(
            capsys, run, "--prompt", prompt, "--order", order, "--seed", "0", "--top-k", "3"
        )
        filled = text.removesuffix("\n").encode()
        # Two tokens of any bytes; bytes that are not UTF-8 are shown as U+FFFD.
        assert re.fullmatch(rb"the qu.+k brown", filled, re.DOTALL)


def test_same_seed_gives_the_same_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [generated(capsys, run, "--seed", seed, "--steps", "5") for seed in ("7", "7", "8")]
    assert texts[0] == texts[1] != texts[2]


def test_show_steps_prints_gaps(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = generated(
        capsys,
        run,
        "--prompt",
        "a####",
        "--gap",
        "#",
        "--steps",
        "2",
        "--order",
        "confidence",
        "--show-steps",
    )
    assert text.startswith("--- step 1, 2 to go\na")
    assert text.split("\n")[1].count("#") == 2


def test_text_without_prompt_fills_the_context(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = load_run(run).model.max_length
    text = generated(capsys, run, "--seed", "0", "--temperature", "0", "--steps", "1")
    assert len(text.removesuffix("\n")) == context == 32


def test_causal_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    causal = trained(tmp_path, masking="causal", causal="true", steps=1)
    assert main(["generate", str(causal), "--with", "text_diffusion"]) == 2
    message = capsys.readouterr().err
    assert "does not fill in hidden tokens" in message
    assert "masking: absorbing" in message
