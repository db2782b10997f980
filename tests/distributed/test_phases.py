"""Phases of plugins write the bytes of one process on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary.errors import ArbError, ConfigError
from arb_ternary_distributed.checks import check_config
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.context import TrainingContext
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_train.world import SingleProcess, World
from arb_ternary_upcycle.float_model import float_config, neutral_tensors, write_float_model
from arb_test_support.ranks import on_ranks

CONFIG = """
name: phases
threads: 1
deterministic: true
data: {{name: text, path: {text}, tokenizer: bytes}}
model:
  {{name: decoder, architecture: llama, width: 16, layers: 2, heads: 2, feed_forward: 32,
      max_length: 16,
   group_size: 32, float_parts: [norms, embedding]}}
optimizer: {{name: split, ternary: {{name: scaled_votes}}, float: adamw}}
checkpoint: {{every: 2, keep: 40}}
phases: [{phases}]
"""
LOOP = (
    "batch_size: 2, block_size: 8, eval_every: 3, eval_batches: 1, gradient_accumulation_steps: 3"
)
PHASES = {
    "blockwise": "{name: blockwise, steps: 6, teacher: TEACHER, cache_teacher_outputs: true, "
    "cache_memory: 3000, "
    "blockwise_autotune_enabled: true, blockwise_autotune_plateau_patience: 1, " + LOOP + "}",
    "global": "{name: global, steps: 6, teacher: TEACHER, kd_weight: 0.5, force: true, "
    + LOOP
    + "}",
    "progressive": "{name: progressive, target_stacks: 2, steps_per_stack: 3, " + LOOP + "}",
}


def make_runs(folder: Path) -> None:
    """Write a text, a float teacher of the model's sizes, and a config of each phase."""
    (folder / "text.txt").write_text("to be or not to be, that is the question; " * 30)
    torch.manual_seed(0)
    sizes: Any = {"width": 16, "layers": 2, "heads": 2, "feed_forward": 32, "max_length": 16}
    model = Decoder(float_config(DecoderConfig(architecture="llama", **sizes)), 256)
    tensors = [neutral_tensors(model)]
    write_float_model(folder / "teacher", model.config, 256, {"kind": "bytes"}, tensors)
    for name, phase in PHASES.items():
        text = CONFIG.format(
            text=folder / "text.txt", phases=phase.replace("TEACHER", str(folder / "teacher"))
        )
        (folder / f"{name}.yaml").write_text(text)


def trained(world: World, folder: str, runs: Iterable[tuple[str, str, int]]) -> list[str]:
    """Train runs and return how each ended.

    Args:
        world: the ranks.
        folder: of the configs.
        runs: phase, directory, and step at which to stop (0 = at the end), of each.
    """
    record_step = TrainingContext.record_step
    ends = []
    for phase, directory, stop in runs:

        def recorded(self: TrainingContext, *args: Any, stop: int = stop, **kwargs: Any) -> None:
            record_step(self, *args, **kwargs)
            if self.step == stop:
                self.request_stop("a test")

        TrainingContext.record_step = recorded  # type: ignore[method-assign]
        config = load_config(Path(folder, f"{phase}.yaml")).config
        request = RunRequest(
            directory=Path(folder, directory), resume="auto", reporter=Silent, world=world
        )
        try:
            train(config, request)
            ends.append("finished")
        except ArbError as error:
            ends.append(type(error).__name__)
        finally:
            TrainingContext.record_step = record_step  # type: ignore[method-assign]
    return ends


def files_of(run: Path) -> dict[str, bytes]:
    kept = [*run.glob("metrics.jsonl"), *run.glob("checkpoints/*/*")]
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(kept)}


@pytest.mark.slow
def test_phases_write_the_files_of_one_process(tmp_path: Path) -> None:
    make_runs(tmp_path)
    trained(SingleProcess(), str(tmp_path), [(phase, f"{phase}-whole", 0) for phase in PHASES])
    two = [(phase, f"{phase}-two", 0) for phase in PHASES]
    begun = [(phase, f"{phase}-moved", 2) for phase in PHASES]
    for ends in on_ranks(2, trained, str(tmp_path), [*two, *begun], seconds=600):
        assert ends == [*["finished"] * 3, *["Interrupted"] * 3]
    # Then on three ranks, in one process, and on two.
    for ends in on_ranks(
        3, trained, str(tmp_path), [(phase, f"{phase}-moved", 3) for phase in PHASES], seconds=600
    ):
        assert ends == ["Interrupted"] * 3
    assert (
        trained(SingleProcess(), str(tmp_path), [(p, f"{p}-moved", 5) for p in PHASES])
        == ["Interrupted"] * 3
    )
    for ends in on_ranks(
        2, trained, str(tmp_path), [(phase, f"{phase}-moved", 0) for phase in PHASES], seconds=600
    ):
        assert ends == ["finished"] * 3
    for phase in PHASES:
        whole, both, moved = (
            files_of(tmp_path / f"{phase}-{how}") for how in ("whole", "two", "moved")
        )
        assert [name for name in whole if both.get(name) != whole[name]] == []
        assert both.keys() == whole.keys()
        last = max(name.split("/")[1] for name in whole if name.startswith("checkpoints/step"))
        same = ["metrics.jsonl", *(name for name in whole if f"/{last}/" in name)]
        assert [name for name in same if moved.get(name) != whole[name]] == []
        assert not list((tmp_path / f"{phase}-moved").glob("cache/*"))


def test_a_folder_that_all_ranks_would_write_to_is_refused(tmp_path: Path) -> None:
    make_runs(tmp_path)
    config = load_config(tmp_path / "progressive.yaml", ["phases.0.cache_folder=cache"]).config
    with pytest.raises(
        ConfigError,
        match="phase 'progressive', cache_folder: several ranks would write to one folder",
    ):
        check_config(config, 2)
