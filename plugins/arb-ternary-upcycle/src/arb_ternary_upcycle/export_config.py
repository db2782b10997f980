"""Options of the phase ``export``. Imported without torch."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import ClassVar, Final

from attrs import frozen

from arb_ternary.config.choice import Choice
from arb_ternary.config.options import Rule, option, optional
from arb_ternary.specs import ExporterSpec


def _is_inside(value: str) -> bool:
    path = PurePosixPath(value)
    if path.is_absolute() or "\\" in value:
        return False
    return bool(path.parts) and ".." not in path.parts


_relative: Final = Rule(
    "a path inside the run directory, such as export/model.gguf",
    _is_inside,
    {"pattern": "^[^/\\\\]"},
)


@frozen(kw_only=True)
class ExportConfig:
    """Options of the phase ``export``."""

    no_training: ClassVar[bool] = True

    exporter: Choice[ExporterSpec] = option(help="format, and the options of its exporter")
    destination: str | None = option(
        None,
        "file or folder inside the run directory; null = export/model with the suffix of the "
        "format",
        validator=optional(_relative),
    )
