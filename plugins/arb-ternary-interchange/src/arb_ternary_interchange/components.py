"""Exporters and importers by their names on the command line, with options ``name=value``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from arb_ternary.config.choice import Choice
from arb_ternary.config.options import option
from arb_ternary.config.overrides import apply_overrides
from arb_ternary.config.structure import structure
from arb_ternary.config.yaml_document import Document
from arb_ternary.plugins.manager import manager
from arb_ternary.specs import ExporterSpec, ImporterSpec
from arb_ternary_interchange.protocols import Exporter, Importer
from arb_ternary_train.build import require_protocol


@frozen(kw_only=True)
class _Export:
    exporter: Choice[ExporterSpec] = option(help="how the model is written")


@frozen(kw_only=True)
class _Import:
    importer: Choice[ImporterSpec] = option(help="how the model is read")


def named_exporter(name: str, options: Sequence[str] = ()) -> Exporter:
    """Build the exporter ``name``; raises as :func:`named_importer` does."""
    exporter: Exporter = _built(_Export, "exporter", name, options, Exporter)
    return exporter


def named_importer(name: str, options: Sequence[str] = ()) -> Importer:
    """Build the importer ``name`` with ``options``.

    Raises:
        UsageProblem: there is no such importer.
        ConfigError: an option is wrong.
        EnvironmentProblem: it is not installed, or lacks something that it needs.
    """
    importer: Importer = _built(_Import, "importer", name, options, Importer)
    return importer


def _built(cls: type[Any], kind: str, name: str, options: Sequence[str], protocol: type) -> Any:
    registry = manager().registry
    registry.get(kind, name)
    document = Document({kind: {"name": name}}, source="--format")
    document = apply_overrides(document, [f"{kind}.{text}" for text in options])
    choice: Choice[Any] = getattr(structure(cls, document, registry), kind)
    return require_protocol(choice.build(), protocol, choice)
