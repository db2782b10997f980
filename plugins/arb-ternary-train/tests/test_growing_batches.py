"""``batch_doublings``: size of micro-batches, order of the data, bitwise resume."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary.cli.main import main
from arb_ternary.errors import ConfigError
from arb_ternary.protocols.data import Batch, Batches, MaskedBatch
from arb_ternary_train.growing_batches import GrowingBatches, batches_in, joined_at
from arb_ternary_train.loop import TrainingLoop
from arb_ternary_train.metrics import read_metrics
from arb_ternary_train.protocols import ShardableBatches

SCALED = """
name: grown
data: {name: text, path: text.txt}
model: {name: decoder, width: 16, layers: 1, heads: 2, max_length: 8, group_size: 32,
    float_parts: [head, norms]}
optimizer: {name: split, ternary: {name: scaled_votes}, float: {name: adamw}}
checkpoint: {every: 1000, keep: 2}
phases:
  - name: standard
    steps: 6
    batch_size: 2
    block_size: 8
    eval_every: 0
    gradient_accumulation_steps: 2
    batch_doublings: [0.5]
"""


class Numbers:
    """Batches of two samples that count up, with an extra tensor."""

    continues = False

    def __init__(self) -> None:
        self.at = 0
        self.closed = False

    def __next__(self) -> Batch:
        self.at += 1
        ids = torch.tensor([2 * self.at, 2 * self.at + 1])
        return Batch(ids.view(2, 1) * 10, ids, {"label": -ids})

    def __iter__(self) -> Iterator[Batch]:
        return self

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]

    def close(self) -> None:
        self.closed = True


def test_micro_batches_double_at_the_shares_of_the_steps() -> None:
    assert [joined_at((0.5, 0.75), step, 8) for step in range(8)] == [1, 1, 1, 1, 2, 2, 4, 4]
    assert batches_in((0.5, 0.75), 8) == 4 + 2 * 2 + 2 * 4
    # In any order; two at one place are a factor of four; and a share before the second step is one
    # of the first.
    assert [joined_at((0.7, 0.7, 0.3), step, 10) for step in range(10)] == [
        1,
        1,
        1,
        2,
        2,
        2,
        2,
        8,
        8,
        8,
    ]
    assert batches_in((0.7, 0.7, 0.3), 10) == 3 + 4 * 2 + 3 * 8
    assert [joined_at((0.1,), step, 4) for step in range(4)] == [2, 2, 2, 2]
    assert batches_in((), 7) == 7


def test_a_grown_micro_batch_is_the_next_batches_in_a_row() -> None:
    sizes = iter([1, 2, 1])
    numbers = Numbers()
    grown = GrowingBatches(numbers, lambda: next(sizes))
    assert isinstance(grown, Batches)
    # Of several ranks each draws what the others take, and drops it.
    assert not isinstance(grown, ShardableBatches)
    assert next(grown).sample_ids.tolist() == [2, 3]
    second = next(grown)
    assert second.sample_ids.tolist() == [4, 5, 6, 7]
    assert second.data.tolist() == [[40], [50], [60], [70]]
    assert second.extras["label"].tolist() == [-4, -5, -6, -7]
    state = grown.state_dict()
    assert next(grown).sample_ids.tolist() == [8, 9]
    grown.load_state_dict(state)
    assert numbers.at == 3
    grown.close()
    assert numbers.closed


def test_doublings_determine_the_tokens_of_a_run(tiny: Any) -> None:
    change = "phases.0.batch_doublings=[0.5,0.75]"
    run, report = tiny.run("run", change)
    train = [each for each in read_metrics(run.metrics_file) if each["event"] == "train"]
    # Steps of two samples of eight tokens, then of four, then of eight.
    assert [each["tokens"] for each in train] == [16, 32, 48, 64, 96, 128, 192, 256]
    assert report.steps == 8
    # Up to the first doubling nothing is other than without.
    before = [
        each for each in read_metrics(tiny.run("plain")[0].metrics_file) if each["event"] == "train"
    ]
    assert train[:4] == before[:4]
    assert train[4]["loss"] != before[4]["loss"]


def test_doubling_from_the_first_step_is_twice_the_batch_size(
    tiny: Any,
) -> None:
    grown, _ = tiny.run("grown", "phases.0.batch_doublings=[0.01]", "phases.0.eval_every=1000")
    twice, _ = tiny.run("twice", "phases.0.batch_size=4", "phases.0.eval_every=1000")
    assert grown.metrics_file.read_bytes() == twice.metrics_file.read_bytes()


def test_run_stopped_after_a_doubling_resumes_bitwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be or not to be, that is the question. " * 40)
    Path("run.yaml").write_text(SCALED)
    assert main(["train", "run.yaml", "--run-dir", "whole"]) == 0
    sizes = []
    compute_loss = TrainingLoop.compute_loss

    def stopped(self: TrainingLoop, batch: Batch, masked: MaskedBatch) -> Any:
        sizes.append(len(batch.data))
        if len(sizes) == 9:  # the first micro-batch of the fifth step
            signal.raise_signal(signal.SIGTERM)
        return compute_loss(self, batch, masked)

    monkeypatch.setattr(TrainingLoop, "compute_loss", stopped)
    assert main(["train", "run.yaml", "--run-dir", "part"]) == 130
    assert main(["train", "run.yaml", "--run-dir", "part", "--resume"]) == 0
    assert sizes == [2] * 6 + [4] * 6
    ends = [next(Path(run, "checkpoints").glob("step-00000006*")) for run in ("part", "whole")]
    for file in ("model.safetensors", "state.safetensors", "state.json"):
        assert (ends[0] / file).read_bytes() == (ends[1] / file).read_bytes()
    assert Path("part/metrics.jsonl").read_bytes() == Path("whole/metrics.jsonl").read_bytes()


@pytest.mark.parametrize("shares", ["[]", "[0.0]", "[0.5,1.0]", "[-0.5]", "0.5"])
def test_shares_outside_of_the_phase_are_refused(tiny: Any, shares: str) -> None:
    with pytest.raises(ConfigError, match="batch_doublings"):
        tiny.config(f"phases.0.batch_doublings={shares}")


def test_a_text_that_is_read_on_by_rows_refuses_growing_batches(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="batch_doublings: does not go with preserve_state"):
        tiny.config("phases.0.batch_doublings=[0.5]", "phases.0.preserve_state=true")


def test_a_rate_that_is_auto_refuses_growing_batches(tiny: Any) -> None:
    votes = "optimizer.ternary={name: scaled_votes, lr: auto}"
    with pytest.raises(
        ConfigError,
        match=r"the micro-batches of phases\[0\] grow: tokens per step",
    ):
        tiny.config("phases.0.batch_doublings=[0.5]", votes)
