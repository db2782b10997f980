"""The importer ``gguf``, and what ``arb inspect`` says of a file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from arb_ternary.errors import DataError
from arb_ternary_interchange.decoder.config import ImportConfig
from arb_ternary_interchange.decoder.importing import imported
from arb_ternary_interchange.gguf.metadata import ArrayInFile
from arb_ternary_interchange.gguf.published import GgufModel
from arb_ternary_interchange.gguf.reader import GgufFile, is_gguf
from arb_ternary_interchange.gguf.trits import is_ternary
from arb_ternary_interchange.protocols import ImportedModel

#: Characters and items of a long value that are shown.
_SHOWN_TEXT: Final = 200
_SHOWN_ITEMS: Final = 8


class GgufImporter:
    """Reads the decoders of a GGUF file.

    Args:
        config: the options.
    """

    def __init__(self, config: ImportConfig) -> None:
        self._config = config

    def recognises(self, source: Path) -> bool:
        """Whether it is a file that begins with ``GGUF``."""
        return is_gguf(source)

    def inspect(self, source: Path) -> Mapping[str, Any]:
        """See ``Importer``; a model that cannot be imported is described too."""
        file = GgufFile(source)
        infos = file.tensors.values()
        parameters = sum(math.prod(info.shape) for info in infos)
        embedding = file.tensors.get("token_embd.weight")
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        return {
            "format": "gguf",
            "architecture": _value_or_none(file, "general.architecture"),
            "vocabulary_size": None if embedding is None else embedding.shape[0],
            "parameters": parameters,
            "bits_per_weight": 8 * sum(info.size for info in infos) / parameters
            if parameters
            else None,
            "tokenizer": {
                "model": _value_or_none(file, "tokenizer.ggml.model"),
                "pre": _value_or_none(file, "tokenizer.ggml.pre"),
                "tokens": len(tokens) if isinstance(tokens, ArrayInFile) else None,
            },
            "scales": _scales(file),
            "tensors": [
                {
                    "name": info.name,
                    "shape": list(info.shape),
                    "type": info.type.name,
                    "bytes": info.size,
                }
                for info in infos
            ],
            "unmapped": _unmapped(file),
            "metadata": {key: _value(file, key) for key in file.metadata},
        }

    def load(self, source: Path) -> ImportedModel:
        """See :class:`arb_ternary_interchange.protocols.Importer`."""
        model = GgufModel(GgufFile(source))
        return imported(model, scales=self._config.scales, float_sources=self._config.float_sources)


def build(config: ImportConfig) -> GgufImporter:
    """Factory of the importer ``gguf``."""
    return GgufImporter(config)


def _scales(file: GgufFile) -> list[str]:
    blocks = {info.type.name: info.type.block for info in file.tensors.values() if is_ternary(info)}
    factors = sum(name.endswith(".scale") for name in file.tensors)
    said = [
        f"{name}: float16, one for {block} weights of a row"
        for name, block in sorted(blocks.items())
    ]
    return [*said, f"{factors} float factors of whole matrices"] if factors else said


def _unmapped(file: GgufFile) -> list[str]:
    try:
        return list(GgufModel(file).unmapped)
    except DataError as error:
        return [str(error)]


def _value_or_none(file: GgufFile, key: str) -> Any:
    return _value(file, key) if key in file.metadata else None


def _value(file: GgufFile, key: str) -> Any:
    """A value as it is shown, or why it is not read."""
    try:
        return _shown(file.metadata[key])
    except DataError as error:
        return error.what


def _shown(value: Any) -> Any:
    if isinstance(value, ArrayInFile):
        first = [_shown(item) for item, _ in zip(value, range(_SHOWN_ITEMS), strict=False)]
        return {"items": value.kind.name.lower(), "length": len(value), "first": first}
    if isinstance(value, str) and len(value) > _SHOWN_TEXT:
        return f"{value[:_SHOWN_TEXT]}... ({len(value)} characters)"
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
