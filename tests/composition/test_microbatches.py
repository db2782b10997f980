"""A step of several micro-batches is the step of one batch, for every data source and masking.

The batch is what all micro-batches of all ranks make together. Its loss is the mean over its
predictions, computed here by one forward pass of the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from arb_ternary.backends.select import reset_backends
from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary.plugins.manager import manager
from arb_ternary.protocols.data import Batch, MaskedBatch
from arb_ternary_train.loading import load_config
from arb_ternary_train.loop import TrainingLoop
from arb_ternary_train.metrics import read_metrics
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_train.world import SingleProcess, World
from arb_test_support.kinds_of_data import KINDS_OF_DATA, TEXT, kind_of_masking
from arb_test_support.ranks import on_ranks

MICROBATCHES = 3
#: Options of a source, and further sources of the samples of a kind.
OPTIONS = {"captioned": {"captions": ["a", "bc", "def"] * 3 + ["g"]}}
SOURCES = {
    "text": ({"name": "shakespeare"},),
    "text with gaps": ({"name": "with_mask_token", "source": TEXT.data},),
}
#: Sources that read a user's files, or whose samples are large.
LEFT_OUT = {"tokens", "images", "image_arrays", "sounds", "audio_codes", "formants"}
#: Strategies whose micro-batches differ in their number of predictions here.
UNEVEN = ("captions", "time_step")


@pytest.fixture(autouse=True)
def _backends_are_forgotten() -> Iterator[None]:
    yield
    reset_backends()


def names(kind: str) -> set[str]:
    return {found.spec.name for found in manager().registry.all(kind)}


def cases() -> Iterator[Any]:
    for masking in sorted(names("masking")):
        data = kind_of_masking(masking)
        (kind,) = [name for name, each in KINDS_OF_DATA.items() if each is data]
        for source in (data.data, *SOURCES.get(kind, ())):
            yield pytest.param(masking, source, id=f"{masking}-{source['name']}")


def config(masking: str, source: Any, folder: Path) -> str:
    """Return the config of a run of one step of a float model, written to ``folder``."""
    data = kind_of_masking(masking)
    text = folder / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 30)
    model = {key: value for key, value in data.models[0].items() if key != "group_size"}
    options = {"name": masking}
    if masking == "time_step":
        options |= {"time_interpretation": "input", "time_sampling": "batch"}
    path = folder / "run.yaml"
    run = {
        "threads": 1,
        "backend": "torch",
        "data": {**source, **OPTIONS.get(source["name"], {})},
        "model": {
            **model,
            "activations": "float",
            "float_parts": ["embedding", "head", "norms", "linears"],
        },
        "masking": options,
        "optimizer": "adamw",
        "phases": [
            {
                "name": "standard",
                "steps": 1,
                "batch_size": 2,
                "eval_every": 0,
                "gradient_accumulation_steps": MICROBATCHES,
                **{key: value for key, value in data.phase.items() if key == "block_size"},
            }
        ],
    }
    path.write_text(dump_yaml(run).replace("{text}", str(text)))
    return str(path)


def joined(batches: list[MaskedBatch]) -> MaskedBatch:
    """Return one batch of all samples."""
    times = None
    if batches[0].times is not None:
        times = torch.cat([each.times for each in batches if each.times is not None])
    return MaskedBatch(
        inputs=torch.cat([each.inputs for each in batches]),
        targets=torch.cat([each.targets for each in batches]),
        loss_mask=torch.cat([each.loss_mask for each in batches]),
        times=times,
        arguments={
            name: torch.cat([each.arguments[name] for each in batches])
            for name in batches[0].arguments
        },
    )


def trained(world: World, path: str) -> dict[str, Any]:
    """Train a step; return how its gradient and its loss differ from those of one batch."""
    seen: list[tuple[int, Any]] = []
    found: dict[str, Any] = {}
    loops: list[TrainingLoop] = []
    next_microbatch = TrainingLoop.next_microbatch

    def watched(loop: TrainingLoop, index: int) -> Any:
        drawn = next_microbatch(loop, index)
        loops[:] = [loop]
        seen.append((index, drawn.masked))
        return drawn

    def compare(*_: object) -> None:
        by_index = dict(sorted(chain.from_iterable(world.gather(seen))))
        assert [*by_index] == [*range(MICROBATCHES)]
        found["counts"] = [int(each.loss_mask.sum()) for each in by_index.values()]
        (loop,) = loops
        whole = joined([*by_index.values()])
        nothing = Batch(torch.empty(0), torch.empty(0))
        parameters = [each for each in loop.model.parameters() if each.requires_grad]
        with torch.enable_grad():
            loss = loop.loss(nothing, whole, loop.predict(nothing, whole))
            right = torch.autograd.grad(loss, parameters, materialize_grads=True)
        taken = [torch.zeros(()) if each.grad is None else each.grad for each in parameters]
        apart = sum((a - b).square().sum() for a, b in zip(taken, right, strict=True))
        size = sum(each.square().sum() for each in right)
        found["gradient"] = float(apart / size) ** 0.5
        found["one batch"] = float(loss.detach())

    folder = Path(path).parent / "run"
    watch = register_optimizer_step_pre_hook(compare)
    TrainingLoop.next_microbatch = watched  # type: ignore[method-assign]
    try:
        train(load_config(path).config, RunRequest(directory=folder, reporter=Silent, world=world))
    finally:
        TrainingLoop.next_microbatch = next_microbatch  # type: ignore[method-assign]
        watch.remove()
    lines = read_metrics(folder / "metrics.jsonl")
    (found["reported"],) = [line["loss"] for line in lines if line["event"] == "train"]
    return found


def check(found: dict[str, Any], masking: str) -> None:
    assert found["gradient"] < 1e-5, found
    assert found["reported"] == pytest.approx(found["one batch"], rel=1e-5)
    if masking in UNEVEN:
        assert len(set(found["counts"])) > 1


@pytest.mark.parametrize(("masking", "source"), [*cases()])
def test_micro_batches_are_one_batch(masking: str, source: Any, tmp_path: Path) -> None:
    check(trained(SingleProcess(), config(masking, source, tmp_path)), masking)


@pytest.mark.parametrize("masking", UNEVEN)
def test_micro_batches_of_two_ranks_are_one_batch(masking: str, tmp_path: Path) -> None:
    path = config(masking, kind_of_masking(masking).data, tmp_path)
    for found in on_ranks(2, trained, path):
        check(found, masking)


def test_every_registered_source_takes_part() -> None:
    tried = {param.values[1]["name"] for param in cases()}
    assert tried | LEFT_OUT == names("data")
