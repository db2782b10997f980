"""The phase ``export``: writes the run's model in another format into the run directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

from arb_ternary_interchange.export import export_metadata
from arb_ternary_interchange.protocols import Exporter
from arb_ternary_train.build import require_protocol
from arb_ternary_train.evaluate import evaluation_mode
from arb_ternary_upcycle.export_config import ExportConfig
from arb_ternary_upcycle.once import OncePhase

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


@define(eq=False)
class ExportPhase(OncePhase):
    """Writes the model as it is when the phase runs; after a kill it is written again."""

    name = "export"

    config: ExportConfig

    def work(self, context: TrainingContext) -> dict[str, float]:
        """Write the model; an earlier export is replaced once the new one is complete."""
        choice = self.config.exporter
        exporter: Exporter = require_protocol(choice.build(), Exporter, choice)
        place = self.config.destination or f"export/model{choice.spec.suffix}"
        destination = context.directory / place
        destination.parent.mkdir(parents=True, exist_ok=True)
        metadata = export_metadata(context.config, context.files, context.step)
        with evaluation_mode(context.model):
            exporter.export(context.model, destination, metadata)
        size = sum(
            file.stat().st_size for file in (destination, *destination.rglob("*")) if file.is_file()
        )
        context.record("export", {"exporter": choice.name, "bytes": size})
        context.note(f"{destination}: {choice.name}, step {context.step}, {size:,} bytes")
        return {"bytes": float(size)}
