"""The exporter ``merged``: write a model with its adapters merged into the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from arb_ternary.errors import UsageProblem
from arb_ternary_interchange.safetensors.exporter import SafetensorsExporter
from arb_ternary_progressive.rack import Rack


class MergedExporter:
    """Writes safetensors of a rack with merged adapters; stacks with adapters become float32."""

    def export(self, model: nn.Module, destination: Path, metadata: Mapping[str, Any]) -> None:
        """Write a merged copy of ``model`` to the file ``destination``, atomically.

        Its structure is in the metadata under ``structure``.

        Raises:
            UsageProblem: the model is not a rack.
            ArbError: the file cannot be written.
        """
        if not isinstance(model, Rack):
            raise UsageProblem(
                f"exporter 'merged': the model must be a rack, whose adapters are merged, not a "
                f"{type(model).__name__}",
                "Use --format safetensors.",
            )
        rack = model.merged()
        SafetensorsExporter().export(rack, destination, {**metadata, "structure": rack.structure()})


def build(config: None) -> MergedExporter:
    """Build the exporter ``merged``."""
    return MergedExporter()
