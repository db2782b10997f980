"""Runs on data other than text, with their own losses, scores and generator."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

from arb_ternary.cli.main import main
from arb_ternary.plugins.manager import reset_manager
from arb_ternary.protocols.data import Batch, MaskedBatch
from arb_ternary_train.evaluate import masked_loss

PLUGIN = '''
from typing import ClassVar
import click, numpy as np, torch
from attrs import frozen
from arb_ternary import hookimpl
from arb_ternary.protocols.data import Batch, MaskedBatch
from arb_ternary.specs import DataSpec, MaskingSpec, ModelSpec
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.specs import GeneratorSpec

ARB_API_VERSION = (1, 0)

@frozen(kw_only=True)
class PointsConfig:
    sized_samples: ClassVar[bool] = True

class Points:
    """Points labelled with the sum of their coordinates; held-out batches have 5 and 3 points."""
    name, vocabulary_size, predictions_per_sample, prediction_noun = "points", 2, 1, "point"
    def __init__(self, config=None):
        self.all = torch.from_numpy(np.random.default_rng(0).normal(size=(64,
            4)).astype(np.float32))
    def fingerprint(self): return "points"
    def samples_per_epoch(self, block_size): return len(self.all)
    def of(self, rows): return Batch(rows, torch.arange(len(rows)), {"labels": rows.sum(1)})
    def batches(self, request): return Stream(self, request)
    def held_out(self, batch_size, block_size, limit):
        assert block_size == 1
        yield from [self.of(self.all[:5]), self.of(self.all[5:8])][:limit]

class Stream:
    continues = False
    def __init__(self, source,
        request): self.source, self.size, self.at = source, request.batch_size, 0
    def __next__(self):
        start = self.at * self.size % 64
        self.at += 1
        return self.source.of(self.source.all[start : start + self.size])
    def state_dict(self): return {"at": self.at}
    def load_state_dict(self, state): self.at = state["at"]
    def close(self): pass

class Regression:
    loss_unit = "squared error"
    def apply(self, batch, generator, context):
        ones = torch.ones(len(batch.data), dtype=torch.bool)
        scale = torch.full((len(batch.data), 1), 0.5)
        return MaskedBatch(batch.data, batch.extras["labels"], ones, arguments={"scale": scale})
    def losses(self, output, batch): return (output[:, 0] - batch.targets) ** 2
    def scores(self, output, batch): return {"near": ((output[:,
        0] - batch.targets).abs() < 1).float()}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = TernaryLinear(4, 1)
    def forward(self, x, *, scale): return self.linear(x) * scale

def model(config, vocabulary_size): return Net()
def data(config): return Points()
def masking(config): return Regression()

@click.command()
@click.argument("run")
@click.option("--count", type=int, default=1, help="how many")
def draw(run, count): click.echo(f"{count} points from {run}")

@click.command()
@click.argument("run")
def draw_any(run): click.echo("anything")

@hookimpl
def arb_register_models(): return [ModelSpec(name="net", target=f"{__name__}:model")]
@hookimpl
def arb_register_datasets():
    return [DataSpec(name="points", target=f"{__name__}:data", config=f"{__name__}:PointsConfig")]
@hookimpl
def arb_register_masking(): return [MaskingSpec(name="regression", target=f"{__name__}:masking")]
@hookimpl
def arb_register_generators():
    return [GeneratorSpec(name="any_net", target=f"{__name__}:draw_any", models=("net",)),
            GeneratorSpec(name="points", target=f"{__name__}:draw", models=("net",),
                masking=("regression",)),
            GeneratorSpec(name="elsewhere", target=f"{__name__}:draw_any", models=("net",),
                masking=("regression",),
                          data=("another",))]
'''

CONFIG = """
name: points
plugins: [points_plugin.py]
data: points
masking: regression
model: net
optimizer: scaled_votes
backend: torch
phases: [{name: standard, steps: 6, batch_size: 8, eval_every: 2, eval_batches: null}]
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, str]]:
    """Train a run in a folder; return the folder and what was printed."""
    folder = tmp_path_factory.mktemp("points")
    (folder / "points_plugin.py").write_text(PLUGIN)
    (folder / "points.yaml").write_text(CONFIG)
    reset_manager()
    out = StringIO()
    err = StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert main(["train", str(folder / "points.yaml"), "--run-dir", str(folder / "run")]) == 0
    yield folder, out.getvalue(), err.getvalue()
    reset_manager()


@pytest.fixture
def here(trained: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained[0])
    return trained[0]


def test_a_run_reports_the_masking_s_loss_and_scores(
    here: Path, trained: tuple[Path, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, err = trained
    assert "points trained on" in out
    assert "validation loss (squared error)" in out
    assert "points/s" in err
    assert "over 8 points" in err
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    evaluations = [record for record in records if record["event"] == "validation"]
    assert [record["step"] for record in evaluations] == [2, 4, 6]
    result = json.loads(Path("run/result.json").read_text())
    assert result["validation_metrics"] == {"near": evaluations[-1]["near"]}

    assert main(["eval", "run", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert "perplexity" not in measured
    assert main(["eval", "run"]) == 0
    assert re.search(r"(?m)^points +8\b", capsys.readouterr().out)
    # Restated with numpy, from the weights of the checkpoint.
    from arb_ternary_train.restore import load_run

    run = load_run(Path("run"))
    points = run.config.data.build()
    weight = run.model.linear.dense_weight().numpy()[0]
    x = points.all[:8].numpy()
    scale = abs(x).max(1, keepdims=True) / 127
    error = (x / scale).round() * scale @ weight * 0.5 - x.sum(1)
    assert measured["validation_loss"] == pytest.approx(float((error**2).mean()), rel=1e-4)
    assert measured["near"] == pytest.approx(float((abs(error) < 1).mean()))
    assert result["validation_loss"] == measured["validation_loss"]


def test_what_evaluations_report_can_be_drawn(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", "run", "--metric", "near", "-o", "near.svg"]) == 0
    assert "<!-- near -->" in Path("near.svg").read_text()
    assert main(["plot", "run", "-o", "loss.svg"]) == 0
    assert "<!-- loss, squared error -->" in Path("loss.svg").read_text()
    capsys.readouterr()
    assert main(["plot", "run", "--metric", "accuracy"]) == 1
    assert "near" in capsys.readouterr().err


def test_a_block_size_that_means_nothing_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "points.yaml", "--run-dir", "other", "-o", "phases.0.block_size=7"]) == 2
    assert "the samples of the data have a size of their own" in capsys.readouterr().err


def test_generate_hands_over_to_the_generator_that_suits_best(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--count", "3", "run"]) == 0
    assert capsys.readouterr().out == "3 points from run\n"
    assert main(["generate", "run", "--with", "any_net"]) == 0
    assert capsys.readouterr().out == "anything\n"
    assert main(["generate", "run", "--help"]) == 0
    assert "how many" in capsys.readouterr().out
    assert main(["generate", "--help"]) == 0
    told = capsys.readouterr().out
    assert "how many" not in told
    assert "any_net" in told
    assert main(["generate", "run", "--with", "any_nett"]) == 2
    assert "any_net" in capsys.readouterr().err
    assert main(["generate", "run", "--with"]) == 2
    assert "points" in capsys.readouterr().err
    assert main(["generate", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert main(["generate", "run", "--nonsense"]) == 2
    assert "--nonsense" in capsys.readouterr().err


def test_a_batch_takes_its_arguments_to_the_device() -> None:
    made = MaskedBatch(
        torch.zeros(2, 1),
        torch.zeros(2),
        torch.ones(2, dtype=torch.bool),
        arguments={"a": torch.ones(2)},
    )
    assert made.to(torch.device("meta")).arguments["a"].device.type == "meta"


def test_the_mean_loss_is_over_predictions_that_count() -> None:
    class Judge:
        loss_unit = "points"

        def apply(self, batch: Batch, generator: torch.Generator, context: object) -> MaskedBatch:
            raise NotImplementedError

        def losses(self, output: torch.Tensor, batch: MaskedBatch) -> torch.Tensor:
            return output[:, 0]

    batch = MaskedBatch(torch.zeros(3, 1), torch.zeros(3), torch.tensor([True, False, True]))
    assert float(masked_loss(torch.tensor([[1.0], [9.0], [4.0]]), batch, Judge())) == 2.5
