"""``ProgressiveTrainer``: training, history, resuming, and end-to-end training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from arb_ternary.errors import CheckpointError, ConfigError, UsageProblem
from arb_ternary_progressive.builder import ProgressiveRackBuilder
from arb_ternary_progressive.rack import Rack
from arb_ternary_progressive.stackwise import (
    ModelConfig,
    ProgressiveConfig,
    StackWiseConfig,
    TrainingConfig,
)
from arb_ternary_progressive.trainer import ProgressiveTrainer
from arb_ternary_train.checkpoint import CheckpointStore
from arb_ternary_train.step import StepReport

VOCABULARY = 24
POSITIONS = 8


def samples(count: int = 12) -> list[dict[str, Tensor]]:
    """Return counting sequences, which a model can learn; the last id is the mask token."""
    return [
        {
            "input_ids": (torch.arange(POSITIONS) + number) % (VOCABULARY - 1),
            "sample_ids": torch.tensor(number),
        }
        for number in range(count)
    ]


def loader(batch_size: int = 4, **options: Any) -> Any:
    return DataLoader(samples(), batch_size=batch_size, **options)  # type: ignore[arg-type]


def config(
    model: dict[str, Any] | None = None, training: dict[str, Any] | None = None, **more: Any
) -> StackWiseConfig:
    embedded = {"time_embedding_dim": 8} if more.get("time_interpretation") == "input" else {}
    return StackWiseConfig(
        model=ModelConfig(
            **{
                "vocab_size": VOCABULARY,
                "d_model": 32,
                "d_ff": 32,
                "n_heads": 2,
                "max_length": POSITIONS,
            }
            | (model or {})
        ),
        training=TrainingConfig(
            progressive=ProgressiveConfig(**{"blocks_per_stack": 1, **embedded} | more),
            **(training or {}),
        ),
    )


def state(rack: Rack) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in rack.state_dict().items()}


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


def part(name: str) -> str:
    return ".".join(name.split(".")[:2]) if name.startswith("blocks.") else name.split(".")[0]


def watched(
    options: StackWiseConfig, target: int = 2
) -> tuple[list[dict[str, Tensor]], ProgressiveRackBuilder, Any]:
    """Train; return the rack's state after each stack, the builder and the history."""
    builder = ProgressiveRackBuilder(options)
    states: list[dict[str, Tensor]] = []

    def on_step(stack: int, _: StepReport) -> None:
        del states[stack:]
        states.append(state(builder.build_rack()))

    history = ProgressiveTrainer(options, on_step=on_step).train_rack(builder, loader(), target)
    return states, builder, history


@pytest.mark.parametrize("precision", ["full", "ternary"])
def test_the_frozen_trunk_is_bit_identical(precision: Any) -> None:
    states, _, history = watched(config(new_stack_precision=precision))
    before, after = states
    common = {name: tensor for name, tensor in after.items() if name in before}
    changed = {part(name) for name in differing(before, common)}
    assert "head" in changed
    assert not changed & {"embedding", "blocks.0"}
    assert [entry.steps for entry in history] == [3, 3]
    assert [entry.trunk for entry in history] == ["none", "frozen"]


def test_of_a_qlora_trunk_only_adapters_learn() -> None:
    states, builder, history = watched(
        config(trunk_strategy="qlora", qlora_enabled=True, qlora_rank=2, training={"lr": 0.01})
    )
    before, after = states
    common = {name: tensor for name, tensor in after.items() if name in before}
    trunk = [name for name in differing(before, common) if part(name) == "blocks.0"]
    assert trunk
    assert all(".adapters.stack." in name for name in trunk)
    assert history[1].trunk == "qlora"
    # Afterwards everything can learn again.
    assert all(parameter.requires_grad for parameter in builder.build_rack().parameters())


def test_it_learns() -> None:
    options = config(
        training={"epochs_per_stack": 12, "lr": 0.02},
        num_time_steps=2,
        time_step_fractions=[0.2, 0.3],
    )
    history = ProgressiveTrainer(options).train_rack(ProgressiveRackBuilder(options), loader(), 2)
    assert [entry.steps for entry in history] == [36, 36]
    assert history[1].last_loss is not None
    assert history[0].first_loss is not None
    assert history[1].last_loss < history[0].first_loss / 2


@pytest.mark.parametrize("precision", ["full", "ternary"])
@pytest.mark.parametrize("interpretation", ["depth", "input"])
def test_weights_are_equal_with_and_without_the_cache(precision: Any, interpretation: Any) -> None:
    ends = []
    for cached in (True, False):
        options = config(
            new_stack_precision=precision,
            time_interpretation=interpretation,
            cache_activations=cached,
            training={"epochs_per_stack": 3},
        )
        builder = ProgressiveRackBuilder(options)
        history = ProgressiveTrainer(options).train_rack(builder, loader(5, shuffle=True), 3)
        ends.append((state(builder.build_rack()), history))
    assert not differing(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def test_a_shuffled_second_epoch_hits_every_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    options = config(training={"epochs_per_stack": 2})
    ProgressiveTrainer(options).train_rack(ProgressiveRackBuilder(options), loader(shuffle=True), 2)
    assert "cache: 12 hits of 24, 12 samples in 12,288 bytes, 0 evicted" in caplog.text


def test_a_deeper_trunk_reuses_the_shallower_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # One time step for all stacks, so that their inputs are the same.
    options = config(num_time_steps=1, training={"epochs_per_stack": 1})
    run_stacks = Rack.run_stacks
    through = []

    def spy(self: Rack, x: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        if not torch.is_grad_enabled():
            through.append((first, last, len(x)))
        return run_stacks(self, x, first, last)

    monkeypatch.setattr(Rack, "run_stacks", spy)
    ProgressiveTrainer(options).train_rack(ProgressiveRackBuilder(options), loader(), 4)
    assert through == [(0, 1, 4)] * 3 + [(1, 2, 4)] * 3 + [(2, 3, 4)] * 3


def test_a_qlora_trunk_does_not_use_the_cache(caplog: pytest.LogCaptureFixture) -> None:
    options = config(trunk_strategy="qlora", progressive_qlora=True, cache_activations=True)
    ProgressiveTrainer(options).train_rack(ProgressiveRackBuilder(options), loader(), 2)
    assert "stack 1: the activation cache is not used: the trunk's adapters learn" in caplog.text


def test_the_history_has_one_entry_per_stack() -> None:
    options = config(building_mode="prepend")
    trainer = ProgressiveTrainer(options)
    history = trainer.train_progressively(
        rack_builder=ProgressiveRackBuilder(options), dataloader=loader(), target_stacks=3
    )
    assert history == trainer.history
    assert [(entry.index, entry.stack_id, entry.position) for entry in history] == [
        (0, 0, 0),
        (1, 1, 0),
        (2, 2, 0),
    ]
    assert [entry.time_step for entry in history] == [0, 3, 7]
    # floor(8 x share) of 8 positions in each of 12 samples
    assert [entry.tokens for entry in history] == [12 * 1, 12 * 3, 12 * 6]
    json.dumps([entry.to_json() for entry in history])


def test_end_to_end_training_takes_as_many_steps() -> None:
    options = config(enabled=False)
    builder = ProgressiveRackBuilder(options)
    steps = []
    history = ProgressiveTrainer(options, on_step=lambda *step: steps.append(step)).train_rack(
        builder, loader(), 3
    )
    assert len(builder.build_rack().ordered_stacks) == 3
    assert [entry.steps for entry in history] == [len(steps)] == [9]
    assert history[0].trunk == "none"


#: Of eight positions, how many are hidden at each of eight time steps: floor(8 (.15 + .1 step)).
HIDDEN = (1, 2, 2, 3, 4, 5, 6, 6)


@pytest.mark.parametrize("sampling", ["batch", "sample"])
@pytest.mark.parametrize("mode", ["append", "prepend"])
def test_the_rack_gets_the_time_of_its_masks(
    monkeypatch: pytest.MonkeyPatch, mode: Any, sampling: Any
) -> None:
    embed = Rack.embed
    seen = []

    def spy(self: Rack, tokens_BS: Tensor, time: float | Tensor | None = None) -> Tensor:
        assert time is not None
        steps_B = [
            int(each * 8)
            for each in torch.as_tensor(time).reshape(-1).expand(len(tokens_BS)).tolist()
        ]
        assert (tokens_BS == VOCABULARY - 1).sum(dim=1).tolist() == [
            HIDDEN[step] for step in steps_B
        ]
        seen.extend(steps_B)
        return embed(self, tokens_BS, time)

    monkeypatch.setattr(Rack, "embed", spy)
    options = config(
        time_interpretation="input",
        time_sampling=sampling,
        building_mode=mode,
        training={"steps_per_stack": 6},
    )
    ProgressiveTrainer(options).train_rack(ProgressiveRackBuilder(options), loader(), 2)
    assert len(set(seen)) > 3


def test_steps_per_stack_repeats_the_data() -> None:
    options = config(training={"steps_per_stack": 7})
    history = ProgressiveTrainer(options).train_rack(ProgressiveRackBuilder(options), loader(), 1)
    assert history[0].steps == 7


def test_rates_come_from_the_config() -> None:
    ends = []
    for rates in ({"lr": 0.01}, {"lr": 0.5}, {"rate": 0.01}, {"rate": 3.0}):
        precision = "ternary" if "rate" in rates else "full"
        options = config(new_stack_precision=precision, training=rates)
        builder = ProgressiveRackBuilder(options)
        ProgressiveTrainer(options).train_rack(builder, loader(), 1)
        ends.append(state(builder.build_rack()))
    assert differing(*ends[:2])
    assert differing(*ends[2:])


# --- resuming


class Killed(BaseException):
    """Stands for the death of the process."""


VARIANTS: dict[str, dict[str, Any]] = {
    "float": {"new_stack_precision": "full"},
    "ternary": {"new_stack_precision": "ternary"},
    "qlora": {"trunk_strategy": "qlora", "qlora_enabled": True, "qlora_rank": 2},
    "end to end": {"enabled": False},
    "drawn time": {"time_interpretation": "input", "building_mode": "prepend"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_at_any_step_it_resumes_to_the_same_bits(tmp_path: Path, variant: str) -> None:
    options = config(**VARIANTS[variant], training={"epochs_per_stack": 2})
    data = loader(6, shuffle=True)  # 2 batches an epoch, 4 steps a stack
    whole = ProgressiveRackBuilder(options)
    history = ProgressiveTrainer(options).train_rack(whole, data, 2)
    for last in range(1, 9):
        folder = tmp_path / str(last)
        count = [0]

        def dies(
            stack: int, report: StepReport, count: list[int] = count, last: int = last
        ) -> None:
            count[0] += 1
            if count[0] == last:
                raise Killed

        with pytest.raises(Killed):
            ProgressiveTrainer(options, folder=folder, checkpoint_every=2, on_step=dies).train_rack(
                ProgressiveRackBuilder(options), data, 2
            )
        torch.manual_seed(last)  # another state of the global generator
        again = ProgressiveRackBuilder(options)
        trainer = ProgressiveTrainer(options, folder=folder, checkpoint_every=2)
        assert trainer.train_rack(again, data, 2, resume=True) == history
        assert not differing(state(whole.build_rack()), state(again.build_rack()))


def test_a_finished_training_has_nothing_left_to_do(tmp_path: Path) -> None:
    options = config()
    first = ProgressiveRackBuilder(options)
    history = ProgressiveTrainer(options, folder=tmp_path).train_rack(first, loader(), 2)
    again = ProgressiveRackBuilder(options)
    assert (
        ProgressiveTrainer(options, folder=tmp_path).train_rack(again, loader(), 2, resume=True)
        == history
    )
    assert not differing(state(first.build_rack()), state(again.build_rack()))
    # A larger rack goes on from there.
    trainer = ProgressiveTrainer(options, folder=tmp_path)
    more = trainer.train_rack(ProgressiveRackBuilder(options), loader(), 3, resume=True)
    assert [entry.index for entry in more] == [0, 1, 2]


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_trainer import ProgressiveRackBuilder, ProgressiveTrainer, config, loader
options = config(training={"epochs_per_stack": 50}, cache_folder=sys.argv[1] + "/cache")
trainer = ProgressiveTrainer(
    options,
    folder=sys.argv[1],
    checkpoint_every=1,
    on_step=lambda stack, _: print(stack, flush=True),
)
trainer.train_rack(ProgressiveRackBuilder(options), loader(), 3, resume=True)
"""


@pytest.mark.extended
def test_a_killed_process_leaves_a_checkpoint(tmp_path: Path) -> None:
    options = config(training={"steps_per_stack": 4})
    whole = ProgressiveRackBuilder(options)
    ProgressiveTrainer(options).train_rack(whole, loader(), 3)
    source = CHILD.replace('{"epochs_per_stack": 50}', '{"steps_per_stack": 4}')
    folder = tmp_path / "run"
    folder.mkdir()
    for kill_after in (3, 100):
        process = subprocess.Popen(
            [sys.executable, "-c", source, str(folder), str(Path(__file__).parent)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        for number, _ in enumerate(process.stdout, start=1):
            if number == kill_after:
                os.kill(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait()
    assert process.returncode == 0
    checkpoint, _ = CheckpointStore(folder).newest_good()
    assert checkpoint is not None
    assert not differing(state(whole.build_rack()), dict(checkpoint.model))


def test_a_checkpoint_of_another_config_is_refused(tmp_path: Path) -> None:
    ProgressiveTrainer(config(), folder=tmp_path).train_rack(
        ProgressiveRackBuilder(config()), loader(), 1
    )
    other = config(seed=3)
    with pytest.raises(CheckpointError, match="another config"):
        ProgressiveTrainer(other, folder=tmp_path).train_rack(
            ProgressiveRackBuilder(other), loader(), 2, resume=True
        )
    with pytest.raises(UsageProblem, match="no folder"):
        ProgressiveTrainer(other).train_rack(
            ProgressiveRackBuilder(other), loader(), 2, resume=True
        )


def test_a_checkpoint_with_the_former_identity_still_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = {"config": "a digest of more options"}
    with monkeypatch.context() as patched:
        patched.setattr(ProgressiveTrainer, "_identity", lambda _: former)
        ProgressiveTrainer(config(), folder=tmp_path).train_rack(
            ProgressiveRackBuilder(config()), loader(), 1
        )
    history = ProgressiveTrainer(config(), folder=tmp_path).train_rack(
        ProgressiveRackBuilder(config()), loader(), 2, resume=True
    )
    assert [entry.index for entry in history] == [0, 1]


# --- limits


def test_an_existing_rack_is_the_trunk() -> None:
    options = config()
    builder = ProgressiveRackBuilder(options)
    builder.append_stack()
    before = state(builder.build_rack())
    history = ProgressiveTrainer(options).train_rack(builder, loader(), 2)
    assert [entry.index for entry in history] == [1]
    after = state(builder.build_rack())
    trunk = [name for name in before if part(name) == "blocks.0"]
    assert all(torch.equal(before[name], after[name]) for name in trunk)
    with pytest.raises(UsageProblem, match="nothing to train"):
        ProgressiveTrainer(options).train_rack(builder, loader(), 2)


def test_more_than_max_stacks_is_refused_before_training() -> None:
    options = config(max_stacks=2)
    builder = ProgressiveRackBuilder(options)
    with pytest.raises(UsageProblem, match="max_stacks"):
        ProgressiveTrainer(options).train_rack(builder, loader(), 3)
    assert not builder.build_rack().ordered_stacks


def test_a_config_that_contradicts_itself_is_refused() -> None:
    options = config(trunk_strategy="qlora")
    with pytest.raises(ConfigError, match="there are none"):
        ProgressiveTrainer(options).train_rack(ProgressiveRackBuilder(options), loader(), 2)


def test_the_cache_follows_the_config(tmp_path: Path) -> None:
    options = config(cache_folder=str(tmp_path / "cache"), cache_dtype="int8", cache_bytes=3000)
    ProgressiveTrainer(options).train_rack(ProgressiveRackBuilder(options), loader(), 2)
    files = list((tmp_path / "cache").glob("*/*.safetensors"))
    # 8 positions of 32 codes and a scale, and 256 bytes for the header: five of them fit.
    assert len(files) == 3000 // (8 * (32 + 4) + 256)
    exact = config(cache_activations=False)
    ends = []
    for each in (options, exact):
        builder = ProgressiveRackBuilder(each)
        ProgressiveTrainer(each).train_rack(builder, loader(), 2)
        ends.append(state(builder.build_rack()))
    assert differing(*ends), "int8 rounds what the new stack learns from"
