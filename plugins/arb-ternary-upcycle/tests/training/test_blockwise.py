"""The phase ``blockwise``: one block at a time learns, and nothing else changes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from arb_ternary.errors import ConfigError, DataError, Interrupted
from arb_ternary.protocols.data import Batch, BatchRequest
from arb_ternary_text.models.attention import make_positions
from arb_ternary_text.models.block import Block
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.build import build_parts
from arb_ternary_train.checkpoint import read_checkpoint
from arb_ternary_train.schedules import scheduled_value
from arb_ternary_train.seeding import derive_seed
from arb_ternary_upcycle.teacher_module import Teacher

MODELS = ("metrics.jsonl", "checkpoints/*/model.safetensors")


def tensors(path: Path) -> dict[str, Tensor]:
    model = read_checkpoint(path).model
    return {name: model[name] for name in model}


def at_step(run: Any, step: int) -> dict[str, Tensor]:
    return tensors(run.checkpoints / f"step-{step:08d}")


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def trained(run: Any) -> list[dict[str, Any]]:
    lines = map(json.loads, run.metrics_file.read_text().splitlines())
    return [line for line in lines if line["event"] == "train"]


def batch_of(tiny: Any, number: int, size: int = 2) -> Batch:
    """Return batch ``number`` (from 0) of every block."""
    config = tiny.config()
    seed = derive_seed(config.seed, "phase 0", "order")
    batches = build_parts(config).data.batches(BatchRequest(size, 16, seed))
    for _ in range(number):
        next(batches)
    return next(batches)


def update_of_attention(model: Decoder, block: int, x: Tensor) -> Tensor:
    positions = make_positions(model.config, x, start=0, total=x.shape[1], window=None)
    update: Tensor = model.blocks[block].attention(x, positions)  # type: ignore[operator]
    return update


@pytest.mark.parametrize(("target", "part"), [("residual", ""), ("attention", "attention.")])
def test_only_the_block_in_training_changes(tiny: Any, target: str, part: str) -> None:
    run, _ = tiny.run(
        "run",
        tiny.phase("blockwise", steps=4, distill_target=target, probe_tokens=0),
        "checkpoint={every: 1, keep: 9}",
    )
    model: Any = build_parts(tiny.config()).model
    states = [dict(model.state_dict()), *(at_step(run, step) for step in range(1, 9))]
    for step in range(1, 9):
        block = (step - 1) // 4
        moved = changed(states[step - 1], states[step])
        assert moved, step
        assert all(name.startswith(f"blocks.{block}.{part}") for name in moved), step
    whole = {block: changed(states[4 * block], states[4 * block + 4]) for block in range(2)}
    for block, moved in whole.items():
        assert any(name.endswith("attention.norm.weight") for name in moved), (
            "float parts learn too"
        )
        assert {
            f"blocks.{block}.attention.{name}.votes" for name in ("query", "key", "value", "output")
        } <= moved
        assert (f"blocks.{block}.feed_forward.down.votes" in moved) == (target == "residual")
    # The first loss of either block, from the whole models.
    losses = [line["loss"] for line in trained(run)]
    tokens = batch_of(tiny, 0).data[:, :-1]
    for block in range(2):
        model.load_state_dict(states[4 * block])
        with torch.no_grad():
            mine, its = (
                each.run_blocks(each.embed(tokens), 0, block) if block else each.embed(tokens)
                for each in (model, tiny.teacher)
            )
            if target == "residual":
                mine = model.run_blocks(mine, block, block + 1)
                its = tiny.teacher.run_blocks(its, block, block + 1)
            else:
                mine = update_of_attention(model, block, mine)
                its = update_of_attention(tiny.teacher, block, its)
        assert losses[4 * block] == pytest.approx(
            np.abs(mine.numpy() - its.numpy()).mean(dtype=np.float64), rel=1e-5
        )


def test_later_blocks_do_not_run(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Block.forward
    ran = Counter[int]()

    def counted(self: Block, *arguments: Any) -> Tensor:
        ran[id(self)] += any(parameter.dtype == torch.uint8 for parameter in self.buffers())
        return forward(self, *arguments)

    monkeypatch.setattr(Block, "forward", counted)
    tiny.run("run", tiny.phase("blockwise", steps=3, probe_tokens=0))
    # Two samples per step run alone through the first block where the second learns.
    assert sorted(value for value in ran.values() if value) == [3, 3 + 2 * 3]


def test_decoupled_attention_learns_from_its_teacher(tiny: Any) -> None:
    shape: tuple[str, ...] = (
        "model.architecture=null",
        "model.activation=swiglu",
        "model.sub_norms=false",
        "model.attention=decoupled",
    )
    shape += ("model.sem_dim=2", "model.geo_dim=4", "model.rotary_dim=8")
    phase = tiny.phase("blockwise", steps=3, distill_target="attention", probe_tokens=0)
    run, _ = tiny.run("run", phase, "checkpoint={every: 3, keep: 9}", *shape)
    moved = changed(at_step(run, 3), at_step(run, 6))
    assert {
        f"blocks.1.attention.{name}.votes" for name in ("query_semantic", "key_geometric", "output")
    } <= moved
    assert all(name.startswith("blocks.1.attention.") for name in moved)


def test_everything_learns_again_after_blockwise(tiny: Any) -> None:
    first = tiny.phase("blockwise", steps=2)
    second = tiny.phase("standard", steps=2, lr=0.01)
    both = first[:-1] + ", " + second.removeprefix("phases=[")
    run, _ = tiny.run("run", both, "checkpoint={every: 1, keep: 9}")
    moved = changed(at_step(run, 4), at_step(run, 6))
    assert {
        "embedding.votes",
        "head.votes",
        "final_norm.weight",
        "blocks.0.feed_forward.down.votes",
    } <= moved


@pytest.mark.parametrize("target", ["residual", "attention"])
def test_cached_run_equals_uncached_run(
    tiny: Any,
    files_in: Callable[..., dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
    target: str,
) -> None:
    run_blocks = Teacher.run_blocks
    ran = [0]

    def counted(self: Teacher, x_BSD: Tensor, first: int, last: int) -> Tensor:
        ran[0] += last - first
        return run_blocks(self, x_BSD, first, last)

    monkeypatch.setattr(Teacher, "run_blocks", counted)
    # 12 samples are drawn for either block, and kept at four places: memory for some of them, or
    # for none.
    steps = 6
    runs = {}
    sample = 16 * 32 * 4
    for memory in (None, 12 * sample, 0) if target == "residual" else (None, 12 * sample):
        options = (
            {} if memory is None else {"cache_teacher_outputs": "true", "cache_memory": memory}
        )
        ran[0] = 0
        options |= {"distill_target": target, "probe_tokens": 0}
        phase = tiny.phase("blockwise", steps=steps, **options)
        run, _ = tiny.run(f"run-{memory}", phase, "checkpoint={every: 6, keep: 9}")
        runs[memory] = files_in(run.path, MODELS)
        # To the second block's output: through both blocks of the teacher, or only through the
        # second.
        assert ran[0] == 2 * steps * (3 if memory is None else 2), memory
        assert not list((run.path / "cache").glob("*/*"))
    assert all(files == runs[None] for files in runs.values())


def test_teacher_memory_changes_no_bit(
    tiny: Any, files_in: Callable[..., dict[str, bytes]]
) -> None:
    runs = [
        tiny.run(f"run-{n}", tiny.phase("blockwise", steps=3, teacher_memory=n))[0]
        for n in (0, 30_000, 1 << 30)
    ]
    first, *others = (files_in(run.path, MODELS) for run in runs)
    assert all(files == first for files in others)


@pytest.mark.parametrize("stop", [3, 9])
def test_resume_after_stop_is_bitwise(
    tiny: Any, files_in: Callable[..., dict[str, bytes]], stop_at: Callable[[int], None], stop: int
) -> None:
    phase = tiny.phase(
        "blockwise",
        steps=9,
        convergence_target=0.01,
        convergence_patience=5,
        convergence_max_steps=7,
        cache_teacher_outputs="true",
        cache_memory=5000,
        blockwise_autotune_enabled="true",
        blockwise_autotune_mode="active",
        blockwise_autotune_plateau_patience=2,
        gradient_accumulation_steps=2,
        eval_every=3,
        eval_batches=1,
    )
    whole, report = tiny.run("whole", phase)
    stop_at(stop)
    with pytest.raises(Interrupted):
        tiny.run("stopped", phase)
    stop_at(0)
    resumed, _ = tiny.run("stopped", phase, resume="auto")
    mine = files_in(resumed.path)
    assert {name: mine[name] for name in files_in(whole.path)} == files_in(whole.path)
    assert report.steps == 14


def test_converged_block_is_done(tiny: Any) -> None:
    near = tiny.phase("blockwise", steps=9, convergence_target=1e6)
    run, _ = tiny.run("near", near)
    assert [(line["block"], line["step"]) for line in trained(run)] == [(0, 1), (1, 2)]
    far = tiny.phase("blockwise", steps=9, convergence_target=1e-6, convergence_max_steps="null")
    assert len(trained(tiny.run("far", far)[0])) == 18
    # Rates of 0 learn nothing: the mean is lower than ever only as the batches have it.
    still = tiny.phase(
        "blockwise", convergence_target=1e-6, convergence_patience=4, convergence_max_steps=60
    )
    lines = trained(
        tiny.run("still", still, "optimizer.ternary.lr=1e-9", "optimizer.float.lr=1e-9")[0]
    )
    for block in range(2):
        losses = np.array([line["loss"] for line in lines if line["block"] == block])
        weights = 0.9 ** np.arange(len(losses))[::-1]
        means = [
            float((weights[-n:] * losses[:n]).sum() / weights[-n:].sum())
            for n in range(1, len(losses) + 1)
        ]
        lowest = means[0]
        at = 0
        for step, mean in enumerate(means):
            if mean < lowest * (1 - 1e-4):
                lowest = mean
                at = step
            assert (step - at >= 4) == (step == len(losses) - 1), (block, step)


def test_autotune_monitors_or_lowers_rates(
    tiny: Any, files_in: Callable[..., dict[str, bytes]]
) -> None:
    options = {"steps": 12, "lr": 0.01, "min_rate": 0.5}
    autotune = {"blockwise_autotune_enabled": "true", "blockwise_autotune_plateau_patience": 2}
    autotune |= {"blockwise_autotune_log_every": 5, "blockwise_autotune_min_lr": 0.004}
    off, _ = tiny.run("off", tiny.phase("blockwise", **options))
    monitor, _ = tiny.run("monitor", tiny.phase("blockwise", **options, **autotune))
    monitored = [note for note in tiny.notes if "autotune" in note]
    models = ("checkpoints/*/model.safetensors",)
    assert files_in(off.path, models) == files_in(monitor.path, models)
    assert trained(off) == trained(monitor)
    active = tiny.phase("blockwise", **options, **autotune, blockwise_autotune_mode="active")
    lowered, _ = tiny.run("active", active)
    assert any("a plateau: would lower the rates to 0.5 " in note for note in monitored)
    assert any("step 5: autotune: mean" in note for note in monitored)
    assert any("lowers the rates to 0.5 " in note for note in tiny.notes)
    # Every rate, from the decisions that the run has written down.
    events = [json.loads(line) for line in lowered.metrics_file.read_text().splitlines()]
    assert files_in(lowered.path, models) != files_in(off.path, models)
    decisions = {event["step"]: event for event in events if event["event"] == "autotune"}
    factor = 1.0
    seen = set()
    for event in events:
        if event["event"] == "train":
            step = (event["step"] - 1) % 12
            if step == 0:
                factor = 1.0
            for key, peak in (("lr", 0.01), ("rate", 0.05)):
                plain = scheduled_value(
                    "cosine", step, steps=12, warmup=0, peak=peak, floor=peak * 0.5
                )
                assert event[key] == pytest.approx(max(min(plain, 0.004), plain * factor)), event
            seen.add(factor)
            if decision := decisions.get(event["step"]):
                assert decision["applied"] is True
                assert decision["factor"] == max(factor / 2, 0.004 / 0.05)
                factor = decision["factor"]
    assert {1.0, 0.5, 0.25} <= seen


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"convergence_patience": 5}, "'convergence_target' is null"),
        ({"cache_memory": 5}, "'cache_teacher_outputs' is false"),
        ({"blockwise_autotune_min_lr": 0.1}, "'blockwise_autotune_enabled' is false"),
        ({"preserve_state": "true"}, "preserve_state"),
        ({"compile_model": "true"}, "compile_model"),
        (
            {
                "blockwise_autotune_enabled": "true",
                "blockwise_autotune_mode": "active",
                "lr_schedule": "none",
                "min_rate": 0.05,
            },
            "use constant",
        ),
    ],
)
def test_unused_options_are_refused(tiny: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny.config(tiny.phase("blockwise", **options))


def test_missing_teacher_or_other_sizes_are_refused(tiny: Any) -> None:
    with pytest.raises(DataError, match=r"no complete stage teacher or prepared[^$]*load_teacher"):
        tiny.run("none", tiny.phase("blockwise", teacher="null"))
    with pytest.raises(
        ConfigError, match="layers: 3, the teacher's is 2; width: 16, the teacher's is 32"
    ):
        tiny.run("other", tiny.phase("blockwise"), "model.layers=3", "model.width=16")


@pytest.mark.parametrize(
    "options",
    [
        {"freeze": ["head"]},
        {"rate_factors": {"embedding": 0.5}},
        {"freeze": ["blocks.0.feed_forward"], "distill_target": "attention"},
    ],
)
def test_patterns_outside_the_blocks_are_refused(tiny: Any, options: dict[str, Any]) -> None:
    [option] = set(options) - {"distill_target"}
    [pattern] = options[option]
    words = rf"phases\[0\]\.{option}: '{pattern}' has no effect"
    with pytest.raises(ConfigError, match=words) as caught:
        tiny.run("idle", tiny.phase("blockwise", **options))
    assert "blocks" in str(caught.value.hint)
    # The corrected config can be started under the same name.
    assert not (tiny.folder / "idle").exists()


def test_patterns_inside_a_block_are_accepted(tiny: Any) -> None:
    patterns = {"freeze": ["blocks.0.attention.query"], "rate_factors": {"*.down": 0.5}}
    tiny.run("frozen", tiny.phase("blockwise", steps=2, **patterns))
