"""``arb config``: write a config to start from, show what one means, describe what may stand in
one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from attrs import evolve

from arb_ternary.cli.options import as_json, document_called, document_name, overrides, plugin_files
from arb_ternary.cli.output import print_json, print_table
from arb_ternary.errors import ConfigError, EnvironmentProblem, UsageProblem, nearest
from arb_ternary.plugins.manager import manager
from arb_ternary.plugins.registry import USUAL_PARTS
from arb_ternary.specs import StarterSpec, load_target

if TYPE_CHECKING:
    from arb_ternary.config.yaml_document import LoadedConfig


@click.command("new")
@click.argument("path", default="arb.yaml", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--template", metavar="NAME", help="What to start from; --list names them, the default first."
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option(
    "--list", "list_templates", is_flag=True, help="List the templates and write nothing."
)
@plugin_files
@as_json
def new(path: Path, template: str | None, force: bool, list_templates: bool, as_json: bool) -> None:
    """Write a starter config to PATH (arb.yaml), with every option explained."""
    from arb_ternary_train.starter import starter_config

    found: list[Any] = [registered.spec for registered in manager().registry.all("starter")]
    if not found:
        raise EnvironmentProblem("no template is installed", hint=f"pip install {USUAL_PARTS}")
    starters: list[StarterSpec] = sorted(found, key=lambda spec: (-spec.priority, spec.name))
    summaries = {spec.name: spec.summary for spec in starters}
    if list_templates:
        if as_json:
            print_json([{"name": name, "summary": summary} for name, summary in summaries.items()])
        else:
            print_table(("template", "summary"), summaries.items())
        return
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(
            f"{path}: a starter config is YAML", hint=f"arb config new {path.with_suffix('.yaml')}"
        )
    starter = next((spec for spec in starters if template in (None, spec.name)), None)
    if starter is None:
        close = nearest(str(template), summaries)
        raise UsageProblem(
            f"no template is called '{template}'" + (f"; did you mean '{close}'?" if close else ""),
            hint="\n".join(f"{name}: {summary}" for name, summary in summaries.items()),
        )
    document = document_called(starter.document)
    text = starter_config(starter, document, manager().registry)
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path}: the file exists", hint="Use --force to replace it.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    if as_json:
        print_json({"path": str(path), "template": starter.name})
    else:
        click.echo(f"{path}: written; run it with: {document.command} {path}")


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
    from arb_ternary_train.config import RunConfig

    spec = document_called(document)
    loaded: LoadedConfig[Any] = load_target(f"document '{spec.name}':", spec.target)(
        path, overrides
    )
    if isinstance(loaded.config, RunConfig):
        loaded = _without_auto(loaded)
    plain = to_plain(loaded.config, given=False)
    rows = [(show_path(where), value, str(loaded.origins[where])) for where, value in leaves(plain)]
    if as_json:
        keys = ("path", "value", "origin")
        print_json([dict(zip(keys, row, strict=True)) for row in rows] if origin else plain)
    elif origin:
        print_table(
            ("setting", "value", "origin"),
            [(where, dump_inline(value), text) for where, value, text in rows],
        )
    else:
        click.echo(dump_yaml(plain), nl=False)


def _without_auto(loaded: LoadedConfig[Any]) -> LoadedConfig[Any]:
    """What a new run would make of options that are ``auto``, each with what it follows from."""
    from arb_ternary.config.errors import Origin
    from arb_ternary_train.auto_options import resolve_auto_options

    resolved = resolve_auto_options(loaded.config)
    derived = {
        path: Origin("derived", f"{loaded.origins[path]}: auto, {resolved.plan}")
        for path in resolved.chosen
    }
    return evolve(loaded, config=resolved.config, origins={**loaded.origins, **derived})


@click.command("schema")
@document_name
@plugin_files
@click.option("--json", "compact", is_flag=True, help="Print it on one line.")
def schema(document: str | None, compact: bool) -> None:
    """Print the JSON Schema (draft 2020-12) of config files, with every installed component."""
    from arb_ternary_train.schema import json_schema

    spec = document_called(document)
    found = json_schema(load_target(f"document '{spec.name}':", spec.config), manager().registry)
    click.echo(json.dumps(found, indent=None if compact else 2, ensure_ascii=False))
