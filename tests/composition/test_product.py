"""Train with every combination of registered backend, optimizer, masking strategy and phase.

A plugin that is installed adds its components to the product without an edit here. Each run is
tiny, saves a checkpoint after its first step, and is resumed from there: the end must have the same
bytes. `make test` takes enough combinations for every two components to meet, and `make test-all`
the rest.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any
from zlib import crc32

import attrs
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from arb_ternary.backends.select import candidates, reset_backends
from arb_ternary.config.choice import OptimizerChoice
from arb_ternary.config.fields import config_fields
from arb_ternary.config.options import DEFAULT_CHOICE
from arb_ternary.config.structure import options_class
from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary.plugins.manager import manager
from arb_ternary_progressive.plan import GrowthPlan
from arb_ternary_train.checkpoint import CheckpointStore, read_checkpoint
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.report import RunReport
from arb_ternary_train.runner import RunRequest, train
from arb_test_support.kinds_of_data import KINDS_OF_DATA, TEXT, KindOfData, kind_of_masking

#: Options of a phase of two short steps; a phase takes those that it has.
BRIEF = {
    "steps": 2,
    "eval_every": 1000,
    "accum_threshold": 1,
    "target_stacks": 2,
    "steps_per_stack": 1,
    "blocks_per_stack": 1,
    "max_batch_draws": 3,
}
FLOATS = ["embedding", "head", "norms", "linears"]


def registered(kind: str) -> list[Any]:
    return list(manager().registry.all(kind))


def options_of(found: Any) -> dict[str, attrs.Attribute[Any]]:
    cls = options_class(found.spec)
    return {} if cls is None else {field.name: field for field in config_fields(cls)}


def section(found: Any, data: KindOfData = TEXT) -> dict[str, Any]:
    """Return a short config section of the component; a wrapper gets an optimizer to wrap."""
    fields = options_of(found)
    chosen = {key: value for key, value in {**BRIEF, **data.phase}.items() if key in fields}
    for name, field in fields.items():
        if (
            field.default is attrs.NOTHING
            and field.type is OptimizerChoice
            and DEFAULT_CHOICE not in field.metadata
        ):
            chosen.setdefault(name, "split")
    return {"name": found.spec.name, **chosen}


def float_parts(accepts: frozenset[str]) -> list[str]:
    """Return the float parts of a model that an optimizer can train as a whole."""
    if accepts == {"ternary"}:
        return []
    return FLOATS if accepts == {"float"} else ["norms", "head"]


def source(data: KindOfData, folder: Path) -> dict[str, Any]:
    """Return the section of the data source, whose text is written to ``folder``."""
    text = folder / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 30)
    return {key: str(text) if value == "{text}" else value for key, value in data.data.items()}


def model(data: KindOfData, parts: list[str], grows: bool, turn: str) -> dict[str, Any]:
    """Return the section of a model for such data, chosen by ``turn``, or of one that can grow."""
    found = dict(data.models[0 if grows else crc32(turn.encode()) % len(data.models)])
    if parts == FLOATS:
        found.pop("group_size")
        found["activations"] = "float"
    return {**found, "float_parts": parts}


def combined(kind: str) -> list[Any]:
    """Return the components that can be the only one of their kind in a run.

    Phases with a teacher need an earlier phase that loads it, and phases without training train
    nothing.
    """
    return [found for found in registered(kind) if alone(found)]


def alone(found: Any) -> bool:
    cls = options_class(found.spec)
    return "teacher" not in options_of(found) and not getattr(cls, "no_training", False)


def go_together(masking: Any, phase: Any) -> bool:
    """Return whether a model that the phase can train reads what the strategy masks."""
    return kind_of_masking(masking.spec.name).grows or not grows(phase)


def grows(phase: Any) -> bool:
    return "target_stacks" in options_of(phase)


#: Compiles each kernel for the sizes of its weights, a minute for those here: without a GPU it
#: trains in tests of its own, which compare its bytes with those of torch's kernels.
COMPILES = "tilelang"


def usable(backend: Any) -> bool:
    (candidate,) = [each for each in candidates() if each.name == backend.spec.name]
    # A last resort is slow, and has training tests of its own.
    return candidate.usable and not candidate.last_resort


def pairs(names: Sequence[str]) -> set[tuple[tuple[int, str], ...]]:
    """Return every two components of a combination, each with the index of its kind.

    An optimizer sees models and gradients: it meets every kind of data, whose models differ, and
    not every strategy.
    """
    return {pair(*two) for two in combinations(enumerate(names), 2)}


def pair(one: tuple[int, str], other: tuple[int, str]) -> tuple[tuple[int, str], ...]:
    if (one[0], other[0]) == (1, 2):
        data = kind_of_masking(other[1])
        other = (2, next(name for name, kind in KINDS_OF_DATA.items() if kind is data))
    return one, other


def quick(every: Sequence[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Return few combinations that contain every pair.

    The next one is always the one with the most pairs that none contains yet.
    """
    taken: set[tuple[str, ...]] = set()
    still = set().union(*map(pairs, every))
    while still:
        best = max(every, key=lambda names: len(pairs(names) & still))
        taken.add(best)
        still -= pairs(best)
    return taken


def quick_backends() -> list[Any]:
    """Return the backends that every other component meets in `make test`."""
    return [each for each in combined("backend") if usable(each) and each.spec.name != COMPILES]


def cases() -> Iterator[Any]:
    """Yield every combination; a few, in which every two components meet, are not extended."""
    every = {
        tuple(each.spec.name for each in found): found
        for found in product(*map(combined, ("backend", "optimizer", "masking", "phase")))
        if go_together(*found[2:])
    }
    here = {backend.spec.name for backend in quick_backends()}
    chosen = quick([names for names in every if names[0] in here])
    for names, found in every.items():
        yield pytest.param(
            *found, id="-".join(names), marks=() if names in chosen else pytest.mark.extended
        )
    reset_backends()


COMBINATIONS = list(cases())


@pytest.fixture(autouse=True)
def _backends_are_forgotten() -> Iterator[None]:
    yield
    reset_backends()


@pytest.mark.parametrize(("backend", "optimizer", "masking", "phase"), COMBINATIONS)
def test_components_work_together_and_resume(
    backend: Any, optimizer: Any, masking: Any, phase: Any, tmp_path: Path
) -> None:
    if not usable(backend):
        pytest.skip("cannot be used here, or only as a last resort")
    data = kind_of_masking(masking.spec.name)
    parts = float_parts(optimizer.spec.accepts)
    config = {
        "name": "together",
        "backend": backend.spec.name,
        "data": source(data, tmp_path),
        "model": model(data, parts, grows(phase), optimizer.spec.name),
        "masking": section(masking),
        "optimizer": section(optimizer),
        "checkpoint": {"every": 1, "keep": 3},
        "phases": [section(phase, data)],
    }
    whole = run(config, tmp_path / "whole")
    assert math.isfinite(whole.validation_loss)
    assert whole.steps >= 1
    assert whole.audit.pure == (not parts)

    checkpoints = sorted((tmp_path / "whole" / "checkpoints").glob("step-*"))
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    for later in checkpoints[1:]:
        shutil.rmtree(tmp_path / "half" / "checkpoints" / later.name)
    run(
        config,
        tmp_path / "half",
        resume=str(tmp_path / "half" / "checkpoints" / checkpoints[0].name),
    )
    for name in ("model.safetensors", "state.safetensors", "state.json"):
        ends = [
            (tmp_path / run / "checkpoints" / checkpoints[-1].name / name).read_bytes()
            for run in ("whole", "half")
        ]
        assert ends[0] == ends[1], name


@pytest.mark.parametrize(
    "optimizer", [pytest.param(each, id=each.spec.name) for each in combined("optimizer")]
)
def test_planned_memory_of_growth_matches_the_run(optimizer: Any, tmp_path: Path) -> None:
    phase = {**section(manager().registry.get("phase", "progressive")), "steps_per_stack": 2}
    config = {
        "name": "planned",
        "backend": "torch",
        "data": source(TEXT, tmp_path),
        "model": model(TEXT, float_parts(optimizer.spec.accepts), True, optimizer.spec.name),
        "optimizer": section(optimizer),
        "phases": [phase],
    }
    path = tmp_path / "planned.yaml"
    path.write_text(dump_yaml(config))
    stepped: list[Any] = []
    watch = register_optimizer_step_pre_hook(lambda optimizer, *_: stepped.append(type(optimizer)))
    try:
        stages = GrowthPlan(load_config(path).config).stages()
    finally:
        watch.remove()
    assert stepped == []
    run(config, tmp_path / "run")
    state = read_checkpoint(CheckpointStore(tmp_path / "run" / "checkpoints").latest()).state
    kept = state_bytes(state["phase"]["loop"]["optimizer"])
    planned = stages[-1].memory.optimizer
    # Between steps a wrapper that defers steps holds no sum of gradients, and one with a window of
    # steps has filled only part of it.
    grows = {"max_batch_draws", "window"} & set(options_of(optimizer))
    assert planned > kept if grows else planned == kept


def state_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    items = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    return sum(map(state_bytes, items))


def run(config: Mapping[str, Any], directory: Path, resume: str | None = None) -> RunReport:
    path = directory.with_suffix(".yaml")
    path.write_text(dump_yaml(dict(config)))
    request = RunRequest(directory=None if resume else directory, resume=resume, reporter=Silent)
    return train(load_config(path).config, request)


def test_the_product_holds_every_registered_component() -> None:
    for kind in ("backend", "optimizer", "masking", "phase"):
        names = {found.spec.name for found in combined(kind)}
        assert names
        assert names <= {
            part for combination in COMBINATIONS for part in str(combination.id).split("-")
        }


def test_models_of_every_kind_of_data_meet() -> None:
    for data in KINDS_OF_DATA.values():
        names = [found.spec.name for found in combined("optimizer")]
        met = {model(data, [], False, name)["name"] for name in names}
        assert met == {each["name"] for each in data.models}


def test_every_two_components_that_work_here_meet_each_time() -> None:
    met = set().union(*(pairs(str(each.id).split("-")) for each in COMBINATIONS if not each.marks))
    kinds = [combined(kind) for kind in ("backend", "optimizer", "masking", "phase")]
    kinds[0] = quick_backends()
    for (i, some), (j, others) in combinations(enumerate(kinds), 2):
        for one, other in product(some, others):
            if (i, j) == (2, 3) and not go_together(one, other):
                continue
            assert pair((i, one.spec.name), (j, other.spec.name)) in met
