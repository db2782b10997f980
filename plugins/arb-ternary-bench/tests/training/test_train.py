"""The training bench: what takes part, that it learns, how it is timed and compared, and the
command.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import asdict, evolve, frozen
from click.testing import CliRunner

from arb_ternary.config.loading import read_document
from arb_ternary.errors import ArbError, ConfigError, UsageProblem
from arb_ternary_bench.cli.bench import bench
from arb_ternary_bench.training import bench as bench_module
from arb_ternary_bench.training.bench import TrainBench, run_train_bench, with_ratios
from arb_ternary_bench.training.child import Trainee, TrainProcess, respond
from arb_ternary_bench.training.loop import Learner, RandomTokens
from arb_ternary_bench.training.parts import PARTS
from arb_ternary_bench.training.result import TABLE
from arb_ternary_bench.training.sizes import SIZES, TrainSize
from arb_ternary_bench.training.trainees import FLOAT_WAYS, TrainWay, chosen_ways, train_ways
from arb_ternary_train import freed_memory

TINY = evolve(SIZES["tiny"], batch=1, block=8)
EAGER = [way for way in train_ways(["torch"], compiled=False) if way.role != "qat"]
PLAIN = Path(__file__).parents[4] / "docs" / "examples" / "plain.yaml"


def test_the_demos_size_is_that_of_the_example() -> None:
    example = read_document(PLAIN).data
    config = TrainWay("torch/pure").config(SIZES["demo"])
    ours = config.model.options
    theirs = example["model"]
    assert {key: getattr(ours, key) for key in theirs if key != "name"} | {"name": "decoder"} == {
        **theirs,
        "logit_scale": 0,  # for its loss alone
    }
    phase = example["phases"][0]
    assert (SIZES["demo"].batch, SIZES["demo"].block) == (phase["batch_size"], phase["block_size"])


def test_names_say_how_a_run_trains() -> None:
    exact = TrainWay("torch/pure/int8/bfloat16").config(TINY)
    assert (
        exact.model.options.gradients,
        exact.model.options.float_parts,
        exact.optimizer.name,
    ) == (
        "int8",
        (),
        "scaled_votes",
    )
    assert (exact.backend, exact.phases[0].options.use_amp) == ("torch", True)
    mixed = TrainWay("torch").config(TINY)
    assert (mixed.model.options.gradients, mixed.model.options.float_parts) == (
        "float",
        ("embedding", "head"),
    )
    assert (mixed.optimizer.name, mixed.phases[0].options.use_amp) == ("split", False)
    assert (
        TrainWay("torch/pure/int8/all-bfloat16").config(TINY).phases[0].options.dtype == "bfloat16"
    )
    plain = TrainWay("float32/compiled").config(TINY)
    assert (plain.optimizer.name, plain.phases[0].options.compile_model) == ("adamw", True)
    assert plain.model.options.activations == "float"
    assert plain.phases[0].options.grad_clip is None  # as the standard phase is by default


def test_all_ways_are_listed_once_and_chosen_by_patterns() -> None:
    names = [way.name for way in train_ways(["a", "b"])]
    assert len(set(names)) == len(names) == 2 * 10 + len(FLOAT_WAYS)
    assert [way.name for way in train_ways([], compiled=False)] == [
        "qat",
        "qat/bfloat16",
        "float32",
        "bfloat16",
    ]
    ways = chosen_ways(train_ways(["a"]), ["float32*", "a/pure/int8"])
    assert [way.name for way in ways] == ["a/pure/int8", "float32", "float32/compiled"]
    with pytest.raises(
        UsageProblem, match="'flaot32' matches no way of training; did you mean 'float32'"
    ):
        chosen_ways(train_ways(["a"]), ["flaot32"])


@pytest.mark.parametrize("way", EAGER, ids=lambda way: way.name)
def test_every_way_learns_with_the_same_number_of_weights(way: TrainWay) -> None:
    learner = Learner(way, TINY)
    losses = learner.check()
    assert losses[-1] < losses[0]
    facts = learner.facts()
    # 4 of attention, 3 of feed-forward, embedding and head.
    assert facts["parameters"] == 4 * 32 * 32 + 3 * 32 * 64 + 2 * 64 * 32 == TINY.weights()
    assert facts["pure"] == ("pure" in way.name)
    if way.role == "float":
        # w, g, m, v
        assert facts["state_bytes"] / facts["parameters"] == pytest.approx(16.0, abs=0.01)


def test_a_way_that_does_not_learn_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(TrainWay("float32"), TINY)
    monkeypatch.setattr(Learner, "step", lambda self: 4.0)
    with pytest.raises(
        ArbError, match=r"float32: the loss of one batch went from 4\.0000 to 4\.0000 in 24 steps"
    ):
        learner.check()
    falling = iter([5.0, 4.0, 3.0])
    monkeypatch.setattr(Learner, "step", lambda self: next(falling))
    with pytest.raises(ArbError, match="float32: 3 steps left every weight and vote as it was"):
        learner.check()


def test_random_tokens_are_the_same_in_every_step() -> None:
    config = TrainWay("float32").config(TINY)
    source = RandomTokens(TINY.vocabulary)
    learner = Learner(TrainWay("float32"), TINY)
    first = next(learner.loop.batches)
    second = next(learner.loop.batches)
    assert first.data.equal(second.data)
    assert first.data.shape == (
        config.phases[0].options.batch_size,
        config.phases[0].options.block_size + 1,
    )
    assert int(first.data.max()) < source.vocabulary_size


def asked_for(way: str, **more: Any) -> dict[str, Any]:
    return {"way": way, "size": asdict(TINY), "threads": 1, "seed": 0, "profile": False, **more}


def test_child_answers_every_request_and_reports_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    monkeypatch.setattr(freed_memory, "keep_freed_memory", lambda: kept.append("as arb train"))
    ready, *steps, end = respond(asked_for("torch/pure"), ["step\n", "step\n"])
    assert kept == ["as arb train"]
    assert ready["pure"]
    assert ready["losses"][-1] < ready["losses"][0]
    assert [set(step) for step in steps] == [{"wall", "processor"}] * 2
    assert all(step["processor"] > 0 for step in steps)
    assert end["peak_bytes"] >= ready["base_bytes"] > 0


def test_process_steps_on_request_and_reports_its_own_memory() -> None:
    with TrainProcess(Trainee(way=TrainWay("float32"), size=TINY, threads=1)) as process:
        assert process.facts["losses"][-1] < process.facts["losses"][0]
        process.step()
        assert process.last["wall"] > 0
        assert process.peak_bytes() >= process.facts["base_bytes"]


def test_a_process_that_fails_shows_its_own_message() -> None:
    @frozen(kw_only=True)
    class Deeper(TrainSize):
        depth: int = 3

    asked = Trainee(way=TrainWay("float32"), size=Deeper(**asdict(TINY)), threads=1)
    with (
        pytest.raises(ArbError, match=r"float32: its process ended with 1: .*'depth'"),
        TrainProcess(asked),
    ):
        pass


# --- the bench, with processes that are none


class Fake:
    """Stands for a process; a step takes as long as its way's name says here."""

    seconds = {"torch/int8": 0.5, "float32": 1.0, "qat/compiled": 2.0, "bfloat16": 3.0}  # noqa: RUF012
    failing: tuple[str, ...] = ()
    alive = 0
    most = 0
    started: list[str] = []  # noqa: RUF012

    def __init__(self, trainee: Trainee) -> None:
        self.trainee = trainee
        self.facts = {
            "losses": [2.0, 1.0],
            "parameters": 100,
            "pure": False,
            "state_bytes": 1600,
            "base_bytes": 10 << 20,
        }
        self.last: dict[str, float] = {}

    @classmethod
    def profiled(cls, trainee: Trainee) -> dict[str, Any]:
        parts = dict.fromkeys(PARTS, 0.05)
        return {"total": 0.4, "parts": parts, "longest": [], "events": 3}

    def __enter__(self) -> Fake:
        if self.trainee.way.name in self.failing:
            raise ArbError(f"{self.trainee.way.name}: its process ended with 1: no compiler here")
        type(self).started = [*self.started, self.trainee.way.name]
        type(self).alive += 1
        type(self).most = max(self.most, self.alive)
        return self

    def __exit__(self, *_: object) -> None:
        type(self).alive -= 1

    def step(self) -> None:
        seconds = self.seconds[self.trainee.way.name]
        self.last = {"wall": seconds, "processor": seconds / 2}

    def peak_bytes(self) -> int:
        return 30 << 20


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    def run(
        failing: tuple[str, ...] = (), available: int | None = None, **changes: Any
    ) -> dict[str, Any]:
        kind = type("Faked", (Fake,), {"failing": failing, "started": []})
        monkeypatch.setattr(bench_module, "TrainProcess", kind)
        monkeypatch.setattr(bench_module, "available_bytes", lambda: available)
        ways = tuple(TrainWay(name) for name in Fake.seconds)
        result = run_train_bench(
            TrainBench(
                **{"sizes": (TINY,), "ways": ways, "threads": (1,), "seconds": 1e-3, **changes}
            )
        )
        return {**result, "started": kind.started, "most": kind.most}

    return run


def test_rows_are_compared_with_fastest_float_and_compiled_qat(
    fake: Callable[..., dict[str, Any]],
) -> None:
    (cell,) = fake()["cells"]
    found = {row["name"]: row for row in cell["rows"]}
    assert {name: row["x_best_float"] for name, row in found.items()} == {
        "torch/int8": 2.0,
        "float32": 1.0,
        "qat/compiled": 0.5,
        "bfloat16": pytest.approx(1 / 3),
    }
    assert found["torch/int8"]["x_qat_compiled"] == 4.0
    assert found["float32"]["tokens_per_second"] == TINY.tokens
    assert found["float32"]["state_bytes_per_parameter"] == 16.0
    assert sum(found["float32"]["parts"].values()) == pytest.approx(1.0)
    # the profiled step was shorter: in proportion
    assert found["float32"]["parts"]["calls"] == pytest.approx(1 / 8)


def test_without_a_baseline_there_is_no_ratio() -> None:
    (row,) = with_ratios([{"name": "a", "role": "votes", "compiled": False, "seconds_min": 1.0}])
    assert row["x_best_float"] is row["x_qat_compiled"] is None


def test_processes_take_turns_if_memory_is_short(
    fake: Callable[..., dict[str, Any]],
) -> None:
    together = fake()
    assert together["most"] == 4
    assert together["cells"][0]["in_turns"] == "processes side by side"
    alone = fake(available=2 << 30)  # one of them fits, and what must stay free
    assert alone["most"] == 1
    assert alone["started"] == [*Fake.seconds, *Fake.seconds]
    assert alone["cells"][0]["in_turns"] == "one process at a time, 2 rounds"


def test_way_that_exceeds_memory_is_left_out_with_the_reason(
    fake: Callable[..., dict[str, Any]],
) -> None:
    result = fake(available=1 << 30)
    assert result["cells"][0]["rows"] == []
    assert {each["name"] for each in result["cells"][0]["excluded"]} == set(Fake.seconds)
    assert "it takes about 0.4 GiB, and 0.0 GiB are free" in TABLE.markdown(result)


def test_only_what_is_compiled_may_fail(fake: Callable[..., dict[str, Any]]) -> None:
    result = fake(failing=("qat/compiled",))
    (cell,) = result["cells"]
    assert [row["name"] for row in cell["rows"]] == ["torch/int8", "float32", "bfloat16"]
    assert cell["excluded"][0]["name"] == "qat/compiled"
    assert (
        "qat/compiled is left out: qat/compiled: its process ended with 1: no compiler"
        in TABLE.markdown(result)
    )
    with pytest.raises(ArbError, match="torch/int8: its process"):
        fake(failing=("torch/int8",))


def test_a_way_whose_plugin_is_missing_is_left_out(
    fake: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainWay.config

    def without_qat(way: TrainWay, size: TrainSize, seed: int = 0) -> Any:
        if way.role == "qat":
            raise ConfigError("model: there is no model 'bitnet'")
        return config(way, size, seed)

    monkeypatch.setattr(TrainWay, "config", without_qat)
    (cell,) = fake()["cells"]
    assert cell["excluded"] == [
        {"name": "qat/compiled", "reason": "model: there is no model 'bitnet'"}
    ]


def test_processor_time_is_taken_where_it_is_asked_for(fake: Callable[..., dict[str, Any]]) -> None:
    row = fake(clock="processor")["cells"][0]["rows"][0]
    assert (row["seconds_min"], row["wall_seconds_min"], row["processor_seconds_min"]) == (
        0.25,
        0.5,
        0.25,
    )


@pytest.mark.usefixtures("fake")
def test_the_command_writes_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_module, "TrainProcess", Fake)
    arguments = [
        "train",
        "--sizes",
        "tiny",
        "--backends",
        "torch",
        "--trainees",
        "torch/int8,float32",
        "--threads",
        "1",
    ]
    done = CliRunner().invoke(
        bench, [*arguments, "--seconds", "0.001", "--out", str(tmp_path), "--json"]
    )
    assert done.exit_code == 0, done.stderr or done.exception
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert (result["format"], result["version"]) == ("arb-bench-train", 1)
    assert {len(row) for row in TABLE.rows(result)} == {len(TABLE.columns)}
    assert (tmp_path / "table.md").read_text().startswith("| decoder | threads | training |")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sizes", "7b"), "'7b' is not one of demo, 512x8, 1024x12, 2048x4, tiny"),
        (("--threads", "two"), "'two' is not a number of threads"),
        (("--trainees", "nothing"), "--trainees: 'nothing' matches no way of training"),
        (("--clock", "processor"), "--clock processor: it adds up the time of all threads"),
    ],
)
def test_options_that_mean_nothing_are_refused(arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(bench, ["train", "--backends", "torch", *arguments])
    assert message in (done.stderr or str(done.exception))
    assert done.exit_code != 0
