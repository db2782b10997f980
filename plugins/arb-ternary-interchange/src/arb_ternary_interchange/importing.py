"""Import: a model that another program has written becomes a run with one checkpoint, at step 0."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen
from torch import nn

from arb_ternary.backends.select import request_backend, select, use_backend
from arb_ternary.config.choice import Choice, ModelChoice
from arb_ternary.config.fields import to_plain
from arb_ternary.config.options import option
from arb_ternary.config.structure import structure
from arb_ternary.config.yaml_document import Document, dump_yaml
from arb_ternary.errors import ArbError, DataError, UsageProblem
from arb_ternary.plugins.discovery import install_command
from arb_ternary.plugins.manager import manager
from arb_ternary.specs import ImporterSpec, ModelSpec
from arb_ternary.ternary.models import seed_votes
from arb_ternary_interchange.allocation_limit import AllocationLimit
from arb_ternary_interchange.components import named_importer
from arb_ternary_interchange.fine_tuning import fine_tuning_config
from arb_ternary_interchange.protocols import FetchesSources, ImportedModel, Importer
from arb_ternary_train.build import built_module, undrawn, versions_of
from arb_ternary_train.checkpoint import CheckpointStore
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.model_source import ModelSource
from arb_ternary_train.model_state import ModelState
from arb_ternary_train.run_state import RunState
from arb_ternary_train.seeding import global_rng_state, seed_everything

#: Seed of the global generators and of the run.
_SEED: Final = 0


@frozen(eq=False)
class Source:
    """A model to import.

    Attributes:
        name: name of the importer.
        importer: the importer.
        path: the file or folder on this machine.
        shown: the source in the user's words.
    """

    name: str
    importer: Importer
    path: Path
    shown: str


@frozen(kw_only=True)
class _ModelSection:
    model: ModelChoice = option(help="the network")


# --- finding the importer


def find_source(source: str, name: str | None = None, options: Sequence[str] = ()) -> Source:
    """Return the importer for ``source`` and its place on this machine.

    Args:
        source: a file, a folder, or an address (``SCHEME://...``) that an importer fetches.
        name: name of the importer; None = the one that recognises the source.
        options: options of the importer, ``name=value`` each.

    Raises:
        UsageProblem: there is no such file or importer, or no importer takes such addresses.
        EnvironmentProblem: the plugin that would read it is not installed.
        DataError: no importer recognises it, or several do.
    """
    scheme, separator, _ = source.partition("://")
    if separator:
        name = name or _importer_of_scheme(scheme, source)
        importer = named_importer(name, options)
        if not isinstance(importer, FetchesSources):
            raise UsageProblem(
                f"{source}: the importer {name!r} reads files and folders, not addresses"
            )
        return Source(name, importer, importer.fetch(source), source)
    path = Path(source)
    if not path.exists():
        raise UsageProblem(f"{source}: there is no such file or folder")
    name = name or _recognising_importer(path)
    return Source(name, named_importer(name, options), path, source)


def _importers() -> list[ImporterSpec]:
    found: list[Any] = [registered.spec for registered in manager().registry.all("importer")]
    return found


def _importer_of_scheme(scheme: str, source: str) -> str:
    """Return the name of the importer that fetches addresses of a scheme."""
    names = [spec.name for spec in _importers() if scheme in spec.schemes]
    if len(names) == 1:
        return names[0]
    if names:
        raise UsageProblem(f"{source}: several importers take it", _choose_one(names))
    if scheme in manager().registry.not_installed("importer"):
        named_importer(scheme)  # raises an error that says how to install it
    known = ", ".join(f"{each}://" for spec in _importers() for each in spec.schemes)
    raise UsageProblem(
        f"{source}: no importer takes addresses that begin with {scheme}://",
        f"known: {known or 'none'}",
    )


def _recognising_importer(path: Path) -> str:
    """Return the name of the importer that recognises a file or folder."""
    unusable: list[ArbError] = []
    names = []
    for spec in _importers():
        try:
            importer = named_importer(spec.name)
        except ArbError as error:
            unusable.append(error)
            continue
        if importer.recognises(path):
            names.append(spec.name)
    if len(names) == 1:
        return names[0]
    if names:
        raise DataError(f"{path}: several importers recognise it", _choose_one(names))
    absent = manager().registry.not_installed("importer")
    hints = [f"installed: {', '.join(spec.name for spec in _importers()) or 'none'}"]
    for name, distribution in absent.items():
        hints.append(f"not installed: {name} ({install_command(distribution)})")
    hints += [error.what for error in unusable]
    raise DataError(f"{path}: no installed importer knows this format", "\n".join(hints))


def _choose_one(names: Sequence[str]) -> str:
    return f"Say which: --format {' or --format '.join(names)}"


# --- reading the model


def read_model(source: str) -> ModelSource:
    """Return what is known of a model that another program has written, before its weights are
    read.

    Raises:
        ArbError: as :func:`find_source` and :func:`load` do.
    """
    found = find_source(source)
    imported = load(found)
    return ModelSource(
        shown=source,
        model=imported.model,
        vocabulary_size=imported.vocabulary_size,
        attachments=imported.attachments,
        notes=imported.notes,
        build=partial(filled_model, imported, found),
    )


def load(source: Source) -> ImportedModel:
    """Read the model in ``source``, except for its weights, and check what the importer returns.

    Raises:
        DataError: it is damaged, or this program cannot hold such a model.
        ArbError: the importer does not keep its protocol.
    """
    imported = source.importer.load(source.path)
    if not isinstance(imported, ImportedModel):
        raise ArbError(
            f"importer {source.name!r}: it returned a {type(imported).__name__}, not an "
            f"ImportedModel"
        )
    for name in imported.attachments:
        if not re.fullmatch(r"[a-z][a-z0-9_-]*", name) or name in ("run", "result"):
            raise DataError(f"{source.shown}: an attachment cannot be called {name!r}")
    return imported


# --- the run


def import_model(source: Source, destination: Path) -> tuple[str, ...]:
    """Make a run directory of the model in ``source``. Return what was lost or rounded, one
    sentence each.

    The run's config trains the model further: ``arb train RUN/config.yaml --init-from RUN --run-dir
    NEW``. After any failure there is no directory. The global generators are seeded: the same
    source makes the same run.

    Raises:
        UsageProblem: ``destination`` exists.
        DataError: the source is damaged, or this program cannot hold such a model.
        ConfigError: the model has options that the installed model does not know.
        ArbError: the directory cannot be written.
    """
    files = RunDirectory(destination)
    if destination.exists():
        raise UsageProblem(
            f"{destination}: exists already",
            "An import makes a new directory; choose another name.",
        )
    imported = load(source)
    backend = select(request_backend(device="cpu"))
    with use_backend(backend.name), torch.no_grad():
        model = filled_model(imported, source)
        config = fine_tuning_config(imported, model, files.path.resolve(), source.shown, _SEED)
        record = {
            "name": config.name,
            "seed": config.seed,
            "device": config.device,
            "backend": {"name": backend.name, "source": backend.source},
            "data": {"name": config.data.name, "fingerprint": None},
            "vocabulary_size": imported.vocabulary_size,
            "threads": {"loops": {}, "last": None},
            "versions": versions_of(config, backend.name),
            "init_from": None,
            "imported": {
                "source": source.shown,
                "importer": source.name,
                "notes": list(imported.notes),
            },
        }

        def add_checkpoint(made: RunDirectory) -> None:
            phase: Any = config.phases[0].options
            made.metrics_file.touch()
            state = RunState(
                evaluation_shape=(phase.batch_size, phase.block_size),
                rng=global_rng_state(torch.device("cpu")),
            )
            CheckpointStore(made.checkpoints).save(
                0,
                ModelState(model),
                state.to_dict(),
                {"imported": source.shown, "vocabulary_size": imported.vocabulary_size},
            )

        files.create(dump_yaml(to_plain(config)), record, imported.attachments, add_checkpoint)
    return imported.notes


def filled_model(imported: ImportedModel, source: Source) -> nn.Module:
    """Build the model that ``source`` holds, in evaluation mode, on the CPU. The global generators
    are seeded.

    Raises:
        ConfigError: it has options that the installed model does not know.
        DataError: the source is damaged.
    """
    choice = model_choice(imported.model, source.shown)
    seed_everything(_SEED)
    with undrawn(), AllocationLimit(source.shown, _size_of(source.path)):
        model = built_module(choice, imported.vocabulary_size)
    seed_votes(model, _SEED)  # an importer that has read control words writes these over
    imported.fill(model)
    model.eval()
    return model


def model_choice(model: Mapping[str, Any], source: str) -> Choice[ModelSpec]:
    """Return the choice of a ``model:`` section. ``source`` is what errors name.

    Raises:
        ConfigError: it has options that the installed model does not know.
    """
    document = Document({"model": dict(model)}, source=source)
    return structure(_ModelSection, document, manager().registry).model


def _size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size
