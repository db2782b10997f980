"""The importer ``hf``: a folder of transformers as a model to train."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arb_ternary.errors import ArbError
from arb_ternary_interchange.decoder.config import ImportConfig
from arb_ternary_interchange.decoder.importing import imported
from arb_ternary_interchange.huggingface.folder import fetched, model_folder
from arb_ternary_interchange.huggingface.json_file import read_object
from arb_ternary_interchange.huggingface.published import HfModel
from arb_ternary_interchange.protocols import ImportedModel


class HfImporter:
    """Reads model folders, the hub's cache, and ``hf://org/name``."""

    def __init__(self, config: ImportConfig) -> None:
        self._config = config

    def fetch(self, source: str) -> Path:
        """The folder of ``hf://org/name[@revision]``; see :func:`.folder.fetched`."""
        return fetched(source)

    def recognises(self, source: Path) -> bool:
        """Whether ``source`` is a folder whose ``config.json`` names a ``model_type``, or such a
        model of a cache.
        """
        try:
            return source.is_dir() and "model_type" in read_object(
                model_folder(source) / "config.json"
            )
        except (ArbError, OSError):
            return False

    def inspect(self, source: Path) -> Mapping[str, Any]:
        """What the folder holds; see ``Importer``. DataError: it is damaged."""
        model = HfModel(source)
        config = model.config
        quantization = model.config.quantization
        parameters = stored = 0
        tensors = []
        for name, file in model.weights.files.items():
            entry = file.entries[name]
            count = math.prod(entry.shape) * (4 if entry.dtype == "U8" else 1)
            parameters = parameters + count
            stored = stored + entry.nbytes
            tensors.append(
                {
                    "name": name,
                    "shape": list(entry.shape),
                    "type": entry.dtype,
                    "bytes": entry.nbytes,
                }
            )
        tokenizer = model.tokenizer
        return {
            "format": "hf",
            "architecture": model.architecture,
            "vocabulary_size": model.vocabulary_size,
            "parameters": parameters,
            "bits_per_weight": round(8 * stored / parameters, 3) if parameters else 0.0,
            "tokenizer": None if tokenizer is None else tokenizer["kind"],
            "scales": "none" if quantization is None else quantization.description,
            "tensors": tensors,
            "unmapped": list(model.unmapped),
            "metadata": {"model_type": config.model_type, "options": dict(model.options)},
        }

    def load(self, source: Path) -> ImportedModel:
        """The model in the folder; see ``Importer``. DataError: it cannot be held."""
        model = HfModel(source)
        model.check_values()
        return imported(model, scales=self._config.scales, float_sources=self._config.float_sources)


def build(config: ImportConfig) -> HfImporter:
    """Factory of the importer ``hf``."""
    return HfImporter(config)
