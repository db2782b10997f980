"""Export: a trained run through an exporter, and the exporter ``safetensors``, which training
registers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from arb_ternary.config.fields import to_plain
from arb_ternary.errors import ArbError
from arb_ternary_train.checkpoint_format import write_tensors
from arb_ternary_train.config import RunConfig
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.durable import replacing
from arb_ternary_train.model_state import ModelState
from arb_ternary_train.named_component import named_exporter
from arb_ternary_train.restore import load_run


def export_run(run: Path, destination: Path, name: str, options: Sequence[str] = ()) -> str:
    """Write the model of ``run`` (a run directory or a checkpoint) to ``destination`` with the
    exporter ``name``.

    Args:
        run: where the model is.
        destination: a file or folder, as the exporter likes.
        name: of the exporter.
        options: of the exporter, ``name=value`` each.

    Returns:
        One line about what was written.

    Raises:
        UsageProblem: there is no such exporter or run.
        ConfigError: an option is wrong.
    """
    exporter = named_exporter(name, options)
    trained = load_run(run, accumulators=getattr(exporter, "writes_accumulators", True))
    metadata = export_metadata(trained.config, trained.directory, trained.checkpoint.step)
    exporter.export(trained.model, destination, metadata)
    return f"{name}, step {trained.checkpoint.step} of {trained.directory.path}"


def export_metadata(config: RunConfig, directory: RunDirectory, step: int) -> dict[str, Any]:
    """What an exporter is told of the run in ``directory`` besides its model, at ``step``."""
    record = directory.record()
    return {
        "name": config.name,
        "step": step,
        "model": to_plain(config.model, given=False),
        "vocabulary_size": record["vocabulary_size"],
        **directory.attachments(),
        "versions": record["versions"],
    }


class SafetensorsExporter:
    """Ternary weights in base 3 (five trits a byte), exponents and votes as int8, float parts as
    they are.
    """

    writes_accumulators = True

    def export(self, model: nn.Module, destination: Path, metadata: Mapping[str, Any]) -> None:
        """Write ``model`` to the file ``destination``, replacing one that exists only once the new
        one is complete.

        The header's metadata holds ``metadata`` as JSON under ``arb_ternary``.

        Raises:
            ArbError: the file cannot be written.
        """
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            with replacing(destination) as new:
                write_tensors(new, ModelState(model), json.dumps(dict(metadata), sort_keys=True))
        except OSError as error:
            raise ArbError(f"{destination}: cannot be written: {error}") from error


def build_safetensors(config: None) -> SafetensorsExporter:
    """Factory of the exporter ``safetensors``."""
    return SafetensorsExporter()
