"""Parts that a new stack adds, and whether the optimizer can train them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from arb_ternary.cli.main import main
from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import collect_trainable
from arb_ternary_progressive.builder import ProgressiveRackBuilder
from arb_ternary_progressive.config import PRECISIONS, ProgressivePhaseConfig
from arb_ternary_progressive.growth import Stage, release
from arb_ternary_progressive.plan import GrowthPlan
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train

SMALL: dict[str, Any] = {"width": 16, "layers": 1, "heads": 2, "max_length": 16}
MODELS: dict[str, dict[str, Any]] = {
    "ternary": {**SMALL, "group_size": 32},
    "biased": {**SMALL, "group_size": 32, "query_key_value_bias": True},
    "gated": {
        **SMALL,
        "group_size": 32,
        "attention": "decoupled",
        "sem_dim": 2,
        "geo_dim": 2,
        "attention_gate": True,
    },
    "float": {**SMALL, "float_parts": ["embedding", "head", "norms", "linears"]},
}
SPLIT = {"name": "split", "ternary": "scaled_votes", "float": {"name": "adamw", "lr": 0.01}}
ADAPTERS: list[dict[str, Any]] = [
    {},
    {"qlora_enabled": True},
    {"progressive_qlora": True},
    {"progressive_qlora": True, "trunk_strategy": "qlora"},
    {"progressive_qlora": True, "enabled": False},
]


def growths() -> Iterator[dict[str, Any]]:
    """Yield the options of every growth that is possible."""
    for precision, adapters in product((None, *PRECISIONS), ADAPTERS):
        growth = {"new_stack_precision": precision, **adapters}
        if not adapters:
            if precision != "nvfp4":
                yield growth
            continue
        if precision == "nvfp4" and "qlora_enabled" not in adapters:
            continue
        yield {**growth, "adapter_dtype": "float32"}
        yield {**growth, "adapter_dtype": "ternary"}


GROWTHS = list(growths())


def named(options: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in options.items())


@pytest.mark.parametrize("target", [1, 2])
@pytest.mark.parametrize(
    "model",
    [
        "ternary",
        "float",
        pytest.param("biased", marks=pytest.mark.extended),
        pytest.param("gated", marks=pytest.mark.extended),
    ],
)
@pytest.mark.parametrize("options", GROWTHS, ids=named)
def test_added_parts_are_those_that_learn(options: dict[str, Any], model: str, target: int) -> None:
    config = ProgressivePhaseConfig(
        target_stacks=target, qlora_rank=2, progressive_qlora_rank=2, **options
    )
    made = DecoderConfig(**MODELS[model])
    decoder = Decoder(made, 32)
    native = set(collect_trainable(decoder).parts)
    builder = ProgressiveRackBuilder.from_model(decoder, config)
    rack = builder.build_rack()
    learned: set[str] = set()
    for index in range(target):
        if index:
            builder.add_stack()
        if config.enabled:
            Stage.enter(builder, config.trunk_strategy)
        elif index == target - 1:
            Stage.whole(rack)
        else:
            continue
        learned |= set(collect_trainable(rack).parts)
    assert native | config.added_parts(followed=False) == native | learned
    assert config.added_parts(followed=False) <= learned
    run: Any = SimpleNamespace(model=SimpleNamespace(options=made))
    planned = config.planned_in(run, made.planned())
    assert planned.kinds == learned
    release(rack)
    assert planned.kinds | planned.idle == set(collect_trainable(rack).parts)
    assert native | config.added_parts(followed=True) == native | set(collect_trainable(rack).parts)


def write(
    folder: Path, model: str, optimizer: Any, growth: dict[str, Any], before: tuple[Any, ...] = ()
) -> Path:
    text = folder / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 30)
    brief = {"batch_size": 2, "block_size": 8, "eval_every": 0}
    phase = {"name": "progressive", "target_stacks": 2, "steps_per_stack": 2, **brief, **growth}
    earlier = [{"name": each, "steps": 1, **brief} for each in before]
    config = {
        "name": "later",
        "backend": "torch",
        "data": {"name": "text", "path": str(text), "tokenizer": "bytes"},
        "model": {"name": "decoder", **MODELS[model]},
        "optimizer": optimizer,
        "checkpoint": {"every": 1, "keep": 9},
        "phases": [*earlier, phase],
    }
    path = folder / "later.yaml"
    path.write_text(dump_yaml(config))
    return path


LATER = [
    ("ternary", {"new_stack_precision": "full"}),
    ("ternary", {"new_stack_precision": "half"}),
    ("ternary", {"trunk_strategy": "qlora", "progressive_qlora": True}),
    ("ternary", {"new_stack_precision": "qlora", "building_mode": "prepend"}),
    ("float", {"new_stack_precision": "ternary"}),
    (
        "float",
        {"new_stack_precision": "qlora", "qlora_base": "ternary", "adapter_dtype": "ternary"},
    ),
]


@pytest.mark.parametrize(
    ("model", "growth"), LATER, ids=[f"{model}-{named(growth)}" for model, growth in LATER]
)
def test_split_trains_later_parts_and_resumes_before_them(
    model: str, growth: dict[str, Any], tmp_path: Path
) -> None:
    path = write(tmp_path, model, SPLIT, growth)
    assert len(GrowthPlan(load_config(path).config).stages()) == 2
    train(load_config(path).config, RunRequest(directory=tmp_path / "run", reporter=Silent))
    checkpoints = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert [each.name[-1] for each in checkpoints] == ["1", "2", "3", "4"]
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    for each in checkpoints[1:]:
        shutil.rmtree(tmp_path / "again" / "checkpoints" / each.name)
    first = tmp_path / "again" / "checkpoints" / checkpoints[0].name
    train(load_config(path).config, RunRequest(resume=str(first), reporter=Silent))
    for name in ("model.safetensors", "state.safetensors"):
        ends = [
            (tmp_path / run / "checkpoints" / checkpoints[-1].name / name).read_bytes()
            for run in ("run", "again")
        ]
        assert ends[0] == ends[1], name
    for exporter in ("safetensors", "merged"):
        command = [
            "export",
            str(tmp_path / "run"),
            str(tmp_path / f"{exporter}.safetensors"),
            "--format",
            exporter,
        ]
        assert main(command) == 0


def test_split_ignores_parts_of_a_later_phase(tmp_path: Path) -> None:
    path = write(tmp_path, "ternary", SPLIT, {"new_stack_precision": "full"}, before=("standard",))
    report = train(
        load_config(path).config, RunRequest(directory=tmp_path / "run", reporter=Silent)
    )
    assert report.steps == 5


@pytest.mark.parametrize(
    ("model", "optimizer", "where", "part", "growth"),
    [
        ("ternary", "scaled_votes", "optimizer", "float", {"new_stack_precision": "full"}),
        (
            "ternary",
            "scaled_votes",
            "optimizer",
            "float",
            {"trunk_strategy": "qlora", "progressive_qlora": True},
        ),
        ("float", "adamw", "optimizer", "ternary", {"new_stack_precision": "ternary"}),
        (
            "float",
            {**SPLIT, "ternary": "adamw"},
            "optimizer.ternary",
            "ternary",
            {"new_stack_precision": "ternary"},
        ),
        (
            "ternary",
            {**SPLIT, "float": "sign_votes"},
            "optimizer.float",
            "float",
            {"new_stack_precision": "half"},
        ),
    ],
)
def test_config_refuses_an_optimizer_of_other_later_parts(
    model: str, optimizer: Any, where: str, part: str, growth: dict[str, Any], tmp_path: Path
) -> None:
    path = write(tmp_path, model, optimizer, growth)
    noun = {"ternary": "ternary modules", "float": "float parameters"}[part]
    with pytest.raises(
        ConfigError, match=rf"{where}: '\w+' cannot train {noun}, and the model has some"
    ):
        load_config(path)
