from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from arb_ternary import hookimpl
from arb_ternary.backends.select import current_backend
from arb_ternary.errors import ArbError, CheckpointError, Interrupted, UsageProblem
from arb_ternary_train import build
from arb_ternary_train.checkpoint import CheckpointStore, read_checkpoint
from arb_ternary_train.loop import TrainingLoop
from arb_ternary_train.metrics import read_metrics
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train

#: One run for each thing that a resume has to carry over.
VARIANTS = {
    "split optimizer": (),
    "accumulation": ("phases.0.gradient_accumulation_steps=3", "phases.0.grad_clip=0.5"),
    "pure and exact": (
        "exact=true",
        "model.float_parts=[]",
        "optimizer={name: sign_votes, accum_threshold: 2}",
        "phases.0.lr=null",
    ),
    "streamed text": ("phases.0.preserve_state=true", "phases.0.num_workers=1"),
    "bfloat16": ("phases.0.dtype=bfloat16",),
    "autocast": ("phases.0.use_amp=true",),
    "two phases": (
        "phases=[{name: standard, steps: 3, batch_size: 2, block_size: 8},"
        " {name: standard, steps: 4, batch_size: 3, block_size: 4, lr_schedule: linear}]",
    ),
}


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the program may catch it."""


@attrs.define
class KillAt:
    """Raise at the n-th point between two effects on the disk."""

    at: int
    seen: int = 0

    def __call__(self, point: str) -> None:
        self.seen += 1
        if self.seen == self.at:
            raise Killed(point)


class KillAfterStep:
    def __init__(self, step: int) -> None:
        self.step = step

    @hookimpl
    def arb_step_end(self, step: int) -> None:
        if step == self.step:
            raise Killed(f"after step {step}")


def observe(monkeypatch: pytest.MonkeyPatch, **observers: object) -> None:
    monkeypatch.setattr(build, "build_observers", lambda config: build.RunObservers(observers))


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_resume_after_kill_is_bitwise(
    tiny: Any, files_in: Any, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    whole, _ = tiny.run("whole", *overrides)
    for step in (1, 5):
        observe(monkeypatch, killer=KillAfterStep(step))
        with pytest.raises(Killed):
            tiny.run(f"killed{step}", *overrides)
        monkeypatch.undo()
        resumed, _ = tiny.run(f"killed{step}", *overrides, resume="auto")
        assert files_in(resumed.path) == files_in(whole.path)


def test_resume_after_kill_within_a_checkpoint_is_bitwise(tiny: Any, files_in: Any) -> None:
    counter = KillAt(0)
    whole, _ = tiny.run("whole", faults=counter)
    # three checkpoints of nine points each; the last one removes the first
    assert counter.seen == 28
    for at in (1, *range(19, 29)):
        with pytest.raises(Killed):
            tiny.run(f"killed{at}", faults=KillAt(at))
        resumed, _ = tiny.run(f"killed{at}", resume="auto")
        assert files_in(resumed.path) == files_in(whole.path), at


def test_signal_saves_mid_step_and_resume_continues(
    tiny: Any, files_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("phases.0.gradient_accumulation_steps=3", "checkpoint.every=1000")
    whole, _ = tiny.run("whole", *overrides)
    trained = []
    compute_loss = TrainingLoop.compute_loss

    def interrupting(self: TrainingLoop, batch: Any, masked: Any) -> Any:
        trained.append(batch)
        if len(trained) == 8:  # the second of three for step 3
            os.kill(os.getpid(), signal.SIGTERM)
        return compute_loss(self, batch, masked)

    monkeypatch.setattr(TrainingLoop, "compute_loss", interrupting)
    with pytest.raises(Interrupted, match="SIGTERM after step 2") as stopped:
        tiny.run("stopped", *overrides)
    monkeypatch.undo()
    assert stopped.value.exit_code == 130
    assert "--resume" in stopped.value.hint
    state = read_checkpoint(tiny.folder / "stopped/checkpoints/step-00000002").state
    assert state["phase"]["loop"]["in_flight"]["accumulated"] == 2
    assert state["phase"]["loop"]["in_flight"]["gradients"]
    resumed, _ = tiny.run("stopped", *overrides, resume="auto")
    final = ("metrics.jsonl", "checkpoints/step-00000008/*")
    assert files_in(resumed.path, final) == files_in(whole.path, final)


def test_same_config_gives_the_same_bytes(tiny: Any, files_in: Any) -> None:
    first, _ = tiny.run("first")
    again, _ = tiny.run("again")
    other, _ = tiny.run("other", "seed=4")
    assert files_in(first.path) == files_in(again.path)
    assert files_in(first.path, ["metrics.jsonl"]) != files_in(other.path, ["metrics.jsonl"])


class SwitchWatcher:
    """Records after each step whether torch is deterministic."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    @hookimpl
    def arb_step_end(self, step: int) -> None:
        self.seen.append(torch.are_deterministic_algorithms_enabled())


def test_a_deterministic_run_tells_torch_so_while_it_runs(
    tiny: Any, files_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = SwitchWatcher()
    observe(monkeypatch, watcher=watcher)
    fixed, _ = tiny.run("fixed", "deterministic=true")
    assert set(watcher.seen) == {True}
    assert not torch.are_deterministic_algorithms_enabled()
    plain, _ = tiny.run("plain")
    assert not watcher.seen[-1]
    assert files_in(fixed.path, ["metrics.jsonl"]) == files_in(plain.path, ["metrics.jsonl"])


def test_evaluations_and_checkpoints_do_not_disturb_training(tiny: Any) -> None:
    often, _ = tiny.run("often", "phases.0.eval_every=1", "checkpoint.every=1")
    never, _ = tiny.run(
        "never", "phases.0.eval_every=0", "phases.0.eval_batches=8", "checkpoint.every=0"
    )
    losses = [
        [record["loss"] for record in read_metrics(run.metrics_file) if record["event"] == "train"]
        for run in (often, never)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 8


def test_run_directory_holds_all_that_a_repetition_needs(tiny: Any) -> None:
    run, report = tiny.run("run")
    record = run.record()
    assert record["seed"] == 3
    assert record["backend"] == {"name": current_backend(), "source": "default"}
    assert (
        record["versions"]["torch"] == torch.__version__
        or record["versions"]["torch"] in torch.__version__
    )
    assert json.loads(run.attachment_file("tokenizer").read_text())["kind"] == "characters"
    result = json.loads(run.result_file.read_text())
    assert result["validation_loss"] == report.validation_loss
    assert result["tokens"] == 8 * 2 * 8
    assert (run.checkpoints / "latest").read_text() == "step-00000008\n"
    assert [path.name for path in CheckpointStore(run.checkpoints).paths()] == [
        "step-00000008",
        "step-00000006",
    ]
    from arb_ternary_train.loading import load_config

    assert load_config(run.config_file).config == tiny.config()


def test_a_second_run_is_refused_in_the_same_directory(tiny: Any) -> None:
    tiny.run("run")
    with pytest.raises(UsageProblem, match="a run was started here already"):
        tiny.run("run")


def test_resume_auto_without_checkpoint_starts_anew(tiny: Any, files_in: Any) -> None:
    whole, _ = tiny.run("whole")
    fresh, _ = tiny.run("fresh", resume="auto")
    assert files_in(fresh.path) == files_in(whole.path)


def test_resuming_a_finished_run_changes_nothing(tiny: Any, files_in: Any) -> None:
    run, _ = tiny.run("run")
    before = files_in(run.path)
    _, report = tiny.run("run", resume="auto")
    assert files_in(run.path) == before
    assert report.tokens_per_second == 0.0


def test_resume_auto_skips_a_damaged_checkpoint(
    tiny: Any, files_in: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run, _ = tiny.run("run")
    whole = files_in(run.path)
    damaged = run.checkpoints / "step-00000008" / "model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    tiny.run("run", resume="auto")
    assert "step-00000008/model.safetensors: tensor" in caplog.text
    assert {
        name: data for name, data in files_in(run.path).items() if "set-aside" not in name
    } == whole
    assert [path.name for path in (run.checkpoints / "set-aside").iterdir()] == ["step-00000008-0"]


def test_resume_from_a_damaged_checkpoint_names_the_tensor(
    tiny: Any,
) -> None:
    run, _ = tiny.run("run")
    damaged = run.checkpoints / "step-00000008" / "model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"step-00000008/model\.safetensors: tensor '.*' is damaged"
    ):
        tiny.run("run", resume=damaged.parent)


def test_resume_from_an_older_checkpoint_rewinds_the_run(tiny: Any, files_in: Any) -> None:
    run, _ = tiny.run("run")
    whole = files_in(run.path)
    _, report = tiny.run("run", resume=run.checkpoints / "step-00000006")
    assert report.steps == 8
    assert {
        name: data for name, data in files_in(run.path).items() if "set-aside" not in name
    } == whole


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.width=32", "model.width: 16 there, 32 here"),
        ("phases.0.steps=9", "phases[0].steps: 8 there, 9 here"),
    ],
)
def test_checkpoint_of_another_config_names_the_setting(
    tiny: Any, override: str, named: str
) -> None:
    tiny.run("run")
    with pytest.raises(
        CheckpointError, match="belongs to another run: 1 settings differ"
    ) as refused:
        tiny.run("run", override, resume="auto")
    assert named in refused.value.hint


def test_a_checkpoint_of_other_data_is_refused(tiny: Any) -> None:
    tiny.run("run")
    text = tiny.folder / "text.txt"
    text.write_text(text.read_text().replace("question", "answered"))
    with pytest.raises(CheckpointError, match="belongs to another run"):
        tiny.run("run", resume="auto")


def test_checkpoint_options_may_change_on_resume(tiny: Any, files_in: Any) -> None:
    whole, _ = tiny.run("whole")
    run, _ = tiny.run("run")
    shutil.rmtree(run.checkpoints / "step-00000008")
    tiny.run("run", "checkpoint.keep=1", resume="auto")
    same = ("metrics.jsonl", "checkpoints/step-00000008/model.safetensors")
    assert files_in(run.path, same) == files_in(whole.path, same)
    assert [path.name for path in CheckpointStore(run.checkpoints).paths()] == ["step-00000008"]


def test_a_run_starts_from_the_weights_of_another(tiny: Any) -> None:
    first, _ = tiny.run("first")
    by_flag, _ = tiny.run(
        "by_flag", "phases.0.steps=1", "phases.0.warmup_steps=0", init_from=first.path
    )
    by_phase, _ = tiny.run(
        "by_phase",
        "phases.0.steps=1",
        "phases.0.warmup_steps=0",
        f"phases.0.init_from={first.path}",
    )
    starts = [read_metrics(run.metrics_file)[0]["loss"] for run in (by_flag, by_phase)]
    assert starts[0] == starts[1]
    assert starts[0] != read_metrics(first.metrics_file)[0]["loss"]


def test_weights_of_another_shape_are_refused_by_name(tiny: Any) -> None:
    first, _ = tiny.run("first")
    with pytest.raises(CheckpointError, match="its tensors are not those of the model") as refused:
        tiny.run("second", "model.width=32", init_from=first.path)
    assert "shape (" in refused.value.hint
    assert "the model's is (" in refused.value.hint


def test_failed_check_is_reported_and_result_written(tiny: Any) -> None:
    run, report = tiny.run("run", "checks=[pure, {name: validation_loss, max: 100.0}]")
    assert report.failed_checks == ("pure",)
    written = json.loads(run.result_file.read_text())["checks"]
    assert [(check["name"], check["passed"]) for check in written] == [
        ("pure", False),
        ("validation_loss", True),
    ]


def test_observers_keep_their_state_over_a_resume(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watcher:
        def __init__(self, stop_at: int | None) -> None:
            self.calls: list[str] = []
            self.steps = 0
            self.stop_at = stop_at

        @hookimpl
        def arb_run_start(self) -> None:
            self.calls.append("run_start")

        @hookimpl
        def arb_phase_start(self, phase: str) -> None:
            self.calls.append(f"phase_start {phase}")

        @hookimpl
        def arb_step_end(self, context: Any, step: int, metrics: Any) -> None:
            self.steps += 1
            assert metrics["tokens_per_second"] > 0
            if step == self.stop_at:
                context.request_stop("the watcher")

        @hookimpl
        def arb_checkpoint_save(self, state: dict[str, Any]) -> None:
            state["watcher"] = {"steps": self.steps}

        @hookimpl
        def arb_checkpoint_load(self, state: Any) -> None:
            self.calls.append("load")
            self.steps = state["watcher"]["steps"]

        @hookimpl
        def arb_phase_end(self, phase: str) -> None:
            self.calls.append(f"phase_end {phase}")

        @hookimpl
        def arb_run_end(self, status: str) -> None:
            self.calls.append(status)

    first = Watcher(stop_at=4)
    observe(monkeypatch, watcher=first)
    with pytest.raises(Interrupted, match="the watcher"):
        tiny.run("run")
    assert first.calls == ["run_start", "phase_start standard", "interrupted"]
    second = Watcher(stop_at=None)
    observe(monkeypatch, watcher=second)
    tiny.run("run", resume="auto")
    assert second.calls == [
        "run_start",
        "load",
        "phase_start standard",
        "phase_end standard",
        "finished",
    ]
    assert second.steps == 8


def test_two_processes_cannot_train_in_one_directory(tiny: Any) -> None:
    run, _ = tiny.run("run")
    with run.locked(), pytest.raises(UsageProblem, match="another process is training"):
        tiny.run("run", resume="auto")


def test_a_component_that_lacks_part_of_its_protocol_is_named(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from arb_ternary_text.data import masking

    monkeypatch.setattr(masking, "build_causal", lambda config: object())
    with pytest.raises(
        ArbError,
        match=r"masking 'causal': object does not keep the protocol MaskingStrategy.*apply",
    ):
        tiny.run("run")


def test_default_directory_is_unique_and_resume_is_newest(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = [train(tiny.config(), RunRequest(reporter=Silent)).directory for _ in range(2)]
    assert made == [str(Path("runs/tiny")), str(Path("runs/tiny-2"))]
    assert train(tiny.config(), RunRequest(reporter=Silent, resume="auto")).directory == str(
        Path("runs/tiny-2")
    )


def test_versions_of_a_run_list_only_what_takes_part(tiny: Any) -> None:
    versions = build.versions_of(tiny.config(), "torch")
    ours = {"arb-ternary-core", "arb-ternary-train", "arb-ternary-text", "arb-ternary-votes"}
    assert set(versions) == {"python", "torch", "numpy"} | ours


def test_resume_and_init_from_exclude_each_other(tiny: Any) -> None:
    with pytest.raises(UsageProblem, match="--init-from"):
        tiny.run("run", resume="auto", init_from=tiny.folder)


def test_a_path_that_is_no_run_is_refused(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint folder"):
        tiny.run("run", resume=tmp_path / "nowhere")
