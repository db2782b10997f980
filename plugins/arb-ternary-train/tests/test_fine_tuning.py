"""Fine-tuning: freezing, rate factors, and a new head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arb_ternary.config.fields import to_plain
from arb_ternary.errors import CheckpointError, ConfigError, UsageProblem
from arb_ternary_train.checkpoint import CheckpointStore, read_checkpoint
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.identity import differences
from arb_ternary_train.part_names import is_named, near
from arb_ternary_train.schedules import apply_schedule

#: One step of four micro-batches at full rates, whose votes reach the threshold of half a rate.
ONE = (
    "phases.0.steps=1",
    "phases.0.warmup_steps=0",
    "phases.0.gradient_accumulation_steps=4",
    "phases.0.eval_every=9",
)
HALF = ("phases.0.lr=0.005", "optimizer.ternary.lr=0.5")


def tensors(run: RunDirectory) -> dict[str, Tensor]:
    checkpoint = read_checkpoint(CheckpointStore(run.checkpoints).latest())
    return {name: checkpoint.model[name] for name in checkpoint.model}


def changed(
    before: dict[str, Tensor], after: dict[str, Tensor], *, learnt: bool = True
) -> set[str]:
    """Return the names of tensors that differ; ``learnt`` leaves out step counters."""
    names = {name for name in before if not torch.equal(before[name], after[name])}
    return {name for name in names if not (learnt and name.endswith("control"))}


@pytest.mark.parametrize(
    ("name", "pattern", "named"),
    [
        ("head.weight", "head", True),
        ("blocks.0.attention.query", "blocks.0", True),
        ("blocks.0.attention.query", "*.query", True),
        ("blocks.0.attention.query", "blocks.*.attention", True),
        ("blocks.10.attention.query", "blocks.1", False),
        ("header.weight", "head", False),
        ("Head.weight", "head", False),
    ],
)
def test_a_pattern_names_a_part_or_a_module_that_holds_it(
    name: str, pattern: str, named: bool
) -> None:
    assert is_named(name, [pattern]) is named
    assert is_named(name, ["nothing", pattern]) is named


def test_unknown_pattern_is_answered_with_near_names() -> None:
    names = ["embedding.weight", "blocks.0.attention.query", "head"]
    assert near("haed", names).startswith("Nearest: head.")
    assert "blocks.0.attention" in near("blocks.0.atention.*", names)
    assert near("zzz", names).startswith("Nearest: embedding, blocks, head.")


def test_what_is_frozen_keeps_its_bytes_and_its_votes(tiny: Any) -> None:
    first, _ = tiny.run("first")
    freeze = "phases.0.freeze=[head, 'blocks.0.attention*', embedding]"
    second, _ = tiny.run("second", freeze, init_from=first.path)
    before = tensors(first)
    after = tensors(second)
    frozen = {
        name for name in before if name.startswith(("head.", "blocks.0.attention.", "embedding."))
    }
    assert any(name.endswith("votes") and bool(before[name].any()) for name in frozen)
    # The seed of the run and the place in a step are set whatever learns.
    assert not {name for name in changed(before, after) if name in frozen}
    assert {name for name in changed(before, after) if name not in frozen}


def test_what_one_phase_freezes_the_next_may_train(tiny: Any) -> None:
    phases = (
        "phases=[{name: standard, steps: 3, batch_size: 2, block_size: 8, freeze: [head], "
        "rate_factors: {blocks: 2.0}},"
        " {name: standard, steps: 3, batch_size: 2, block_size: 8}]"
    )
    run, _ = tiny.run("run", phases, "checkpoint.keep=9")
    paths = sorted(CheckpointStore(run.checkpoints).paths())
    middle, end = (
        {name: c.model[name] for name in c.model}
        for c in (read_checkpoint(paths[0]), read_checkpoint(paths[-1]))
    )
    assert not middle["head.votes"].any()
    assert "head.votes" in changed(middle, end)


def test_a_resumed_run_ends_with_the_same_bytes(tiny: Any, files_in: Any) -> None:
    options = (
        "phases.0.freeze=['*.attention.query', embedding]",
        "phases.0.rate_factors={head: 0.5, 'blocks.*': 2.0, '*norm*': 0.25}",
        "checkpoint.keep=9",
    )
    whole, _ = tiny.run("whole", *options)
    run, _ = tiny.run("run", *options)
    for step in (6, 8):
        shutil.rmtree(run.checkpoints / f"step-{step:08}")
    tiny.run("run", *options, resume="auto")
    assert files_in(run.path) == files_in(whole.path)


def test_a_factor_of_everything_is_a_rate_that_is_smaller_by_it(tiny: Any, files_in: Any) -> None:
    by_factor, _ = tiny.run("by_factor", "phases.0.rate_factors={'*': 0.5}")
    by_rate, _ = tiny.run("by_rate", *HALF)
    full, _ = tiny.run("full")
    model = ("checkpoints/step-00000008/model.safetensors", "metrics.jsonl")
    assert files_in(by_factor.path, model) == files_in(by_rate.path, model)
    assert files_in(by_factor.path, model) != files_in(full.path, model)


def test_factor_acts_only_on_what_its_pattern_names(tiny: Any) -> None:
    # In the first step all three see the same gradients.
    full, half = (
        tensors(tiny.run(name, *ONE, *more)[0]) for name, more in (("full", ()), ("half", HALF))
    )
    named = "phases.0.rate_factors={head: 0.5, 'blocks.*.norm*': 0.5, embedding: 0.5}"
    some = tensors(tiny.run("some", *ONE, named)[0])
    ours = {name for name in some if name.startswith(("head.", "embedding.")) or ".norm" in name}
    assert {"head.weight", "embedding.weight"} & changed(full, half)
    assert "blocks.0.feed_forward.up.weight" in changed(full, half)
    assert not ours & changed(half, some)
    assert not (set(some) - ours) & changed(full, some)


def test_factors_of_several_patterns_all_count(tiny: Any, files_in: Any) -> None:
    once, _ = tiny.run("once", *ONE, "phases.0.rate_factors={head: 0.5}")
    twice, _ = tiny.run("twice", *ONE, "phases.0.rate_factors={'hea?': 0.25, head: 2.0}")
    model = ("checkpoints/*/model.safetensors",)
    assert files_in(once.path, model) == files_in(twice.path, model)


def test_schedule_multiplies_rates_by_the_factor() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [
        {"params": [parameters[0]]},
        {"params": [parameters[1]], "lr": 0.25, "rate_factor": 0.5},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    for step, expected in enumerate((1.0, 0.75, 0.5)):  # linear from 1 to a half
        apply_schedule(
            optimizer, "linear", step, steps=3, warmup=0, lr=1.0, min_lr=0.5, min_rate=0.0
        )
        assert [group["lr"] for group in optimizer.param_groups] == [expected, expected / 2]
    apply_schedule(optimizer, "linear", 2, steps=3, warmup=0, lr=None, min_lr=None, min_rate=0.1)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.025])


@pytest.mark.parametrize(
    ("options", "said", "hint"),
    [
        (
            ["freeze=[haed]"],
            r"phases\[0\]\.freeze: 'haed' names no part of the model",
            "Nearest: head.",
        ),
        (
            ["rate_factors={bloks: 0.5}"],
            r"phases\[0\]\.rate_factors: 'bloks' names no part",
            "Nearest: blocks, ",
        ),
        (
            ["freeze=[head]", "rate_factors={'hea*': 0.5}"],
            "everything that 'hea\\*' names is frozen",
            "Remove the",
        ),
        (
            ["freeze=['*']"],
            r"phases\[0\]\.freeze: nothing in the model can be trained; every part is frozen",
            "Leave",
        ),
    ],
)
def test_a_run_does_not_begin_with_patterns_that_do_nothing(
    tiny: Any, options: list[str], said: str, hint: str
) -> None:
    overrides = [f"phases.0.{option}" for option in options]
    with pytest.raises(ConfigError, match=said) as refused:
        tiny.run("run", *overrides)
    assert refused.value.hint.startswith(hint)
    assert not (tiny.folder / "run").exists()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("rate_factors={head: 0.0}", "what is not to learn belongs into 'freeze'"),
        ("rate_factors={head: -1.0}", "must be factors greater than 0"),
        ("rate_factors={head: .inf}", "must be factors greater than 0"),
        ("rate_factors={}", "must be factors greater than 0"),
        ("freeze=[]", "must be a list of at least one pattern"),
        ("freeze=head", "must be a list"),
        ("init_skip=[head]", r"phases\[0\]\.init_skip: has no effect because 'init_from' is null"),
    ],
)
def test_invalid_values_name_what_is_allowed(tiny: Any, option: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tiny.config(f"phases.0.{option}")


def test_checkpoint_from_before_the_options_still_fits(tiny: Any) -> None:
    now = to_plain(tiny.config(), given=False)
    before = json.loads(json.dumps(now))
    for option in ("freeze", "rate_factors", "init_skip"):
        assert before["phases"][0].pop(option) is None
    assert differences({"config": before}, {"config": now}) == []


@pytest.fixture
def letters(tiny: Any) -> Path:
    """Return text with more distinct characters, which need a larger embedding and head."""
    path: Path = tiny.folder / "letters.txt"
    path.write_text((tiny.folder / "text.txt").read_text() + "ABCDEFGHIJKLMNOPQRSTUVWXYZ" * 20)
    return path


def test_error_of_an_unfit_head_names_init_skip(tiny: Any, letters: Path) -> None:
    first, _ = tiny.run("first")
    with pytest.raises(CheckpointError) as by_flag:
        tiny.run("second", f"data.path={letters}", init_from=first.path)
    last = by_flag.value.hint.splitlines()[-1]
    assert last.startswith("Everything else fits. To start embedding and head afresh, add: ")
    assert last.endswith("--init-skip embedding --init-skip head")
    with pytest.raises(CheckpointError) as by_phase:
        tiny.run("third", f"data.path={letters}", f"phases.0.init_from={first.path}")
    assert by_phase.value.hint.endswith("add: init_skip: [embedding, head]")
    with pytest.raises(CheckpointError) as too_much:
        tiny.run("fourth", "model.width=32", init_from=first.path)
    assert "afresh" not in too_much.value.hint


def test_init_skip_starts_only_skipped_parts_afresh(tiny: Any, letters: Path) -> None:
    first, _ = tiny.run("first")
    quiet = (
        "phases.0.steps=1",
        "phases.0.warmup_steps=0",
        "phases.0.freeze=['blocks*', head, embedding]",
    )
    more = (*quiet, "model.float_parts=[norms, embedding]", f"data.path={letters}", "seed=5")
    fresh = tensors(tiny.run("fresh", *more)[0])
    skip = ("embedding", "hea[d]")
    by_flag, _ = tiny.run("by_flag", *more, init_from=first.path, init_skip=skip)
    by_phase, _ = tiny.run(
        "by_phase",
        *more,
        f"phases.0.init_from={first.path}",
        "phases.0.init_skip=[embedding, 'hea[d]']",
    )
    assert by_flag.record()["init_skip"] == ["embedding", "hea[d]"]
    assert "init_skip" not in by_phase.record()
    for run in (by_flag, by_phase):
        ours = tensors(run)
        theirs = tensors(first)
        for name, tensor in ours.items():
            if name.endswith("control") or name.startswith("final_norm"):
                continue
            source = fresh if name.startswith(("embedding", "head")) else theirs
            assert torch.equal(tensor, source[name]), name


def test_skipped_head_has_the_size_of_the_data(tiny: Any, letters: Path) -> None:
    large, _ = tiny.run("large", f"data.path={letters}")
    kept, _ = tiny.run("kept", *ONE, init_from=large.path)
    small, _ = tiny.run("small", *ONE, init_from=large.path, init_skip=("head", "embedding"))
    fresh, _ = tiny.run("fresh", *ONE)
    sizes = [run.record()["vocabulary_size"] for run in (large, kept, small, fresh)]
    assert sizes[0] == sizes[1] > sizes[2] == sizes[3]


@pytest.mark.slow
def test_a_killed_start_keeps_what_it_has_to_skip(tiny: Any, letters: Path, files_in: Any) -> None:
    first, _ = tiny.run("first")
    told = {"init_from": first.path, "init_skip": ("embedding", "head")}
    whole, _ = tiny.run("whole", f"data.path={letters}", **told)
    run, _ = tiny.run("run", f"data.path={letters}", **told)
    shutil.rmtree(run.checkpoints)
    tiny.run("run", f"data.path={letters}", resume="auto")
    model = ("checkpoints/step-00000008/model.safetensors",)
    assert files_in(run.path, model) == files_in(whole.path, model)


def test_a_skip_that_skips_nothing_is_refused(tiny: Any) -> None:
    first, _ = tiny.run("first")
    with pytest.raises(
        ConfigError, match=r"--init-skip: 'haed' names nothing in the model or in .*first"
    ) as refused:
        tiny.run("second", init_from=first.path, init_skip=("haed",))
    assert refused.value.hint.startswith("Nearest: head")
    with pytest.raises(ConfigError, match=r"phases\[0\]\.init_skip: 'haed' names nothing"):
        tiny.run("third", f"phases.0.init_from={first.path}", "phases.0.init_skip=[haed]")
    with pytest.raises(UsageProblem, match="--init-skip needs --init-from"):
        tiny.run("fourth", init_skip=("head",))
