"""``arb config``: check a config, and show what it means."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from arb_ternary.cli.options import as_json, document_called, document_name, overrides, plugin_files
from arb_ternary.cli.output import print_json, print_table
from arb_ternary.errors import ConfigError, EnvironmentProblem
from arb_ternary.specs import load_target

if TYPE_CHECKING:
    from arb_ternary.config.yaml_document import LoadedConfig

_path = click.argument("path", type=click.Path(path_type=Path))


@click.command("validate")
@_path
@document_name
@overrides
@plugin_files
@as_json
def validate(path: Path, document: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check the config in PATH; list everything that is wrong with it."""
    from arb_ternary.config.errors import Fault

    try:
        loaded = _load(document, path, overrides)
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


@click.command("show")
@_path
@click.option("--origin", is_flag=True, help="Say where each value comes from.")
@document_name
@overrides
@plugin_files
@as_json
def show(path: Path, document: str | None, origin: bool, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print the config in PATH as it takes effect, with every default."""
    from arb_ternary.config.errors import show_path
    from arb_ternary.config.fields import leaves, to_plain
    from arb_ternary.config.yaml_document import dump_inline, dump_yaml

    loaded = _load(document, path, overrides)
    plain = to_plain(loaded.config, given=False)
    rows = [(show_path(where), value, str(loaded.origins[where])) for where, value in leaves(plain)]
    if as_json:
        keys = ("path", "value", "origin")
        print_json([dict(zip(keys, row, strict=True)) for row in rows] if origin else plain)
    elif origin:
        print_table(("setting", "value", "origin"), [(where, dump_inline(value), text) for where, value, text in rows])
    else:
        click.echo(dump_yaml(plain), nl=False)


def _load(document: str | None, path: Path, overrides: tuple[str, ...]) -> LoadedConfig[Any]:
    spec = document_called(document)
    loaded: LoadedConfig[Any] = load_target(f"document '{spec.name}':", spec.target)(path, overrides)
    return loaded
