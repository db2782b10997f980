"""Export: a model, written by one of the exporters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from arb_ternary.config.fields import to_plain
from arb_ternary.errors import ArbError
from arb_ternary_interchange.components import named_exporter
from arb_ternary_interchange.importing import model_choice
from arb_ternary_interchange.protocols import Exporter, LosesMetadata
from arb_ternary_train.build import versions_of
from arb_ternary_train.config import RunConfig
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.model_source import OpenModel, open_model


@frozen
class Exported:
    """The outcome of an export.

    Attributes:
        summary: the exporter and what was exported, on a line.
        notes: what was lost or rounded, by the import of the model and by its export, one sentence
            each.
    """

    summary: str
    notes: tuple[str, ...]


def export_model(
    source: str | Path, destination: Path, name: str, options: Sequence[str] = ()
) -> Exported:
    """Write a model to ``destination``.

    Args:
        source: as for ``arb_ternary_train.model_source.read_source``.
        destination: a file or folder, depending on the exporter.
        name: name of the exporter.
        options: options of the exporter, ``name=value`` each.

    Raises:
        UsageProblem: there is no such exporter or source.
        ConfigError: an option is wrong.
        ArbError: the source is damaged, or cannot be written in this form.
    """
    exporter = named_exporter(name, options)
    opened = open_model(source, accumulators=getattr(exporter, "writes_accumulators", True))
    return export_opened(opened, destination, name, exporter)


def export_opened(opened: OpenModel, destination: Path, name: str, exporter: Exporter) -> Exported:
    """Write a model that has been read; ``name`` is that of the exporter.

    Raises:
        ArbError: the source is damaged, or cannot be written in this form.
    """
    if opened.run is None:
        origin = opened.source.shown
        metadata = _foreign_metadata(opened)
    else:
        step = opened.run.checkpoint.step
        origin = f"step {step} of {opened.run.directory.path}"
        metadata = export_metadata(opened.run.config, opened.run.directory, step)
    exporter.export(opened.module, destination, metadata)
    lost = exporter.unmapped(metadata) if isinstance(exporter, LosesMetadata) else ()
    return Exported(f"{name}, {origin}", (*opened.source.notes, *lost))


def _foreign_metadata(opened: OpenModel) -> dict[str, Any]:
    """Return :func:`export_metadata` of a model that is no run: its name is that of the file."""
    source = opened.source
    path = Path(source.shown).resolve()
    return {
        "name": path.stem if path.is_file() else path.name,
        "step": 0,
        "model": dict(source.model),
        "vocabulary_size": source.vocabulary_size,
        **source.attachments,
        "versions": versions_of(model_choice(source.model, source.shown), opened.backend),
    }


def export_metadata(config: RunConfig, directory: RunDirectory, step: int) -> dict[str, Any]:
    """Return the metadata that an exporter receives besides the model: facts of the run in
    ``directory`` at ``step``.

    Raises:
        ArbError: a file of the run is damaged.
    """
    record = directory.record()
    attachments = directory.attachments()
    if not isinstance(attachments.get("tokenizer", {}), dict):
        raise ArbError(f"{directory.attachment_file('tokenizer')}: not a JSON object")
    tasks = directory.task_results()
    return {
        "name": config.name,
        "step": step,
        **({"tasks": tasks} if tasks else {}),
        "model": to_plain(config.model, given=False),
        "vocabulary_size": record["vocabulary_size"],
        **attachments,
        "versions": record["versions"],
    }
