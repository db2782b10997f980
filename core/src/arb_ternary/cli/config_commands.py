"""``arb config validate``: everything that is wrong with a config."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from arb_ternary.cli.options import as_json, document_called, document_name, overrides, plugin_files
from arb_ternary.cli.output import print_json
from arb_ternary.errors import ConfigError, EnvironmentProblem
from arb_ternary.specs import load_target

if TYPE_CHECKING:
    from arb_ternary.config.yaml_document import LoadedConfig


@click.command("validate")
@click.argument("path", type=click.Path(path_type=Path))
@document_name
@overrides
@plugin_files
@as_json
def validate(path: Path, document: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check the config in PATH; list everything that is wrong with it."""
    from arb_ternary.config.errors import Fault

    try:
        spec = document_called(document)
        loaded: LoadedConfig[Any] = load_target(f"document '{spec.name}':", spec.target)(
            path, overrides
        )
    except (ConfigError, EnvironmentProblem) as error:
        if not as_json:
            raise
        faults = [fault.to_json() for fault in error.faults or [Fault((), error.what, error.hint)]]
        print_json({"path": str(path), "valid": False, "faults": faults})
        click.get_current_context().exit(error.exit_code)
    if as_json:
        print_json({"path": str(path), "valid": True, "faults": []})
    else:
        click.echo(": ".join(part for part in (str(path), "valid", loaded.summary) if part))
