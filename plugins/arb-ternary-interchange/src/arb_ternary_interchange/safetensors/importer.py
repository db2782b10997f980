"""The importer ``safetensors``: what the exporter of this name wrote, back in every bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import frozen
from torch import nn

from arb_ternary.errors import CheckpointError, DataError
from arb_ternary_interchange.inspection import count_tensors, describe_model
from arb_ternary_interchange.protocols import ImportedModel
from arb_ternary_train.init_from import load_state
from arb_ternary_train.safetensors_file import SafetensorsFile

#: What the metadata of an export hold beside the attachments of the run.
_FACTS: Final = ("name", "step", "model", "vocabulary_size", "versions", "structure")


@frozen(eq=False)
class _Export:
    """A file with what its metadata say."""

    file: SafetensorsFile
    facts: Mapping[str, Any]
    attachments: Mapping[str, Any]


class SafetensorsImporter:
    """Reads a file of the exporter ``safetensors``: ternary weights, exponents, accumulators and
    float parts.
    """

    def recognises(self, source: Path) -> bool:
        """Whether it is a safetensors file with the metadata of this program."""
        try:
            return source.is_file() and "arb_ternary" in SafetensorsFile(source).metadata
        except DataError:
            return False

    def inspect(self, source: Path) -> Mapping[str, Any]:
        """See ``Importer``; nothing of an export is left out by its import."""
        export = _read(source)
        facts = export.facts
        return {
            "format": "arb-ternary safetensors",
            **describe_model(facts["model"], facts["vocabulary_size"], export.attachments),
            **count_tensors(export.file.entries),
            "unmapped": _unmapped(facts),
            "metadata": {
                key: facts[key] for key in _FACTS if key in facts and key != "vocabulary_size"
            },
        }

    def load(self, source: Path) -> ImportedModel:
        """See ``Importer``.

        Raises:
            DataError: it is damaged, not of this program, or of a model whose structure its phases
                have changed.
        """
        export = _read(source)
        for sentence in _unmapped(export.facts):
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
            model=export.facts["model"],
            vocabulary_size=export.facts["vocabulary_size"],
            attachments=export.attachments,
            fill=fill,
            notes=(),
            data=_data(export),
        )


def build_safetensors_importer(config: None) -> SafetensorsImporter:
    """Factory of the importer ``safetensors``."""
    return SafetensorsImporter()


def _read(source: Path) -> _Export:
    """The file, with metadata that are whole.

    Raises:
        DataError: they are not.
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
            "beside them: arb import FOLDER RUN --format hf",
        )
    model = {"name": facts["model"]} if isinstance(facts["model"], str) else facts["model"]
    size = facts.get("vocabulary_size")
    if not isinstance(model, dict) or type(size) is not int or size < 1:
        raise DataError(
            f"{source}: its metadata are damaged: a model {facts['model']!r:.80} of {size!r:.20} "
            f"ids"
        )
    attachments = {name: value for name, value in facts.items() if name not in _FACTS}
    if not isinstance(attachments.get("tokenizer", {}), dict):
        raise DataError(f"{source}: its metadata are damaged: 'tokenizer' is not an object")
    return _Export(file, {**facts, "model": model}, attachments)


def _unmapped(facts: Mapping[str, Any]) -> list[str]:
    return (
        ["a phase has changed its model's structure, which cannot be made again"]
        if "structure" in facts
        else []
    )


def _data(export: _Export) -> dict[str, Any]:
    """A data section that fits the ids: the built-in text with the model's tokenizer, or a file of
    ids to put there.
    """
    tokenizer = export.attachments.get("tokenizer", {})
    kind = tokenizer.get("kind", "ids")
    if kind == "ids":
        return {
            "name": "tokens",
            "train": "tokens.npy",
            "vocabulary_size": export.facts["vocabulary_size"],
        }
    return {
        "name": "shakespeare",
        "tokenizer": "bytes" if kind == "bytes" else "{run}/tokenizer.json",
    }
