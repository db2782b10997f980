"""Runs with masking: absorbing, and `arb generate` from them."""

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


def test_every_token_counts_and_the_unit_says_that_it_is_a_bound(run: Path) -> None:
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


class Ignorant(nn.Module):
    """Finds all 256 ids equally likely."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*tokens.shape, 256)


def test_an_evaluation_of_a_model_that_knows_nothing_is_the_logarithm_of_the_ids(
    tmp_path: Path,
) -> None:
    """Each row is asked for k of S tokens, which weigh S / k: a token costs log 255 on average,
    without the mask.
    """
    config = load_config(configured(tmp_path)).config
    data = config.data.build()
    masking = config.masking.build()
    measured = evaluate(
        Ignorant(),
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
def test_a_resumed_run_ends_with_the_same_bytes(tmp_path: Path, exact: bool) -> None:
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


# --- drawing


def test_text_is_drawn_by_the_generator_for_the_masking(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = generated(capsys, run, "--seed", "1", "--max-new-tokens", "20", "--prompt", "the ")
    assert text.startswith("the ")
    shown = text.removesuffix("\n")
    assert 4 < len(shown) <= 4 + 20, "a token is a byte, and a character is one byte at least"


def test_gaps_are_filled_and_the_prompt_stays(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "the qu__k brown"
    for order in ("ancestral", "confidence"):
        text = generated(
            capsys, run, "--prompt", prompt, "--order", order, "--seed", "0", "--top-k", "3"
        )
        filled = text.removesuffix("\n").encode()
        # Two tokens of any bytes; what is no UTF-8 reads as U+FFFD.
        assert re.fullmatch(rb"the qu.+k brown", filled, re.DOTALL)


def test_the_same_seed_gives_the_same_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [generated(capsys, run, "--seed", seed, "--steps", "5") for seed in ("7", "7", "8")]
    assert texts[0] == texts[1] != texts[2]


def test_steps_are_shown_with_their_gaps(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_without_a_prompt_the_text_fills_the_context(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = load_run(run).model.max_length
    text = generated(capsys, run, "--seed", "0", "--temperature", "0", "--steps", "1")
    assert len(text.removesuffix("\n")) == seen == 32


def test_a_run_on_tokens_to_come_is_refused_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    causal = trained(tmp_path, masking="causal", causal="true", steps=1)
    assert main(["generate", str(causal), "--with", "text_diffusion"]) == 2
    said = capsys.readouterr().err
    assert "does not fill in hidden tokens" in said
    assert "masking: absorbing" in said
