"""The exporter ``safetensors``: one file with a model as checkpoints hold it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from arb_ternary.errors import ArbError
from arb_ternary_train.checkpoint_format import write_tensors
from arb_ternary_train.durable import replacing
from arb_ternary_train.model_state import ModelState
from arb_ternary_train.safetensors_file import TensorParts


def write_export(
    path: Path, tensors: Mapping[str, Tensor] | TensorParts, metadata: Mapping[str, Any]
) -> dict[str, str]:
    """Write a file that the importer of this name reads; return the digest of each tensor.

    Args:
        path: an existing file is replaced once the new one is complete.
        tensors: a state dict.
        metadata: is in the file's header as JSON under ``arb_ternary``; see ``export_model``.

    Raises:
        ArbError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            return write_tensors(new, tensors, json.dumps(dict(metadata), sort_keys=True))
    except OSError as error:
        raise ArbError(f"{path}: cannot be written: {error}") from error


class SafetensorsExporter:
    """Writes ternary weights in base 3 (five trits per byte), exponents and votes as int8, and
    float parts as they are.
    """

    writes_accumulators = True

    def export(self, model: nn.Module, destination: Path, metadata: Mapping[str, Any]) -> None:
        """Write ``model`` to the file ``destination``; see :func:`write_export`."""
        write_export(destination, ModelState(model), metadata)


def build(config: None) -> SafetensorsExporter:
    """Factory of the exporter ``safetensors``."""
    return SafetensorsExporter()
