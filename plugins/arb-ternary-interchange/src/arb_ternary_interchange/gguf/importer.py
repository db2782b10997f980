"""The importer ``gguf``, and the description of a file by ``arb inspect``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

from arb_ternary.errors import DataError
from arb_ternary_interchange.decoder.conversion import convert
from arb_ternary_interchange.gguf.decoding import is_ternary
from arb_ternary_interchange.gguf.metadata import ArrayInFile
from arb_ternary_interchange.gguf.model import GgufModel
from arb_ternary_interchange.gguf.reader import GgufFile, is_gguf
from arb_ternary_interchange.inspection import tensor_row
from arb_ternary_interchange.options import ImportConfig
from arb_ternary_interchange.protocols import ImportedModel

#: Characters and items of a long value that are shown.
_SHOWN_TEXT: Final = 200
_SHOWN_ITEMS: Final = 8


class GgufImporter:
    """Reads the decoder in a GGUF file."""

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
        nbytes = sum(info.size for info in infos)
        embedding = file.tensors.get("token_embd.weight")
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        return {
            "format": "gguf",
            "architecture": _shown(file, "general.architecture"),
            "vocabulary_size": None if embedding is None else embedding.shape[0],
            "parameters": parameters,
            "bits_per_weight": 8 * nbytes / parameters if parameters else None,
            "tokenizer": {
                "model": _shown(file, "tokenizer.ggml.model"),
                "pre": _shown(file, "tokenizer.ggml.pre"),
                "tokens": len(tokens) if isinstance(tokens, ArrayInFile) else None,
            },
            "scales": _scales(file),
            "tensors": [
                tensor_row(info.name, info.shape, info.type.name, info.size) for info in infos
            ],
            "unmapped": _unmapped(file),
            "metadata": {key: _shown(file, key) for key in file.metadata},
        }

    def load(self, source: Path) -> ImportedModel:
        """See ``Importer``."""
        return convert(GgufModel(GgufFile(source)), self._config)


def _scales(file: GgufFile) -> list[str]:
    blocks = {info.type.name: info.type.block for info in file.tensors.values() if is_ternary(info)}
    lines = [
        f"{name}: float16, one for {block} weights of a row"
        for name, block in sorted(blocks.items())
    ]
    factors = sum(name.endswith(".scale") for name in file.tensors)
    if factors:
        lines.append(f"{factors} float factors of whole matrices")
    return lines


def _unmapped(file: GgufFile) -> list[str]:
    try:
        return list(GgufModel(file).unmapped)
    except DataError as error:
        return [str(error)]


def _shown(file: GgufFile, key: str) -> Any:
    """Return the value of a key as it is shown, or why it is not read; None if there is no such
    key.
    """
    if key not in file.metadata:
        return None
    try:
        return _shortened(file.metadata[key])
    except DataError as error:
        return error.what


def _shortened(value: Any) -> Any:
    if isinstance(value, ArrayInFile):
        first = [_shortened(item) for item in islice(value, _SHOWN_ITEMS)]
        return {"items": value.kind.name.lower(), "length": len(value), "first": first}
    if isinstance(value, str) and len(value) > _SHOWN_TEXT:
        return f"{value[:_SHOWN_TEXT]}... ({len(value)} characters)"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
