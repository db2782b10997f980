"""Fine-tune with every registered optimizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from arb_ternary.config.choice import OptimizerChoice
from arb_ternary.config.options import DEFAULT_CHOICE
from arb_ternary.config.structure import options_class
from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary.optim.protocol import build_optimizer, collect_trainable, inner_optimizers
from arb_ternary.optim.ternary import TernaryOptimizer
from arb_ternary.plugins.manager import manager
from arb_ternary_testing.component import make_choice
from arb_ternary_train.loading import load_config
from arb_ternary_train.optim.factored import with_factors
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_train.schedules import scheduled_groups

FLOATS = ["embedding", "head", "norms", "linears"]
MODEL = {"width": 16, "layers": 1, "heads": 2, "max_length": 16}
OPTIMIZERS = list(manager().registry.all("optimizer"))
NAMES = [found.spec.name for found in OPTIMIZERS]


def section(found: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return sections of a model and of its optimizer; a wrapper gets one to wrap."""
    name = found.spec.name
    accepts = found.spec.accepts
    cls = options_class(found.spec)
    fields = attrs.fields(attrs.resolve_types(cls)) if cls is not None else ()
    wraps = any(
        field.default is attrs.NOTHING
        and field.type is OptimizerChoice
        and DEFAULT_CHOICE not in field.metadata
        for field in fields
    )
    parts = {frozenset({"ternary"}): [], frozenset({"float"}): FLOATS}.get(
        accepts, ["norms", "head"]
    )
    inner = {} if not wraps else {"inner": "split" if "ternary" in accepts else "adamw"}
    return {"name": "decoder", "float_parts": parts, **MODEL}, {"name": name, **inner}


def made(found: Any) -> tuple[torch.nn.Module, Any]:
    model, optimizer = section(found)
    torch.manual_seed(0)
    return make_choice("model", model.pop("name"), model).build(20), make_choice(
        "optimizer", optimizer.pop("name"), optimizer
    )


@pytest.mark.parametrize("found", OPTIMIZERS, ids=NAMES)
def test_rate_factor_works_with_every_optimizer(found: Any) -> None:
    model, choice = made(found)
    trainable = collect_trainable(model)
    names = [name for part in trainable.parts.values() for name in part]
    ours = {name for name in names if ".attention." in name}
    built = build_optimizer("optimizer", with_factors(choice, dict.fromkeys(ours, 0.25)), trainable)
    whole = build_optimizer("optimizer", choice, trainable)

    def rates(optimizer: Any) -> dict[int, float]:
        """Return learning rates by the identity of a module or parameter."""
        found: dict[int, float] = {}
        for each in inner_optimizers(optimizer):
            for index, group in enumerate(each.param_groups):
                if not any(group is scheduled for scheduled in scheduled_groups(optimizer)):
                    continue
                if isinstance(each, TernaryOptimizer):
                    found |= {id(module): group["lr"] for module in each.modules_of(index)}
                else:
                    found |= {id(parameter): group["lr"] for parameter in group["params"]}
        return found

    parts = {**trainable.ternary, **trainable.floats}
    by_factor = rates(built)
    usual = rates(whole)
    for name, part in parts.items():
        assert by_factor[id(part)] == usual[id(part)] * (0.25 if name in ours else 1.0), name


@pytest.mark.slow
@pytest.mark.parametrize("found", OPTIMIZERS, ids=NAMES)
def test_run_with_factors_and_frozen_parts_resumes_bitwise(found: Any, tmp_path: Path) -> None:
    model, optimizer = section(found)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 30)
    phase = {"name": "standard", "steps": 6, "batch_size": 2, "block_size": 8, "eval_every": 100}
    options = {
        "freeze": ["*.query", "head"],
        "rate_factors": {"*.attention": 0.5, "embedding": 0.25},
    }
    config = {
        "data": {"name": "text", "path": str(tmp_path / "text.txt"), "tokenizer": "bytes"},
        "model": model,
        "optimizer": optimizer,
        "phases": [{**phase, **options}],
        "checkpoint": {"every": 1, "keep": 99},
    }
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    whole = tmp_path / "whole"
    run = tmp_path / "run"
    loaded = load_config(tmp_path / "run.yaml").config
    for directory in (whole, run):
        train(loaded, RunRequest(directory=directory, backend="torch", reporter=Silent))
    for step in sorted((run / "checkpoints").glob("step-*"))[3:]:
        shutil.rmtree(step)
    train(loaded, RunRequest(directory=run, backend="torch", reporter=Silent, resume="auto"))
    for file in ("model.safetensors", "state.safetensors"):
        last = [
            sorted((directory / "checkpoints").glob("step-*"))[-1] for directory in (whole, run)
        ]
        assert (last[0] / file).read_bytes() == (last[1] / file).read_bytes()
