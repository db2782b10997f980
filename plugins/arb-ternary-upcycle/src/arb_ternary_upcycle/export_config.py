"""Options of the phase ``export``. Imported without torch."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import ClassVar

from attrs import frozen

from arb_ternary.config.choice import Choice
from arb_ternary.config.options import Rule, option, optional
from arb_ternary.specs import ExporterSpec


def _inside(value: str) -> bool:
    path = PurePosixPath(value)
    return (
        bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\\" not in value
    )


_relative = Rule(
    "a path inside the run directory, such as export/model.gguf", _inside, {"pattern": "^[^/\\\\]"}
)


@frozen(kw_only=True)
class ExportConfig:
    """Options of the phase ``export``."""

    no_training: ClassVar[bool] = True

    exporter: Choice[ExporterSpec] = option(help="format, and the options of its exporter")
    destination: str | None = option(
        None,
        "file or folder inside the run directory; null = export/model with the ending of the "
        "format",
        validator=optional(_relative),
    )
