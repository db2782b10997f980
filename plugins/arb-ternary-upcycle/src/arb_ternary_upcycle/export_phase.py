"""The phase ``export``: writes the run's model in another format into the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arb_ternary.protocols.runs import PhaseResult
from arb_ternary_interchange.export import export_metadata
from arb_ternary_interchange.protocols import Exporter
from arb_ternary_train.build import require_protocol
from arb_ternary_train.evaluate import evaluation_mode
from arb_ternary_upcycle.export_config import ExportConfig

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


def destination_of(config: ExportConfig, run: Path) -> Path:
    """Return the path to write to in the run directory ``run``."""
    suffix = config.exporter.spec.suffix
    return run / (config.destination or f"export/model{suffix}")


class ExportPhase:
    """Writes the model as it is when the phase runs; after a kill it is written again."""

    name = "export"

    def __init__(self, config: ExportConfig) -> None:
        self.config = config
        self._bytes: int | None = None

    def run(self, context: TrainingContext) -> PhaseResult:
        """See ``Phase``; an earlier export is replaced once the new one is complete."""
        if self._bytes is None:
            self._bytes = self._export(context)
            context.mark_progress()
        context.save_checkpoint()
        return PhaseResult(steps=0, metrics={"bytes": float(self._bytes)})

    def _export(self, context: TrainingContext) -> int:
        """Write the model, and return the number of bytes written."""
        choice = self.config.exporter
        exporter: Exporter = require_protocol(choice.build(), Exporter, choice)
        destination = destination_of(self.config, context.directory)
        destination.parent.mkdir(parents=True, exist_ok=True)
        metadata = export_metadata(context.config, context.files, context.step)
        with evaluation_mode(context.model):
            exporter.export(context.model, destination, metadata)
        size = sum(
            file.stat().st_size for file in (destination, *destination.rglob("*")) if file.is_file()
        )
        context.record("export", {"exporter": choice.name, "bytes": size})
        context.note(f"{destination}: {choice.name}, step {context.step}, {size:,} bytes")
        return size

    def state_dict(self) -> dict[str, Any]:
        """Return how much was written; None before the export is complete."""
        return {"bytes": self._bytes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._bytes = state["bytes"]
