"""A third-party phase that adds a block to the model while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.errors import CheckpointError, Interrupted
from arb_ternary.plugins.manager import manager, reset_manager
from arb_ternary_train.checkpoint import read_checkpoint
from arb_ternary_train.context import TrainingContext
from arb_ternary_train.restore import load_run, measure

PLUGIN = '''
from arb_ternary import hookimpl
from arb_ternary.specs import PhaseSpec

ARB_API_VERSION = (1, 0)

@hookimpl
def arb_register_phases():
    return [PhaseSpec(name="growing", target="growing:build",
        config="arb_ternary_train.options:LoopOptions")]


def build(config):
    return Growing(config)


def grow(model, blocks):
    from arb_ternary_text.models.block import Block
    while len(model.blocks) < blocks:
        model.blocks.append(Block(model.config))
    return model


class Growing:
    """Trains, adds a block after half of the steps, and trains on with a new optimizer."""

    name = "growing"

    def __init__(self, config):
        self.config, self.stage, self.blocks, self.state, self.loop = config, 0, 1, None, None

    def run(self, context):
        from attrs import evolve
        from arb_ternary_train.loop import TrainingLoop
        from arb_ternary.protocols.runs import PhaseResult
        half = evolve(self.config, steps=self.config.steps // 2)
        for self.stage in range(self.stage, 2):
            if self.stage == 1:
                grow(context.model, 2)
                self.blocks = 2
            self.loop = TrainingLoop(context, half, f"growing {self.stage}")
            if self.state is not None:
                self.loop.load_state_dict(self.state)
                self.state = None
            while self.loop.step < half.steps:
                report = self.loop.train_microbatch()
                context.record_step(report.metrics(), tokens=report.tokens, phase_step=report.step,
                    log=False)
                context.checkpoint_if_due()
                context.stop_if_requested()
        context.save_checkpoint()
        return PhaseResult(steps=2 * half.steps)

    def state_dict(self):
        return {"stage": self.stage, "loop": self.loop.state_dict()}

    def load_state_dict(self, state):
        self.stage, self.state = state["stage"], state["loop"]

    def structure(self):
        return {"blocks": self.blocks}

    def restore_structure(self, model, structure):
        self.blocks = structure["blocks"]
        return grow(model, structure["blocks"])
'''

PHASES = (
    "phases=[{name: growing, steps: 6, batch_size: 2, block_size: 8},"
    " {name: standard, steps: 3, batch_size: 2, block_size: 8}]"
)


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path) -> Iterator[None]:
    """Load the phase from a file."""
    file = tmp_path / "growing.py"
    file.write_text(PLUGIN)
    reset_manager()
    manager().load_file(file)
    yield
    reset_manager()


@pytest.mark.parametrize("stop", [2, 4, 8])
def test_grown_run_resumes_bitwise_and_can_be_used(tiny: Any, files_in: Any, stop: int) -> None:
    overrides = (PHASES, "checkpoint={every: 1, keep: 2}")
    whole, report = tiny.run("whole", *overrides)
    record_step = TrainingContext.record_step

    def stopping(self: TrainingContext, *arguments: Any, **options: Any) -> None:
        record_step(self, *arguments, **options)
        if self.step == stop:
            self.request_stop("a test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingContext, "record_step", stopping)
        with pytest.raises(Interrupted):
            tiny.run("stopped", *overrides)
    resumed, _ = tiny.run("stopped", *overrides, resume="auto")
    assert files_in(resumed.path) == files_in(whole.path)
    trained = load_run(whole.path)
    assert len(trained.model.blocks) == 2  # type: ignore[arg-type]
    assert measure(trained)[0].loss == report.validation_loss
    assert read_checkpoint(whole.checkpoints / "step-00000009").state["structures"] == [
        {"blocks": 2},
        None,
    ]


def test_weights_of_a_grown_model_need_its_structure(tiny: Any) -> None:
    whole, _ = tiny.run("whole", PHASES)
    with pytest.raises(CheckpointError, match="its tensors are not those of the model") as refused:
        tiny.run("other", init_from=whole.path)
    assert "not in the model: blocks.1." in refused.value.hint
