"""Export: the model of a run, written by one of the exporters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arb_ternary.config.fields import to_plain
from arb_ternary.errors import ArbError
from arb_ternary_interchange.components import named_exporter
from arb_ternary_interchange.protocols import LosesMetadata
from arb_ternary_train.config import RunConfig
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.restore import load_run


def export_run(run: Path, destination: Path, name: str, options: Sequence[str] = ()) -> str:
    """Write the model of ``run`` to ``destination`` and return what was written, and a line for
    each thing that this form cannot hold.

    Args:
        run: a run directory or a checkpoint.
        destination: a file or folder, depending on the exporter.
        name: name of the exporter.
        options: options of the exporter, ``name=value`` each.

    Raises:
        UsageProblem: there is no such exporter or run.
        ConfigError: an option is wrong.
    """
    exporter = named_exporter(name, options)
    trained = load_run(run, accumulators=getattr(exporter, "writes_accumulators", True))
    metadata = export_metadata(trained.config, trained.directory, trained.checkpoint.step)
    exporter.export(trained.model, destination, metadata)
    lines = [f"{name}, step {trained.checkpoint.step} of {trained.directory.path}"]
    if isinstance(exporter, LosesMetadata):
        lines += [f"note: {lost}" for lost in exporter.unmapped(metadata)]
    return "\n".join(lines)


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
    return {
        "name": config.name,
        "step": step,
        "model": to_plain(config.model, given=False),
        "vocabulary_size": record["vocabulary_size"],
        **attachments,
        "versions": record["versions"],
    }
