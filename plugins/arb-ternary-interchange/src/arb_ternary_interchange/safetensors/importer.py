"""The importer ``safetensors``: reads a file of the exporter of this name back, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import frozen
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


@frozen(eq=False)
class _Export:
    """An exported file and its metadata.

    Attributes:
        file: the tensors.
        facts: the metadata.
        model: the ``model:`` section of the run's config.
        vocabulary_size: number of ids in the model's vocabulary.
        attachments: what the run's data source has attached, by name.
        unmapped: why the model cannot be imported, one sentence each.
    """

    file: SafetensorsFile
    facts: Mapping[str, Any]
    model: Mapping[str, Any]
    vocabulary_size: int
    attachments: Mapping[str, Any]
    unmapped: tuple[str, ...]


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
        export = _read(source)
        keys = [key for key in _FACTS if key in export.facts and key != "vocabulary_size"]
        return {
            "format": "arb-ternary safetensors",
            **describe_model(export.model, export.vocabulary_size, export.attachments),
            **count_tensors(export.file.entries),
            "unmapped": list(export.unmapped),
            "metadata": {key: export.facts[key] for key in keys},
        }

    def load(self, source: Path) -> ImportedModel:
        """See ``Importer``.

        Raises:
            DataError: it is damaged, not of this program, or of a model whose structure its phases
                have changed.
        """
        export = _read(source)
        for sentence in export.unmapped:
            raise DataError(
                f"{source}: {sentence}",
                "Export the run as it was before that phase: a checkpoint of it.",
            )

        def fill(model: nn.Module) -> None:
            try:
                load_state(model, export.file, str(source))
            except CheckpointError as error:
                raise DataError(error.what, error.hint) from error

        return ImportedModel(
            model=export.model,
            vocabulary_size=export.vocabulary_size,
            attachments=export.attachments,
            fill=fill,
            notes=(),
            data=data_section(export.attachments.get("tokenizer", {}), export.vocabulary_size),
        )


def build(config: None) -> SafetensorsImporter:
    """Factory of the importer ``safetensors``."""
    return SafetensorsImporter()


def _read(source: Path) -> _Export:
    """Read the header of a file and check its metadata.

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
    model = facts["model"]
    if isinstance(model, str):
        model = {"name": model}
    size = facts.get("vocabulary_size")
    if not isinstance(model, dict) or type(size) is not int or size < 1:
        raise DataError(
            f"{source}: its metadata are damaged: a model {facts['model']!r:.80} of {size!r:.20} "
            f"ids"
        )
    attachments = {name: value for name, value in facts.items() if name not in _FACTS}
    if not isinstance(attachments.get("tokenizer", {}), dict):
        raise DataError(f"{source}: its metadata are damaged: 'tokenizer' is not an object")
    unmapped: tuple[str, ...] = ()
    if "structure" in facts:
        unmapped = ("a phase has changed its model's structure, which cannot be built again",)
    return _Export(file, {**facts, "model": model}, model, size, attachments, unmapped)
