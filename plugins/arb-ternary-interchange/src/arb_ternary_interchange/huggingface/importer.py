"""The importer ``hf``: reads a folder of transformers as a model to train."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arb_ternary.errors import ArbError
from arb_ternary_interchange.decoder.conversion import convert
from arb_ternary_interchange.huggingface.folder import fetched, model_folder
from arb_ternary_interchange.huggingface.json_file import read_object
from arb_ternary_interchange.huggingface.model import PACKED, HfModel
from arb_ternary_interchange.huggingface.packing import TRITS_PER_BYTE
from arb_ternary_interchange.inspection import tensor_row
from arb_ternary_interchange.options import ImportConfig
from arb_ternary_interchange.protocols import ImportedModel


class HfImporter:
    """Reads model folders, models in the hub's cache, and ``hf://org/name``."""

    def __init__(self, config: ImportConfig) -> None:
        self._config = config

    def fetch(self, source: str) -> Path:
        """Return the folder of ``hf://org/name[@revision]``; see :func:`.folder.fetched`."""
        return fetched(source)

    def recognises(self, source: Path) -> bool:
        """Whether ``source`` is a folder whose ``config.json`` names a ``model_type``, or such a
        model in the hub's cache.
        """
        if not source.is_dir():
            return False
        try:
            return "model_type" in read_object(model_folder(source) / "config.json")
        except (ArbError, OSError):
            return False

    def inspect(self, source: Path) -> Mapping[str, Any]:
        """See ``Importer``.

        Raises:
            DataError: the folder is damaged.
        """
        model = HfModel(source)
        quantization = model.config.quantization
        entries = {name: file.entries[name] for name, file in model.weights.files.items()}
        parameters = 0
        for entry in entries.values():
            trits = TRITS_PER_BYTE if entry.dtype == PACKED else 1
            parameters += math.prod(entry.shape) * trits
        nbytes = sum(entry.nbytes for entry in entries.values())
        tokenizer = model.tokenizer
        return {
            "format": "hf",
            "architecture": model.architecture,
            "vocabulary_size": model.vocabulary_size,
            "parameters": parameters,
            "bits_per_weight": round(8 * nbytes / parameters, 3) if parameters else 0.0,
            "tokenizer": None if tokenizer is None else tokenizer["kind"],
            "scales": "none" if quantization is None else quantization.description,
            "tensors": [
                tensor_row(name, entry.shape, entry.dtype, entry.nbytes)
                for name, entry in entries.items()
            ],
            "unmapped": list(model.unmapped),
            "metadata": {"model_type": model.config.model_type, "options": dict(model.options)},
        }

    def load(self, source: Path) -> ImportedModel:
        """See ``Importer``.

        Raises:
            DataError: the folder is damaged, or the decoder cannot hold such a model.
        """
        model = HfModel(source)
        model.check_values()
        return convert(model, self._config)
