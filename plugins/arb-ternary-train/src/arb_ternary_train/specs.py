"""The kinds of component that only runs know: observers, exporters and checks."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import instance_of

from arb_ternary.specs import Spec

__all__ = ["CheckSpec", "ExporterSpec", "TrackerSpec"]


@frozen(kw_only=True)
class TrackerSpec(Spec):
    """An observer of runs. Factory: ``(config) -> object`` that implements observer hooks (``arb_run_start`` ...)."""

    kind, hook, noun = "tracker", "arb_register_trackers", "tracker"


@frozen(kw_only=True)
class ExporterSpec(Spec):
    """Writes a trained model in another form. Factory: ``(config) -> Exporter``.

    Attributes:
        suffix: the file name ending that the exporter writes, with its dot; empty when it writes a folder.
    """

    kind, hook, noun = "exporter", "arb_register_exporters", "exporter"

    suffix: str = field(default="", validator=instance_of(str))


@frozen(kw_only=True)
class CheckSpec(Spec):
    """A check that passes or fails a finished run. Factory: ``(config) -> Check``."""

    kind, hook, noun = "check", "arb_register_checks", "check"
