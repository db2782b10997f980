"""The exporter ``safetensors``: one file with a model as checkpoints hold it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from arb_ternary.errors import ArbError
from arb_ternary_train.checkpoint_format import write_tensors
from arb_ternary_train.durable import replacing
from arb_ternary_train.model_state import ModelState


class SafetensorsExporter:
    """Writes ternary weights in base 3 (five trits per byte), exponents and votes as int8, and
    float parts as they are.
    """

    writes_accumulators = True

    def export(self, model: nn.Module, destination: Path, metadata: Mapping[str, Any]) -> None:
        """Write ``model`` to the file ``destination``. An existing file is replaced once the new
        one is complete.

        The header's metadata hold ``metadata`` as JSON under ``arb_ternary``.

        Raises:
            ArbError: the file cannot be written.
        """
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            with replacing(destination) as new:
                write_tensors(new, ModelState(model), json.dumps(dict(metadata), sort_keys=True))
        except OSError as error:
            raise ArbError(f"{destination}: cannot be written: {error}") from error


def build(config: None) -> SafetensorsExporter:
    """Factory of the exporter ``safetensors``."""
    return SafetensorsExporter()
