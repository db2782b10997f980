"""The kinds of component that only runs know: observers, exporters, importers, checks, configs to start from."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import field, frozen
from attrs.validators import deep_iterable, instance_of

from arb_ternary.specs import Spec

__all__ = ["CheckSpec", "ExporterSpec", "ImporterSpec", "StarterSpec", "TrackerSpec"]


def _as_tuple(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values)


@frozen(kw_only=True)
class TrackerSpec(Spec):
    """An observer of runs. Factory: ``(config) -> object`` that implements observer hooks (``arb_run_start`` ...)."""

    kind, hook, noun = "tracker", "arb_register_trackers", "tracker"
    hookspecs = "arb_ternary_train.hookspecs"


@frozen(kw_only=True)
class ExporterSpec(Spec):
    """Writes a trained model in another form. Factory: ``(config) -> Exporter``.

    Attributes:
        suffix: the file name ending that the exporter writes, with its dot; empty when it writes a folder.
    """

    kind, hook, noun = "exporter", "arb_register_exporters", "exporter"

    suffix: str = field(default="", validator=instance_of(str))


@frozen(kw_only=True)
class ImporterSpec(Spec):
    """Reads a model that another program has written. Factory: ``(config) -> Importer``.

    Attributes:
        schemes: what the addresses begin with that ``FetchesSources.fetch`` of the importer takes: ``("hf",)`` for
            ``hf://...``; empty for an importer that reads files and folders only.
    """

    kind, hook, noun = "importer", "arb_register_importers", "importer"

    schemes: tuple[str, ...] = field(default=(), converter=_as_tuple, validator=deep_iterable(instance_of(str)))


@frozen(kw_only=True)
class CheckSpec(Spec):
    """A check that passes or fails a finished run. Factory: ``(config) -> Check``."""

    kind, hook, noun = "check", "arb_register_checks", "check"


@frozen(kw_only=True)
class StarterSpec(Spec):
    """A config to start from. Target: a mapping of settings.

    Attributes:
        document: name of the kind of config file that the settings are for.
        priority: listings begin with the highest, and it is what ``arb config new`` writes when none is named.
    """

    kind, hook, noun = "starter", "arb_register_starters", "starter config"

    document: str = field(default="run", validator=instance_of(str))
    priority: int = field(default=10, validator=instance_of(int))
