"""The exporter ``merged``: a model without its adapters, whose work the weights then do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from arb_ternary.errors import UsageProblem
from arb_ternary_interchange.safetensors.exporter import SafetensorsExporter
from arb_ternary_progressive.rack import Rack


class MergedExporter:
    """Safetensors of a rack whose adapters have been merged; stacks that had some are then
    float32.
    """

    def export(self, model: nn.Module, destination: Path, metadata: Mapping[str, Any]) -> None:
        """Write a merged copy of ``model`` to the file ``destination``, atomically.

        Its structure is in the metadata under ``structure``.

        Raises:
            UsageProblem: the model is not a rack.
            ArbError: the file cannot be written.
        """
        if not isinstance(model, Rack):
            raise UsageProblem(
                f"exporter 'merged': it merges the adapters of racks; the model is a "
                f"{type(model).__name__}",
                "Use --format safetensors.",
            )
        rack = model.merged()
        SafetensorsExporter().export(rack, destination, {**metadata, "structure": rack.structure()})


def build(config: None) -> MergedExporter:
    """Factory of the exporter ``merged``."""
    return MergedExporter()
