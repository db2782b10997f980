from __future__ import annotations

from typing import Any

import pytest

from arb_ternary.errors import ConfigError
from arb_ternary_text.data.sampler import WindowSampler
from arb_ternary_train.checkpoint import CheckpointStore
from arb_ternary_train.metrics import read_metrics


def test_metrics_have_every_step_with_scheduled_rates(tiny: Any) -> None:
    run, _ = tiny.run(
        "run", "phases.0.lr_schedule=linear", "phases.0.min_lr=0.001", "phases.0.min_rate=0.5"
    )
    records = read_metrics(run.metrics_file)
    train = [record for record in records if record["event"] == "train"]
    assert [record["step"] for record in train] == list(range(1, 9))
    assert [record["tokens"] for record in train] == [16 * step for step in range(1, 9)]
    # Two steps of warm-up, then from 0.01 to 0.001 and from 1 to 0.5 in five equal parts.
    expected = [0.005, 0.01, 0.01, 0.0082, 0.0064, 0.0046, 0.0028, 0.001]
    assert [record["lr"] for record in train] == pytest.approx(expected)
    assert [record["rate"] for record in train] == pytest.approx(
        [0.5, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5]
    )
    assert all(
        set(record) >= {"loss", "flips", "exponent_moves", "grad_norm", "draws"} for record in train
    )
    evaluations = [
        (record["step"], record["phase"]) for record in records if record["event"] == "validation"
    ]
    assert evaluations == [(4, "standard"), (8, "")]


def test_training_beats_the_unigram_entropy(tiny: Any) -> None:
    _, report = tiny.run(
        "run",
        "phases.0.steps=150",
        "phases.0.batch_size=8",
        "phases.0.block_size=16",
        "phases.0.eval_every=1000",
    )
    assert report.validation_loss < report.baselines["unigram_entropy"] - 0.3
    assert report.baselines["bigram_entropy"] < report.baselines["unigram_entropy"]


def test_flips_are_reported_and_are_real(tiny: Any) -> None:
    from arb_ternary_train.checkpoint import read_checkpoint

    run, _ = tiny.run("run", "checkpoint={every: 1, keep: 100}", "phases.0.warmup_steps=0")
    store = CheckpointStore(run.checkpoints)
    weights = [read_checkpoint(path).model for path in reversed(store.paths())]
    train = [record for record in read_metrics(run.metrics_file) if record["event"] == "train"]
    from arb_ternary.ternary.encoding import decode_at_rest

    for before, after, record in zip(weights[:-1], weights[1:], train[1:], strict=True):
        flips = 0
        for name in before:
            if name.endswith(".weight") and before[name].dtype.is_floating_point is False:
                columns = before[name.removesuffix("weight") + "votes"].shape[1]
                flips += int(
                    (
                        decode_at_rest(before[name], columns, name)
                        != decode_at_rest(after[name], columns, name)
                    ).sum()
                )
        assert flips == record["flips"]
    assert sum(record["flips"] for record in train) > 0


def test_a_rate_that_is_given_twice_is_refused_with_both_places(tiny: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"phases\[0\]\.lr: .* given twice: 0\.01 here, and 0\.02 in the optimizer 'adamw'",
    ):
        tiny.run("run", "optimizer.float={name: adamw, lr: 0.02}")
    # The rate of the votes is another thing.
    tiny.run("votes", "optimizer.ternary={name: sign_votes, lr: 0.5}")


def test_optimizer_that_cannot_train_all_parts_is_refused(tiny: Any) -> None:
    with pytest.raises(
        ConfigError,
        match="optimizer: 'sign_votes' cannot train float parameters, and the model has",
    ):
        tiny.run("run", "optimizer=sign_votes")
    with pytest.raises(ConfigError, match="optimizer: 'adamw' cannot train ternary modules"):
        tiny.run("run2", "optimizer=adamw")


def test_activation_checkpointing_and_workers_change_no_bit(tiny: Any, files_in: Any) -> None:
    plain, _ = tiny.run("plain")
    other, _ = tiny.run(
        "other",
        "phases.0.activation_checkpointing=true",
        "phases.0.activation_checkpoint_threshold=1",
        "phases.0.num_workers=2",
    )
    same = ("metrics.jsonl", "checkpoints/step-00000008/model.safetensors")
    assert files_in(plain.path, same) == files_in(other.path, same)


def test_preserved_state_changes_later_losses(tiny: Any) -> None:
    options = ("phases.0.lr_schedule=none", "phases.0.warmup_steps=0")
    streamed, _ = tiny.run("streamed", *options, "phases.0.preserve_state=true")
    from arb_ternary_train import loop

    losses = [
        record["loss"]
        for record in read_metrics(streamed.metrics_file)
        if record["event"] == "train"
    ]
    original = loop.reset_runtime_state
    calls = []

    def reset(model: Any) -> None:
        calls.append(model)
        original(model)

    monkeypatch = pytest.MonkeyPatch()
    try:
        monkeypatch.setattr(WindowSampler, "continues", lambda self, cursor: False)
        monkeypatch.setattr(loop, "reset_runtime_state", reset)
        forgetful, _ = tiny.run("forgetful", *options, "phases.0.preserve_state=true")
    finally:
        monkeypatch.undo()
    other = [
        record["loss"]
        for record in read_metrics(forgetful.metrics_file)
        if record["event"] == "train"
    ]
    assert len(calls) == 8
    assert losses[0] == other[0]
    assert losses[1] != other[1]
