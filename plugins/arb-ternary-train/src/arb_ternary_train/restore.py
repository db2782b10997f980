"""Loads a trained model from its run directory: to evaluate, generate from or export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import nn

from arb_ternary.backends.select import request_backend, select, use_backend
from arb_ternary.errors import DataError
from arb_ternary.protocols.data import DataSource, MaskingStrategy
from arb_ternary_train.build import (
    build_model,
    configured_backend,
    require_protocol,
    undrawn,
    without_accumulators,
)
from arb_ternary_train.checkpoint import Checkpoint, read_checkpoint
from arb_ternary_train.config import RunConfig
from arb_ternary_train.context import default_evaluation_shape
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.evaluate import Evaluation, evaluate
from arb_ternary_train.exact_arithmetic import exact_arithmetic
from arb_ternary_train.loading import load_config
from arb_ternary_train.model_state import checkpoint_path, load_state
from arb_ternary_train.precision import resolve_device
from arb_ternary_train.report import baselines_of
from arb_ternary_train.run_state import RunState, restore_structures
from arb_ternary_train.threads import recorded_threads


@frozen(eq=False)
class TrainedRun:
    """A trained model and its run.

    Attributes:
        directory: the run directory.
        config: the config of the run.
        checkpoint: the checkpoint that the weights come from.
        model: the model in evaluation mode, on ``device``.
        backend: name of the kernel backend in use.
        device: where the model is.
        record: the content of ``run.json``.
    """

    directory: RunDirectory
    config: RunConfig
    checkpoint: Checkpoint
    model: nn.Module
    backend: str
    device: torch.device
    record: dict[str, Any]


def load_run(
    path: Path, *, backend: str | None = None, device: str | None = None, accumulators: bool = False
) -> TrainedRun:
    """Load the model of a run directory or of one of its checkpoints. The data is not needed.

    Args:
        path: a run directory (its newest checkpoint is loaded) or a checkpoint folder in one.
        backend: kernel backend; overrides environment and config.
        device: device; overrides the config.
        accumulators: load the accumulators of ternary modules too, a byte per weight, which only
            training needs. Without them backward raises UsageProblem, and a state dict of the model
            lacks them.

    Raises:
        UsageProblem: the path is neither.
        CheckpointError: the checkpoint is damaged or missing.
    """
    inside = not RunDirectory(path).exists() and (path / "manifest.json").exists()
    directory = RunDirectory.existing(path.resolve().parent.parent if inside else path)
    checkpoint = read_checkpoint(checkpoint_path(path))
    config = load_config(directory.config_file).config
    place = resolve_device(config.device if device is None else device)
    request = request_backend(
        command_line=backend, config=configured_backend(config), device=place.type
    )
    selection = select(request)
    record = directory.record()
    with undrawn(), without_accumulators(not accumulators), use_backend(selection.name):
        model = build_model(config, int(record["vocabulary_size"]), selection.name, place)
        model = restore_structures(model, checkpoint, config, place)
    load_state(model, checkpoint.model, str(checkpoint.path / "model.safetensors"))
    model.eval()
    return TrainedRun(directory, config, checkpoint, model, selection.name, place, record)


def measure(run: TrainedRun, batches: int | None = None) -> tuple[Evaluation, Mapping[str, float]]:
    """Evaluate on the run's held-out samples, as the run itself does; return also baselines.

    Raises:
        DataError: the data is not what the run was trained with.
    """
    data: DataSource = require_protocol(run.config.data.build(), DataSource, run.config.data)
    masking: MaskingStrategy = require_protocol(
        run.config.masking.build(), MaskingStrategy, run.config.masking
    )
    recorded = run.record["data"]["fingerprint"]
    if recorded is not None:
        found = str(data.fingerprint())
        if found != recorded:
            raise DataError(
                f"data {data.name!r}: its fingerprint is {found[:12]}..., that of the run's data "
                f"is {recorded[:12]}...",
                "The text or its tokenizer has changed since the run began, so a loss on it could "
                "not be compared.",
            )
    known = int(run.record["vocabulary_size"])
    if recorded is None and data.vocabulary_size > known:
        raise DataError(
            f"data {data.name!r}: it has {data.vocabulary_size:,} ids, and the model {known:,}",
            f"{run.directory.config_file}: give the data the model's tokenizer.",
        )
    shape = RunState.of(run.checkpoint).evaluation_shape
    if shape is None:
        shape = default_evaluation_shape(run.model, data)
    batch_size, block_size = shape
    with recorded_threads(run.record), exact_arithmetic(run.config.exact):
        result = evaluate(
            run.model,
            data,
            masking,
            batch_size=batch_size,
            block_size=block_size,
            batches=batches,
            seed=run.config.seed,
            device=run.device,
            step=run.checkpoint.step,
        )
    return result, baselines_of(data, masking, shape)
