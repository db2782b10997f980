"""Open a model to compute with: that of a run, or one that another program has written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import nn

from arb_ternary.backends.select import request_backend, select, use_backend
from arb_ternary.config.fields import to_plain
from arb_ternary.errors import ArbError, EnvironmentProblem, UsageProblem
from arb_ternary.plugins.manager import manager
from arb_ternary.specs import load_target
from arb_ternary.ternary.huge_pages import move_to_huge_pages
from arb_ternary_train.build import without_accumulators
from arb_ternary_train.config import RunConfig
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.hookspecs import arb_register_model_readers
from arb_ternary_train.loading import load_config
from arb_ternary_train.model_state import run_of
from arb_ternary_train.precision import resolve_device
from arb_ternary_train.restore import TrainedRun, load_run


@frozen(eq=False, kw_only=True)
class ModelSource:
    """A model that can be opened. Its weights have not been read.

    Attributes:
        shown: the source as the user wrote it.
        model: the ``model:`` section of a run's config, with its ``name``.
        vocabulary_size: number of ids in the model's vocabulary.
        attachments: plain JSON by name, as a run keeps it: ``{"tokenizer": ...}``, or nothing.
        notes: what could not be mapped or was rounded, one sentence each.
        build: builds a model that another program has written, with its weights, on the CPU; None
            for a run.
    """

    shown: str
    model: Mapping[str, Any]
    vocabulary_size: int
    attachments: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    build: Callable[[], nn.Module] | None = None


@frozen(eq=False)
class OpenModel:
    """A model to compute with.

    Attributes:
        source: what it was opened from.
        module: the model in evaluation mode, on ``device``.
        device: where the model is.
        backend: name of the kernel backend that it was loaded for.
        run: the run and its checkpoint; None for a model that another program has written.
    """

    source: ModelSource
    module: nn.Module
    device: torch.device
    backend: str
    run: TrainedRun | None = None


def find_run(source: str | Path) -> RunDirectory | None:
    """Return the run that ``source`` names, itself or by a checkpoint; None for an address, and for
    a file or folder that is no run.

    Raises:
        UsageProblem: there is nothing at ``source``, or it is a checkpoint outside a run.
    """
    path = Path(source)
    directory = run_of(path)
    if directory is not None or is_address(str(source)):
        return directory
    if os.path.lexists(path / "manifest.json"):
        return RunDirectory.existing(path.resolve().parent.parent)
    if not os.path.lexists(path):
        try:
            return RunDirectory.existing(path)
        except UsageProblem as error:
            what = f"{source}: there is no such file or folder"
            raise UsageProblem(what, error.hint) from error
    return None


def is_address(source: str) -> bool:
    """Whether a source is an address, such as ``hf://org/name``."""
    scheme, separator, rest = source.partition("://")
    return bool(separator) and scheme.isalnum() and not any(map(str.isspace, rest))


def read_source(source: str | Path) -> ModelSource:
    """Read what is known of a model before its weights are.

    Args:
        source: a run directory, a checkpoint, or whatever a registered reader takes: with
            ``arb-ternary-interchange`` a GGUF file, a Hugging Face folder, a safetensors file, or
            ``hf://org/name``.

    Raises:
        UsageProblem: there is no such file or folder.
        EnvironmentProblem: it is no run, and no installed plugin reads other models.
        ArbError: it is damaged, or holds no model.
    """
    directory = find_run(source)
    if directory is not None:
        return _source_of_run(directory, load_config(directory.config_file).config, str(source))
    return _read_foreign(str(source))


def open_model(
    source: str | Path,
    *,
    backend: str | None = None,
    device: str | None = None,
    accumulators: bool = False,
) -> OpenModel:
    """Load a model to compute with. Nothing is written.

    Args:
        source: as for :func:`read_source`.
        backend: kernel backend; None: that of the environment, of the run, or the best one.
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``mps``; None: the run's own, or the CPU.
        accumulators: as for :func:`arb_ternary_train.restore.load_run`.

    Raises:
        ArbError: as :func:`read_source` and :func:`arb_ternary_train.restore.load_run` do.
    """
    if find_run(source) is not None:
        run = load_run(Path(source), backend=backend, device=device, accumulators=accumulators)
        move_to_huge_pages(run.model)
        found = _source_of_run(run.directory, run.config, str(source))
        return OpenModel(found, run.model, run.device, run.backend, run)

    found = _read_foreign(str(source))
    assert found.build is not None
    place = resolve_device(device or "cpu")
    chosen = select(request_backend(command_line=backend, device=place.type))
    with use_backend(chosen.name), without_accumulators(not accumulators), torch.no_grad():
        module = found.build().to(place)
    move_to_huge_pages(module)
    return OpenModel(found, module.eval(), place, chosen.name)


def _source_of_run(directory: RunDirectory, config: RunConfig, shown: str) -> ModelSource:
    model = to_plain(config.model, given=False)
    return ModelSource(
        shown=shown,
        model=model if isinstance(model, Mapping) else {"name": model},
        vocabulary_size=int(directory.record()["vocabulary_size"]),
        attachments=directory.attachments(),
    )


def _read_foreign(source: str) -> ModelSource:
    """Return what the first reader that reads ``source`` says."""
    registry = manager().registry
    problem: ArbError | None = None
    for _, target in registry.results(arb_register_model_readers.__name__):
        read: Callable[[str], ModelSource] = load_target("model reader", target)
        try:
            return read(source)
        except ArbError as error:
            problem = problem or error
    if problem is not None:
        raise problem
    # The command comes with the reader, so its absence is explained in the same way.
    absent = registry.missing("command", "command", "import", ())
    raise EnvironmentProblem(
        f"{source}: is not a run, and nothing here reads other models: {absent.what}", absent.hint
    )
