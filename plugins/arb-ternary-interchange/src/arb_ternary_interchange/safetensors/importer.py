"""The importer ``safetensors``: reads a file of the exporter of this name back, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import nn

from arb_ternary.errors import CheckpointError, DataError
from arb_ternary_interchange.fine_tuning import data_section
from arb_ternary_interchange.inspection import count_tensors, describe_model
from arb_ternary_interchange.protocols import ImportedModel
from arb_ternary_train.model_state import load_state
from arb_ternary_train.safetensors_file import SafetensorsFile

#: Keys of the metadata of an export, besides the attachments of the run.
_FACTS: Final = (
    "name",
    "step",
    "model",
    "vocabulary_size",
    "versions",
    "structure",
    "origin",
)
#: Why a model cannot be built from its options.
_CHANGED: Final = "a phase has changed its model's structure, which cannot be built again"


class SafetensorsImporter:
    """Reads ternary weights, exponents, accumulators and float parts."""

    def recognises(self, source: Path) -> bool:
        """Whether it is a safetensors file with the metadata of this program."""
        try:
            return source.is_file() and "arb_ternary" in SafetensorsFile(source).metadata
        except DataError:
            return False

    def inspect(self, source: Path) -> Mapping[str, Any]:
        """See ``Importer``."""
        file, facts = read_export(source)
        model = facts["model"]
        size = facts["vocabulary_size"]
        shown = [key for key in _FACTS if key in facts and key != "vocabulary_size"]
        return {
            "format": "arb-ternary safetensors",
            **describe_model(model, size, _attachments(facts)),
            **count_tensors(file.entries),
            "unmapped": [_CHANGED] if "structure" in facts else [],
            "metadata": {key: facts[key] for key in shown},
        }

    def load(self, source: Path) -> ImportedModel:
        """See ``Importer``.

        Raises:
            DataError: it is damaged, not of this program, or of a model whose structure its phases
                have changed.
        """
        file, facts = read_export(source)
        if "structure" in facts:
            raise DataError(
                f"{source}: {_CHANGED}",
                "Export the run as it was before that phase: a checkpoint of it.",
            )

        def fill(model: nn.Module) -> None:
            try:
                load_state(model, file, str(source))
            except CheckpointError as error:
                raise DataError(error.what, error.hint) from error

        attachments = _attachments(facts)
        size = facts["vocabulary_size"]
        return ImportedModel(
            model=facts["model"],
            vocabulary_size=size,
            attachments=attachments,
            fill=fill,
            notes=(),
            data=data_section(attachments.get("tokenizer", {}), size),
        )


def build(config: None) -> SafetensorsImporter:
    """Factory of the importer ``safetensors``."""
    return SafetensorsImporter()


def read_export(source: Path) -> tuple[SafetensorsFile, dict[str, Any]]:
    """Read the header of a file; return its tensors and its metadata.

    Raises:
        DataError: the file or its metadata are damaged.
    """
    file = SafetensorsFile(source)
    try:
        facts = json.loads(file.metadata.get("arb_ternary", ""))
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict) or "model" not in facts:
        raise DataError(
            f"{source}: its metadata are not those of an export of this program",
            "`arb export RUN FILE` writes them; other safetensors are read with the config.json "
            "in the same folder: arb import FOLDER RUN --format hf",
        )
    if isinstance(facts["model"], str):
        facts["model"] = {"name": facts["model"]}
    size = facts.get("vocabulary_size")
    if not isinstance(facts["model"], dict) or type(size) is not int or size < 1:
        raise DataError(
            f"{source}: its metadata are damaged: a model {facts['model']!r:.80} of {size!r:.20} "
            f"ids"
        )
    if not isinstance(facts.get("tokenizer", {}), dict):
        raise DataError(f"{source}: its metadata are damaged: 'tokenizer' is not an object")
    return file, facts


def _attachments(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the run's data source has attached, by name."""
    return {name: value for name, value in facts.items() if name not in _FACTS}
