"""A third-party policy decides how a loop continues."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from arb_ternary.errors import ArbError, Interrupted
from arb_ternary.plugins.manager import manager, reset_manager
from arb_ternary_train.context import TrainingContext
from arb_ternary_train.identity import differences
from arb_ternary_train.loop import TrainingLoop
from arb_ternary_train.loop_state import Snapshot, copied
from arb_ternary_train.metrics import read_metrics
from arb_ternary_train.policy import Adjustment
from arb_ternary_train.step import Diverged

PLUGIN = '''
import attrs
from attrs import frozen
from arb_ternary import hookimpl
from arb_ternary.config.options import option
from arb_ternary_train.policy import Adjustment
from arb_ternary_train.loop_state import Snapshot
from arb_ternary.specs import PolicySpec

ARB_API_VERSION = (1, 0)
LOOPS = []


@hookimpl
def arb_register_policies():
    return [PolicySpec(name="together", target="policies:Together", config="policies:Options")]


@frozen(kw_only=True)
class Options:
    steps: int = option(1, "steps that are taken at once")
    trial: int = option(0, "steps that are tried and taken back before that")
    memory: bool = option(True, "where the trial's snapshot is")
    float_rate: float = option(1.0, "factor on a rate")
    ternary_rate: float = option(1.0, "factor on a rate")


class Together:
    """Takes several steps at once, after others that it takes back."""

    def __init__(self, options):
        self.options, self.asked, self.closed = options, 0, False

    def begin(self, loop):
        LOOPS.append(loop)
        loop.adjustment = Adjustment(float_rate=self.options.float_rate,
            ternary_rate=self.options.ternary_rate)

    def advance(self, loop):
        left = loop.options.steps - loop.step
        if self.options.trial:
            before = Snapshot.take(loop)
            if not self.options.memory:
                before = Snapshot.read(before.save(loop.context.directory / "snapshots"))
            # Another rule for a while: what it learns, draws and counts is to leave no trace.
            choice, adjustment = loop.optimizer_choice, loop.adjustment
            loop.adjustment = Adjustment(float_rate=3.0, ternary_rate=2.0)
            for _ in range(self.options.trial):
                loop.train_step()
            loop.use_optimizer(choice)
            loop.adjustment = adjustment
            before.restore(loop)
        return [loop.train_step() for _ in range(min(self.options.steps, left))]

    def before_step(self, loop):
        self.asked += 1

    def state_dict(self):
        return {"asked": self.asked}

    def load_state_dict(self, loop, state):
        self.asked = state["asked"]

    def close(self):
        self.closed = True
'''
#: Bytes that do not say how the run was made.
RESULTS = ("metrics.jsonl", "checkpoints/*/model.safetensors")


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path) -> Iterator[Any]:
    """Load the policy from a file."""
    file = tmp_path / "policies.py"
    file.write_text(PLUGIN)
    reset_manager()
    manager().load_file(file)
    yield
    reset_manager()


def policy(**options: Any) -> str:
    text = ", ".join(
        f"{key}: {json.dumps(value)}" for key, value in {"name": "together", **options}.items()
    )
    return f"phases.0.policy={{{text}}}"


@pytest.mark.parametrize(
    "options",
    [{}, {"trial": 2}, {"trial": 3, "memory": False}],
    ids=["plain", "tries", "tries from disk"],
)
def test_a_policy_that_changes_nothing_in_the_end_changes_no_bit(
    tiny: Any, files_in: Any, options: Any
) -> None:
    plain, _ = tiny.run("plain", "phases.0.num_workers=2")
    other, _ = tiny.run("other", "phases.0.num_workers=2", policy(**options))
    assert files_in(other.path, RESULTS) == files_in(plain.path, RESULTS)
    assert len(files_in(plain.path, RESULTS)) > 2


def test_joint_steps_are_reported_singly_then_saved(tiny: Any, files_in: Any) -> None:
    """Three steps at once: the evaluation of step 4 is made at step 6."""
    plain, _ = tiny.run("plain", "checkpoint={every: 2, keep: 9}")
    other, _ = tiny.run("other", policy(steps=3), "checkpoint={every: 2, keep: 9}")
    told = read_metrics(other.metrics_file)
    steps = [record for record in told if record["event"] == "train"]
    assert steps == [
        record for record in read_metrics(plain.metrics_file) if record["event"] == "train"
    ]
    judged = [record["step"] for record in told if record["event"] == "validation"]
    assert judged == [6, 8]
    # Due at 2, 4, 6 and 8.
    saved = sorted(
        path.name for path in other.checkpoints.iterdir() if path.name.startswith("step")
    )
    assert saved == ["step-00000003", "step-00000006", "step-00000008"]
    weights = files_in(plain.path, ("checkpoints/*/model.safetensors",))
    for name, content in files_in(other.path, ("checkpoints/*[68]/model.safetensors",)).items():
        assert weights[name] == content


@pytest.mark.parametrize("stop", [2, 3, 5])
def test_run_stopped_among_joint_steps_resumes_bitwise(tiny: Any, files_in: Any, stop: int) -> None:
    overrides = (policy(steps=3, trial=1), "checkpoint={every: 2, keep: 9}")
    whole, _ = tiny.run("whole", *overrides)
    record_step = TrainingContext.record_step

    def stopping(self: TrainingContext, *arguments: Any, **options: Any) -> None:
        record_step(self, *arguments, **options)
        if self.step == stop:
            self.request_stop("a test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingContext, "record_step", stopping)
        with pytest.raises(Interrupted):
            tiny.run("broken", *overrides)
    broken, _ = tiny.run("broken", *overrides, resume="auto")
    patterns = ("metrics.jsonl", "checkpoints/step-00000008/*")
    assert files_in(broken.path, patterns) == files_in(whole.path, patterns)
    assert "checkpoints/step-00000008/state.json" in files_in(whole.path, patterns)


def test_rates_are_those_of_the_schedule_times_the_adjustment(tiny: Any) -> None:
    plain, _ = tiny.run("plain")
    other, _ = tiny.run("other", policy(float_rate=0.5, ternary_rate=0.25))
    for before, after in zip(
        read_metrics(plain.metrics_file), read_metrics(other.metrics_file), strict=True
    ):
        if before["event"] == "train":
            assert after["lr"] == before["lr"] * 0.5
            assert after["rate"] == before["rate"] * 0.25


def test_policy_is_called_before_each_step_and_at_the_end(tiny: Any) -> None:
    tiny.run("run", policy())
    loops = __import__("sys").modules["policies"].LOOPS
    assert [(loop.policy.asked, loop.policy.closed) for loop in loops] == [(8, True)]


def test_policy_needs_rates_that_are_set(tiny: Any) -> None:
    with pytest.raises(
        ArbError,
        match="policy: cannot change rates with 'lr_schedule': none, which does not set them",
    ):
        tiny.config(policy(), "phases.0.lr_schedule=none", "phases.0.warmup_steps=0")


def test_run_from_before_policies_is_still_the_same() -> None:
    before = {"config": {"phases": [{"name": "standard", "steps": 3}]}}
    now = {"config": {"phases": [{"name": "standard", "steps": 3, "policy": None}]}}
    assert differences(before, now) == []
    now["config"]["phases"][0]["policy"] = "together"  # type: ignore[index]
    assert differences(before, now) == ["phases[0].policy: nothing there, 'together' here"]


# --- snapshots


def loop_of(tiny: Any, *overrides: str) -> TrainingLoop:
    """Return a loop on the model of a run that is over."""
    tiny.run("run", policy(), *overrides)
    loop = __import__("sys").modules["policies"].LOOPS[-1]
    return TrainingLoop(loop.context, loop.options, loop.key)


def tensors(loop: TrainingLoop) -> list[torch.Tensor]:
    """Return everything that a snapshot must hold, read off the modules."""
    parts = [value.clone() for _, value in sorted(loop.model.state_dict().items())]
    state = loop.optimizer.state_dict()["parts"]["float"]["state"]
    for entry in state.values():
        parts += [value.clone() for _, value in sorted(entry.items())]
    return parts


@pytest.mark.parametrize("rule", ["sign_votes", "{name: scaled_votes, lr: 0.3}", "momentum_votes"])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_snapshot_restores_every_bit(tiny: Any, tmp_path: Path, rule: str, where: str) -> None:
    loop = loop_of(tiny, f"optimizer.ternary={rule}")
    for _ in range(3):
        loop.train_step()
    snapshot = Snapshot.take(loop)
    before = tensors(loop)
    cursor = copied(loop.batches.state_dict())
    if where == "disk":
        snapshot = Snapshot.read(snapshot.save(tmp_path / "snapshots"))
    first = [loop.train_step().report for _ in range(4)]
    ends = tensors(loop)
    assert not all(map(torch.equal, before, ends))
    for _ in range(2):  # twice: nothing that follows writes into the snapshot
        snapshot.restore(loop)
        assert all(map(torch.equal, before, tensors(loop)))
        assert (loop.step, loop.microbatches, loop.batches.state_dict()) == (3, 3, cursor)
        assert [loop.train_step().report for _ in range(4)] == first
        assert all(map(torch.equal, ends, tensors(loop)))


def test_snapshot_without_cursor_restores_only_what_was_learnt(tiny: Any) -> None:
    loop = loop_of(tiny)
    for _ in range(3):
        loop.train_step()
    snapshot = Snapshot.take(loop)
    before = tensors(loop)
    for _ in range(4):
        loop.train_step()
    cursor = copied(loop.batches.state_dict())
    snapshot.restore(loop, cursor=False)
    assert all(map(torch.equal, before, tensors(loop)))
    assert (loop.step, loop.microbatches, loop.batches.state_dict()) == (7, 7, cursor)


def test_runtime_state_is_restored_with_the_cursor_only(tiny: Any) -> None:
    """The text read next does not continue the text before the snapshot."""
    loop = loop_of(tiny, "phases.0.preserve_state=true")
    for _ in range(3):
        loop.train_step()
    snapshot = Snapshot.take(loop)
    remembered = copied(loop.model.runtime_state())
    assert remembered is not None
    loop.train_step()
    snapshot.restore(loop)
    assert repr(loop.model.runtime_state()) == repr(remembered)
    loop.train_step()
    snapshot.restore(loop, cursor=False)
    assert loop.model.runtime_state() is None


def test_snapshot_within_a_step_holds_gradients(tiny: Any) -> None:
    loop = loop_of(tiny, "phases.0.gradient_accumulation_steps=3", "optimizer.ternary=scaled_votes")
    for _ in range(4):
        loop.train_step()
    snapshot = Snapshot.take(loop)
    first = [loop.train_step().report for _ in range(5)]
    ends = tensors(loop)
    snapshot.restore(loop)
    assert [loop.train_step().report for _ in range(5)] == first
    assert all(map(torch.equal, ends, tensors(loop)))


def test_bytes_of_a_snapshot_are_those_of_its_tensors(tiny: Any) -> None:
    loop = loop_of(tiny)
    loop.train_step()
    snapshot = Snapshot.take(loop)
    model = sum(value.numel() * value.element_size() for value in loop.model.state_dict().values())
    state = loop.optimizer.state_dict()["parts"]["float"]["state"]
    moments = sum(
        value.numel() * value.element_size() for entry in state.values() for value in entry.values()
    )
    generators = snapshot.loop.rng
    rest = generators["torch"].nbytes + generators["numpy"][1].nbytes
    assert snapshot.nbytes == model + moments + rest


# --- clipping and divergence


def test_the_adjustment_s_clipping_goes_before_the_loop_s(tiny: Any) -> None:
    loop = loop_of(tiny, "phases.0.grad_clip=1e-3")
    report = loop.train_step().report
    assert report is not None
    assert report.grad_norm is not None
    snapshot = Snapshot.take(loop)
    moved = {}
    for clip in ("configured", 1e-6, None):
        snapshot.restore(loop)
        loop.adjustment = Adjustment(grad_clip=clip)
        report = loop.train_step().report
        assert report is not None
        moved[clip] = report.grad_norm
    assert moved["configured"] == moved[1e-6] is not None
    assert moved[None] is None


def test_diverged_names_the_last_skip(
    tiny: Any,
) -> None:
    loop = loop_of(tiny, "phases.0.max_skipped=3")
    loop.loss = lambda batch, masked, output: output.sum() * float("nan")  # type: ignore[method-assign]
    assert [loop.train_step().skip.microbatch for _ in range(2)] == [1, 2]  # type: ignore[union-attr]
    with pytest.raises(Diverged, match="3 micro-batches in a row had no finite loss") as caught:
        loop.train_step()
    (skip,) = caught.value.skips
    assert (skip.what, skip.microbatch) == ("loss", 3)


def test_a_policy_without_what_it_needs_is_refused(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    __import__("importlib").import_module("policies")
    monkeypatch.setattr("policies.Together", lambda options: SimpleNamespace(advance=None))
    with pytest.raises(
        ArbError, match="does not keep the protocol StepPolicy: it lacks before_step, begin, close"
    ):
        tiny.run("run", policy())
