"""The phase ``progressive`` in whole runs, with the conformance suite."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import torch
from torch import Tensor

from arb_ternary.cli.main import main
from arb_ternary.errors import ConfigError, Interrupted
from arb_ternary_progressive.builder import ProgressiveRackBuilder
from arb_ternary_progressive.history import StackRecord
from arb_ternary_progressive.rack import Rack
from arb_ternary_progressive.stackwise import ProgressiveConfig
from arb_ternary_testing import PhaseSuite
from arb_ternary_testing.component import make_choice
from arb_ternary_text.models.generate import generate
from arb_ternary_train.checkpoint import CheckpointStore, read_checkpoint
from arb_ternary_train.config import CheckpointConfig, RunConfig
from arb_ternary_train.context import TrainingContext
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.metrics import read_metrics
from arb_ternary_train.progress import Silent
from arb_ternary_train.restore import load_run, measure
from arb_ternary_train.runner import RunRequest, train

SMALL = {"width": 32, "layers": 1, "heads": 2, "max_length": 32, "group_size": 32}
TERNARY = {"name": "decoder", **SMALL}
FLOAT = {
    "name": "decoder",
    **SMALL,
    "activations": "float",
    "float_parts": ["embedding", "head", "norms", "linears"],
}
FLOAT.pop("group_size")
STEPS = {
    "target_stacks": 3,
    "steps_per_stack": 2,
    "batch_size": 2,
    "block_size": 8,
    "eval_every": 2,
    "eval_batches": 1,
}


class TestTernary(PhaseSuite):
    component = "progressive"
    options = STEPS


class TestFloat(PhaseSuite):
    component = "progressive"
    options: ClassVar[Any] = {**STEPS, "target_stacks": 2, "cache_dtype": "int8", "lr": 0.01}
    steps = 4
    run: ClassVar[Any] = {"model": FLOAT, "optimizer": {"name": "adamw"}}


class TestQlora(PhaseSuite):
    """Adapters of both sets learn in the trunk, under ternary stacks."""

    component = "progressive"
    options: ClassVar[Any] = {
        **STEPS,
        "target_stacks": 2,
        "trunk_strategy": "qlora",
        "qlora_enabled": True,
        "qlora_rank": 2,
        "progressive_qlora": True,
        "progressive_qlora_rank": 1,
    }
    steps = 4
    run: ClassVar[Any] = {
        "optimizer": {
            "name": "split",
            "ternary": {"name": "scaled_votes"},
            "float": {"name": "adamw", "lr": 0.01},
        }
    }


class TestAtOnce(PhaseSuite):
    """All stacks are trained from the first step."""

    component = "progressive"
    options: ClassVar[Any] = {**STEPS, "enabled": False}


class TestPrependedWithTimeAsInput(PhaseSuite):
    """Stacks are built from right to left, with hidden tokens and a drawn time."""

    component = "progressive"
    options: ClassVar[Any] = {
        **STEPS,
        "target_stacks": 2,
        "building_mode": "prepend",
        "time_interpretation": "input",
        "time_embedding_dim": 8,
        "gradient_accumulation_steps": 2,
    }
    steps = 4
    run: ClassVar[Any] = {"model": {**TERNARY, "causal": False}, "masking": {"name": "time_step"}}


@pytest.mark.slow
class TestCacheOnDisk(PhaseSuite):
    """A run that was killed leaves a cache folder, which the resumed run uses."""

    component = "progressive"
    steps = 4

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        if not hasattr(type(self), "folder"):
            type(self).folder = tmp_path_factory.mktemp("cache")
        type(self).options = {**STEPS, "target_stacks": 2, "cache_folder": str(type(self).folder)}  # type: ignore[misc]

    folder: ClassVar[Path]
    options: ClassVar[Any] = {}


# --- what is trained and what is not


def run_config(folder: Path, options: dict[str, Any], every: int = 1, **parts: Any) -> RunConfig:
    text = folder / "text.txt"
    text.write_text(
        "".join(f"{n}: the quick brown fox, {n * n % 97} lazy dogs\n" for n in range(16))
    )
    chosen = {
        "data": {"name": "text", "path": str(text)},
        "model": TERNARY,
        "masking": {"name": "causal"},
        "optimizer": {"name": "scaled_votes"},
        **parts,
    }
    made = {
        kind: make_choice(kind, part["name"], _without_name(part)) for kind, part in chosen.items()
    }
    phase = make_choice(
        "phase", "progressive", {**STEPS, "eval_every": 0, "eval_batches": 8, **options}
    )
    return RunConfig(
        name="grown",
        seed=5,
        phases=(phase,),
        checkpoint=CheckpointConfig(every=every, keep=100),
        **made,
    )


def _without_name(part: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key != "name"}


def grow(folder: Path, options: dict[str, Any], every: int = 1, **parts: Any) -> RunDirectory:
    folder.mkdir(exist_ok=True)
    config = run_config(folder, options, every, **parts)
    train(config, RunRequest(directory=folder / "run", backend="torch", reporter=Silent))
    return RunDirectory(folder / "run")


def weights(run: RunDirectory, step: int) -> dict[str, Tensor]:
    return dict(read_checkpoint(run.checkpoints / f"step-{step:08d}").model)


def changed(run: RunDirectory, first: int, last: int) -> set[str]:
    """Return the names of tensors that differ between the checkpoints of two steps.

    Only tensors that both have are compared.
    """
    before = weights(run, first)
    after = weights(run, last)
    return {name for name in before if name in after and not torch.equal(before[name], after[name])}


def stack_of(name: str) -> str:
    return ".".join(name.split(".")[:2]) if name.startswith("blocks.") else name.split(".")[0]


@pytest.mark.parametrize("model", [TERNARY, FLOAT], ids=["ternary", "float"])
def test_an_appended_stack_leaves_the_trunk_bit_identical(
    tmp_path: Path, model: dict[str, Any]
) -> None:
    optimizer = {"name": "adamw"} if model is FLOAT else {"name": "scaled_votes"}
    run = grow(
        tmp_path, {"target_stacks": 2, "steps_per_stack": 3}, model=model, optimizer=optimizer
    )
    assert {stack_of(name) for name in changed(run, 1, 3)} >= {"embedding", "blocks.0", "head"}
    parts = {stack_of(name) for name in changed(run, 4, 6)}
    assert {"blocks.1", "head"} <= parts <= {"blocks.1", "head", "final_norm"}
    assert not {name for name in changed(run, 3, 6) if stack_of(name) in ("embedding", "blocks.0")}


def test_a_prepended_stack_leaves_the_trunk_bit_identical(
    tmp_path: Path,
) -> None:
    run = grow(tmp_path, {"target_stacks": 2, "steps_per_stack": 3, "building_mode": "prepend"})
    assert {stack_of(name) for name in changed(run, 4, 6)} == {"embedding", "blocks.1"}
    assert {stack_of(name) for name in changed(run, 3, 6)} == {"embedding"}
    assert [entry["id"] for entry in _structure(run)["stacks"]] == [1, 0]


def _structure(run: RunDirectory) -> dict[str, Any]:
    structure: dict[str, Any] = read_checkpoint(CheckpointStore(run.checkpoints).latest()).state[
        "structures"
    ][0]
    return structure


@pytest.mark.parametrize("building_mode", ["append", "prepend"])
def test_a_shared_table_belongs_to_the_trunk(tmp_path: Path, building_mode: str) -> None:
    model = {**TERNARY, "tie_embeddings": True}
    run = grow(tmp_path, {"target_stacks": 2, "building_mode": building_mode}, model=model)
    assert {stack_of(name) for name in changed(run, 3, 4)} == {"blocks.1"}
    assert "embedding" in {stack_of(name) for name in changed(run, 1, 2)}


def test_all_adapters_of_a_qlora_trunk_learn_and_nothing_else(tmp_path: Path) -> None:
    run = grow(
        tmp_path,
        TestQlora.options | {"steps_per_stack": 4, "eval_every": 0, "eval_batches": 8},
        optimizer=TestQlora.run["optimizer"],
    )
    trunk = {name for name in changed(run, 5, 8) if stack_of(name) == "blocks.0"}
    assert trunk
    assert all(".adapters." in name for name in trunk)
    for part in ("attention", "feed_forward"):
        for adapters in ("stack", "progressive"):
            assert any(f".{part}." in name and f".adapters.{adapters}." in name for name in trunk)
    assert "embedding" not in {stack_of(name) for name in changed(run, 4, 8)}


# --- the cache


# Three runs each. bfloat16, which the tests of the cache cover, is slow.
@pytest.mark.parametrize("model", [TERNARY, FLOAT], ids=["ternary", "float"])
@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow), "int8"]
)
def test_a_run_with_the_cache_equals_one_that_recomputes(
    tmp_path: Path, model: dict[str, Any], dtype: str
) -> None:
    optimizer = {"name": "adamw", "lr": 0.01} if model is FLOAT else {"name": "scaled_votes"}
    options = {
        "cache_dtype": dtype,
        "epochs_per_stack": 2,
        "steps_per_stack": None,
        "batch_size": 16,
    }
    # Rows of three samples, so that most are evicted before they are asked for again.
    few = {"cache_bytes": 3 * 4 * 8 * 32}
    runs = [
        grow(tmp_path / name, options | more, every=1000, model=model, optimizer=optimizer)
        for name, more in (("with", {}), ("without", {"cache_activations": False}), ("few", few))
    ]
    ends = [read_checkpoint(CheckpointStore(run.checkpoints).latest()) for run in runs]
    for other, run in zip(ends[1:], runs[1:], strict=True):
        assert all(torch.equal(ends[0].model[name], other.model[name]) for name in ends[0].model)
        assert run.metrics_file.read_bytes() == runs[0].metrics_file.read_bytes()
    log = (runs[0].path / "logs" / "train.log").read_text()
    assert "evicted" in log
    # Two shuffled epochs for each of the stacks 1 and 2: no sample is missed twice.
    asked = re.findall(r"cache: ([\d,]+) hits of ([\d,]+), ([\d,]+) samples", log)
    assert len(asked) == 2
    for found in asked:
        hits, total, samples = (int(number.replace(",", "")) for number in found)
        assert total - hits == samples == (len(train_stream(tmp_path / "with")) - 1) // 8


def train_stream(folder: Path) -> Any:
    return make_choice("data", "text", {"path": str(folder / "text.txt")}).build().train


def test_the_cache_equals_recomputing_with_sample_times(tmp_path: Path) -> None:
    options = {
        "target_stacks": 2,
        "steps_per_stack": 8,
        "batch_size": 16,
        "time_interpretation": "input",
        "time_sampling": "sample",
        "time_embedding_dim": 8,
    }
    parts = {
        "model": {**FLOAT, "causal": False},
        "optimizer": {"name": "adamw"},
        "masking": {"name": "time_step", "time_interpretation": "input", "time_sampling": "sample"},
    }
    runs = [
        grow(tmp_path / name, options | more, every=1000, **parts)
        for name, more in (("with", {}), ("without", {"cache_activations": False}))
    ]
    ends = [read_checkpoint(CheckpointStore(run.checkpoints).latest()).model for run in runs]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_an_unused_cache_is_reported(tmp_path: Path) -> None:
    run = grow(tmp_path, {"target_stacks": 2, "steps_per_stack": 1, "building_mode": "prepend"})
    log = (run.path / "logs" / "train.log").read_text()
    assert "stack 0: the activation cache" not in log
    assert "stack 1: the activation cache is not used: the new stack lies below the trunk" in log


def test_a_cache_folder_serves_a_run_with_the_same_trunk(tmp_path: Path) -> None:
    options = {"target_stacks": 2, "cache_folder": str(tmp_path / "cache")}
    asked = []
    for name in ("first", "second"):
        run = grow(tmp_path / name, options)
        ((hits, total),) = re.findall(
            r"cache: (\d+) hits of (\d+)", (run.path / "logs" / "train.log").read_text()
        )
        asked.append((int(hits), int(total)))
    assert asked == [(0, 4), (4, 4)]


# --- time

#: Of eight positions, how many are hidden at each of eight time steps: floor(8 (.15 + .1 step)).
HIDDEN = (1, 2, 2, 3, 4, 5, 6, 6)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [0, 3, 7]),
        ({"stack_time_mapping": "exponential"}, [0, 2, 7]),
        ({"stack_time_mapping": "time_per_stack", "time_per_stack": 2}, [0, 2, 4]),
        ({"building_mode": "prepend"}, [0, 3, 7]),
    ],
)
def test_each_stack_is_trained_at_its_time_step(
    tmp_path: Path, options: dict[str, Any], steps: list[int]
) -> None:
    run = grow(tmp_path, options, model={**TERNARY, "causal": False}, masking={"name": "time_step"})
    entries = [record for record in read_metrics(run.metrics_file) if record["event"] == "stack"]
    assert [entry["time_step"] for entry in entries] == steps
    assert [entry["tokens"] for entry in entries] == [2 * 2 * HIDDEN[step] for step in steps]


@pytest.mark.parametrize("sampling", ["batch", "sample"])
@pytest.mark.parametrize("mode", ["append", "prepend"])
def test_the_model_gets_the_time_of_its_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, sampling: str
) -> None:
    embed = Rack.embed
    seen = []

    def spy(self: Rack, tokens_BS: Tensor, time: float | Tensor | None = None) -> Tensor:
        assert time is not None
        steps_B = [
            int(each * 8)
            for each in torch.as_tensor(time).reshape(-1).expand(len(tokens_BS)).tolist()
        ]
        assert (tokens_BS == self.mask_token).sum(dim=1).tolist() == [
            HIDDEN[step] for step in steps_B
        ]
        seen.extend(steps_B)
        return embed(self, tokens_BS, time)

    monkeypatch.setattr(Rack, "embed", spy)
    timed = {"time_interpretation": "input", "time_sampling": sampling}
    options = {
        **timed,
        "target_stacks": 2,
        "steps_per_stack": 3,
        "gradient_accumulation_steps": 2,
        "time_embedding_dim": 8,
        "building_mode": mode,
    }
    model = {**TERNARY, "causal": False}
    masking = {"name": "time_step", **timed}
    config = run_config(tmp_path, options, 100, model=model, masking=masking)
    end = make_choice("phase", "standard", {"steps": 2, "batch_size": 2, "block_size": 8})
    config = attrs.evolve(config, phases=(*config.phases, end))
    train(config, RunRequest(directory=tmp_path / "run", backend="torch", reporter=Silent))
    measure(load_run(tmp_path / "run"))
    assert len(set(seen)) > 3


# --- results


def test_the_history_has_one_record_per_stack(
    tmp_path: Path,
) -> None:
    run = grow(
        tmp_path, {"steps_per_stack": 3, "lr": 0.001}, model=FLOAT, optimizer={"name": "adamw"}
    )
    records = read_metrics(run.metrics_file)
    entries = [StackRecord(**_fields(record)) for record in records if record["event"] == "stack"]
    assert [(entry.index, entry.stack_id, entry.position, entry.trunk) for entry in entries] == [
        (0, 0, 0, "none"),
        (1, 1, 1, "frozen"),
        (2, 2, 2, "frozen"),
    ]
    losses = [
        [record["loss"] for record in records if record.get("stack") == stack] for stack in range(3)
    ]
    for entry, found in zip(entries, losses, strict=True):
        assert (entry.steps, entry.first_loss, entry.last_loss) == (3, found[0], found[-1])
        assert entry.mean_loss == pytest.approx(sum(found) / 3)
        assert entry.tokens == 3 * 2 * 8
        assert (entry.precision, entry.blocks) == ("full", 1)


def test_rates_start_anew_with_each_stack(tmp_path: Path) -> None:
    options = {
        "target_stacks": 2,
        "steps_per_stack": 4,
        "warmup_steps": 2,
        "lr_schedule": "linear",
        "lr": 0.01,
    }
    run = grow(tmp_path, options, model=FLOAT, optimizer={"name": "adamw"})
    records = [record for record in read_metrics(run.metrics_file) if record["event"] == "train"]
    first, second = (
        [record["lr"] for record in records if record["stack"] == stack] for stack in range(2)
    )
    assert first == second
    assert first[0] < first[1] == first[2] == 0.01 > first[3]


def _fields(record: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in record.items()
        if key in {each.name for each in attrs.fields(StackRecord)}
    }


def test_a_new_stack_is_the_identity(tmp_path: Path) -> None:
    run = grow(tmp_path, {"target_stacks": 2, "steps_per_stack": 1})
    before = load_run(run.checkpoints / "step-00000001")
    builder = ProgressiveRackBuilder.from_model(
        before.model, ProgressiveConfig(new_stack_precision="ternary")
    )
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        wanted = before.model(tokens)
        builder.append_stack(n_blocks=2)
        assert torch.equal(builder.build_rack()(tokens), wanted)


def test_a_grown_run_evaluates_generates_and_trains_on(tmp_path: Path) -> None:
    run = grow(tmp_path, {"target_stacks": 2, "building_mode": "prepend", "eval_every": 100})
    trained = load_run(run.path, backend="torch")
    report = json.loads(run.result_file.read_text())
    assert measure(trained)[0].loss == report["validation_loss"]
    drawn = list(generate(trained.model, [1, 2, 3], max_new_tokens=40, temperature=0))  # type: ignore[arg-type]
    tokens = torch.tensor([[1, 2, 3, *drawn[:20]]])
    with torch.no_grad():
        likeliest = trained.model(tokens)[0].argmax(dim=-1).tolist()
    assert likeliest[2:22] == drawn[:20]
    folder = tmp_path / "more"
    folder.mkdir()
    config = run_config(folder, {"target_stacks": 2})
    more = make_choice("phase", "progressive", {**STEPS, "target_stacks": 3, "train_first": False})
    end = make_choice("phase", "standard", {"steps": 2, "batch_size": 2, "block_size": 8})
    config = attrs.evolve(config, phases=(*config.phases, more, end))
    result = train(config, RunRequest(directory=folder / "run", backend="torch", reporter=Silent))
    assert [phase["steps"] for phase in result.phases] == [4, 2, 2]
    again = RunDirectory(folder / "run")
    assert {stack_of(name) for name in changed(again, 6, 8)} >= {
        "embedding",
        "blocks.0",
        "blocks.1",
        "blocks.2",
    }
    assert measure(load_run(again.path, backend="torch"))[0].loss == result.validation_loss


@pytest.mark.parametrize("precision", ["full", "half", "bfloat16", "ternary", "qlora"])
def test_new_stacks_have_the_configured_precision(tmp_path: Path, precision: str) -> None:
    optimizer = TestQlora.run["optimizer"]
    options = {"target_stacks": 2, "new_stack_precision": precision, "steps_per_stack": 2}
    model = {**TERNARY, "float_parts": ["head"]}
    # While a float stack is trained, nothing ternary learns.
    run = grow(tmp_path, options, model=model, optimizer=optimizer)
    assert [entry["precision"] for entry in _structure(run)["stacks"]] == ["ternary", precision]
    assert "blocks.1" in {stack_of(name) for name in changed(run, 3, 4)}


# --- options


def test_stacks_trained_at_once_take_as_many_steps(
    tmp_path: Path,
) -> None:
    run = grow(tmp_path, {"enabled": False, "target_stacks": 3, "steps_per_stack": 2})
    records = read_metrics(run.metrics_file)
    (entry,) = [record for record in records if record["event"] == "stack"]
    assert (entry["index"], entry["trunk"], entry["steps"]) == (2, "none", 6)
    assert len([record for record in records if record["event"] == "train"]) == 6
    # All stacks and both ends learn from the first step.
    assert {stack_of(name) for name in changed(run, 1, 6)} >= {
        "embedding",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "head",
    }
    assert [entry["id"] for entry in _structure(run)["stacks"]] == [0, 1, 2]


def test_resuming_a_finished_run_records_no_stack_twice(
    tmp_path: Path,
) -> None:
    # Two stacks of two steps, saved after step 3 and at the end of the phase.
    run = grow(tmp_path, {"target_stacks": 2}, every=3)
    before = run.metrics_file.read_text()
    config = run_config(tmp_path, {"target_stacks": 2}, every=3)
    train(config, RunRequest(directory=run.path, resume="auto", backend="torch", reporter=Silent))
    assert run.metrics_file.read_text() == before
    assert [record["event"] for record in read_metrics(run.metrics_file)].count("stack") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_stacks": 13}, "at most 'max_stacks'; 13"),
        ({"trunk_strategy": "qlora"}, "there are none"),
        ({"new_stack_precision": "nvfp4"}, "nvfp4 cannot learn"),
        ({"stack_time_mapping": "custom"}, "needs a function"),
        ({"trunk_stratgy": "frozen"}, "trunk_strategy"),
    ],
)
def test_contradicting_options_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_choice("phase", "progressive", options)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("options", "parts", "message"),
    [
        ({"target_stacks": 1, "train_first": False}, {}, "nothing to train"),
        ({"epochs_per_stack": 1}, {}, "no effect because 'steps_per_stack' says how long"),
        (
            {"time_interpretation": "input", "time_embedding_dim": 8, "time_sampling": "sample"},
            {},
            "draws none",
        ),
        (
            {"time_interpretation": "input", "time_embedding_dim": 8, "num_time_steps": 4},
            {"masking": {"name": "time_step"}},
            "4 time steps, and masking 'time_step' hides by 8",
        ),
    ],
)
def test_what_a_run_cannot_do_names_the_option(
    tmp_path: Path, options: dict[str, Any], parts: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        grow(tmp_path, options, **parts)
    assert message in str(refused.value)
    assert "phases[0]" in str(refused.value)


def test_an_epoch_has_every_sample_once(tmp_path: Path) -> None:
    run = grow(
        tmp_path,
        {"target_stacks": 1, "epochs_per_stack": 1, "steps_per_stack": None, "batch_size": 7},
    )
    (entry,) = [record for record in read_metrics(run.metrics_file) if record["event"] == "stack"]
    assert entry["steps"] == math.ceil(((len(train_stream(tmp_path)) - 1) // 8) / 7)


def test_a_stop_during_an_evaluation_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = TestTernary()
    runs = [RunDirectory(tmp_path / name) for name in ("whole", "stopped")]
    config = suite.make_config(tmp_path, every=100)
    suite.train(config, runs[0].path)
    after_batch = TrainingContext._after_evaluated_batch

    def stopping(self: TrainingContext, done: int) -> None:
        if self.step == 4:
            self.request_stop("the test")
        after_batch(self, done)

    monkeypatch.setattr(TrainingContext, "_after_evaluated_batch", stopping)
    with pytest.raises(Interrupted, match="stopped by the test after step 4"):
        suite.train(config, runs[1].path)
    monkeypatch.undo()
    suite.train(config, runs[1].path, resume=True)
    assert runs[0].metrics_file.read_bytes() == runs[1].metrics_file.read_bytes()
    models, states = (
        [(run.checkpoints / f"step-00000006/{name}.safetensors").read_bytes() for run in runs]
        for name in ("model", "state")
    )
    assert models[0] == models[1]
    assert states[0] == states[1]


def test_a_command_option_without_a_key_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "data: shakespeare\nmodel: decoder\noptimizer: scaled_votes\nphases: [progressive]\n"
    )
    assert main(["train", str(config), "--run-dir", str(tmp_path / "run"), "--steps", "3"]) == 2
    assert "-o phases.0.steps=3: phases[0].steps: unknown key" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
