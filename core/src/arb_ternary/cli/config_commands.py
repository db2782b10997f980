"""``arb config``: write a config to start from, show one, check one, describe what it may hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from arb_ternary.cli.options import (
    as_json,
    completes,
    document_called,
    document_name,
    overrides,
    plugin_files,
)
from arb_ternary.cli.output import print_json, print_table
from arb_ternary.errors import ArbError, ConfigError, EnvironmentProblem
from arb_ternary.plugins.discovery import USUAL_PARTS, install_command
from arb_ternary.plugins.manager import manager
from arb_ternary.specs import DocumentSpec, StarterSpec, load_target

if TYPE_CHECKING:
    from arb_ternary.config.yaml_document import LoadedConfig


@click.command("new")
@click.argument("path", default="arb.yaml", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--template",
    metavar="NAME",
    shell_complete=completes("starter"),
    help="What to start from; --list names them, the default first.",
)
@click.option(
    "--short/--full",
    "short",
    default=True,
    help="Write what the template sets (default), or every option, the others as comments.",
)
@click.option(
    "--schema",
    "with_schema",
    is_flag=True,
    help="Also write a JSON Schema beside PATH, by which editors complete and check the config.",
)
@click.option("--force", is_flag=True, help="Replace existing files.")
@click.option(
    "--list", "list_templates", is_flag=True, help="List the templates and write nothing."
)
@plugin_files
@as_json
def new(
    path: Path,
    template: str | None,
    short: bool,
    with_schema: bool,
    force: bool,
    list_templates: bool,
    as_json: bool,
) -> None:
    """Write a starter config to PATH (arb.yaml), with its options explained."""
    from arb_ternary.config.starter import starter_config

    starters = _starters()
    if list_templates:
        if as_json:
            print_json([{"name": spec.name, "summary": spec.summary} for spec in starters])
        else:
            print_table(("template", "summary"), [(spec.name, spec.summary) for spec in starters])
        return

    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(
            f"{path}: a starter config is YAML", hint=f"arb config new {path.with_suffix('.yaml')}"
        )
    starter = starters[0]
    if template is not None:
        starter = manager().registry.get("starter", template).spec
    document = document_called(starter.document)
    text = starter_config(starter, document, manager().registry, full=not short)
    files = {path: text}
    if with_schema:
        beside = path.with_suffix(".schema.json")
        files = {
            beside: _schema_text(document, indent=2) + "\n",
            path: f"# yaml-language-server: $schema={beside.name}\n{text}",
        }
    for file in files:
        if file.exists() and not force:
            raise ConfigError(f"{file}: the file exists", hint="Use --force to replace it.")
    for file, content in files.items():
        try:
            with file.open("w" if force else "x", encoding="utf-8") as opened:
                opened.write(content)
        except OSError as error:
            raise ConfigError(f"{file}: cannot be written: {error.strerror}") from error

    if as_json:
        print_json({"path": str(path), "template": starter.name})
    else:
        click.echo(f"{path}: written; run it with: {document.command} {path}")


def _starters() -> list[StarterSpec]:
    """Return the installed starter configs, the default first."""
    registry = manager().registry
    found: list[StarterSpec] = [each.spec for each in registry.all("starter")]
    if not found:
        failed = any(record.failed for record in registry.records)
        hint = "see: arb plugins list" if failed else install_command(USUAL_PARTS)
        raise EnvironmentProblem("no template is installed", hint=hint)
    return sorted(found, key=lambda spec: (-spec.priority, spec.name))


@click.command("show")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--origin", is_flag=True, help="Say where each value comes from.")
@document_name
@overrides
@plugin_files
@as_json
def show(
    path: Path, document: str | None, origin: bool, overrides: tuple[str, ...], as_json: bool
) -> None:
    """Print the config in PATH as it takes effect, with every default."""
    from arb_ternary.config.errors import show_path
    from arb_ternary.config.fields import leaves, to_plain
    from arb_ternary.config.yaml_document import dump_inline, dump_yaml

    spec = document_called(document)
    loaded = _load(spec, path, overrides)
    if spec.resolve is not None:
        loaded = load_target(f"document '{spec.name}':", spec.resolve)(loaded)
    plain = to_plain(loaded.config, given=False)
    if not origin:
        if as_json:
            print_json(plain)
        else:
            click.echo(dump_yaml(plain), nl=False)
        return

    settings = [
        {"path": show_path(path), "value": value, "origin": str(loaded.origins[path])}
        for path, value in leaves(plain)
    ]
    if as_json:
        print_json(settings)
        return
    rows = [(each["path"], dump_inline(each["value"]), each["origin"]) for each in settings]
    print_table(("setting", "value", "origin"), rows)


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
        loaded = _load(document_called(document), path, overrides)
        _check_backend(loaded)
    except (ConfigError, EnvironmentProblem) as error:
        if not as_json:
            raise
        faults = error.faults or [Fault((), error.what, error.hint)]
        described = [fault.to_json() for fault in faults]
        print_json({"path": str(path), "valid": False, "faults": described})
        click.get_current_context().exit(error.exit_code)
    if as_json:
        notes = list(loaded.notes)
        print_json({"path": str(path), "valid": True, "faults": [], "notes": notes})
        return
    click.echo(f"{path}: valid: {loaded.summary}" if loaded.summary else f"{path}: valid")
    for note in loaded.notes:
        click.echo(f"note: {note}")


def _check_backend(loaded: LoadedConfig[Any]) -> None:
    """Check that the backend that a config names is installed.

    Loading does not: a recorded run can be read with another backend.

    Raises:
        UsageProblem, EnvironmentProblem: it is not.
    """
    from arb_ternary.backends.select import BackendRequest, requested_names
    from arb_ternary.config.errors import Fault, raise_faults

    requested = str(getattr(loaded.config, "backend", None) or "auto")
    try:
        requested_names(BackendRequest(requested, "backend"))
    except ArbError as error:
        message = error.what.removeprefix("backend: ")
        absent = isinstance(error, EnvironmentProblem)
        fault = Fault(("backend",), message, error.hint, environment=absent)
        raise_faults([fault], loaded.origins, loaded.source)


@click.command("schema")
@document_name
@plugin_files
@click.option("--json", "compact", is_flag=True, help="Print it on one line.")
def schema(document: str | None, compact: bool) -> None:
    """Print the JSON Schema (draft 2020-12) of config files, with every installed component."""
    click.echo(_schema_text(document_called(document), indent=None if compact else 2))


def _schema_text(spec: DocumentSpec, *, indent: int | None) -> str:
    from arb_ternary.config.schema import json_schema

    cls = load_target(f"document '{spec.name}':", spec.config)
    return json.dumps(json_schema(cls, manager().registry), indent=indent, ensure_ascii=False)


def _load(spec: DocumentSpec, path: Path, overrides: tuple[str, ...]) -> LoadedConfig[Any]:
    loader = load_target(f"document '{spec.name}':", spec.target)
    loaded: LoadedConfig[Any] = loader(path, overrides)
    return loaded
