"""``arb config``: write a starter config, check one, show what it means, describe what may stand in one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from arb_ternary.cli.options import as_json, plugin_files
from arb_ternary.cli.output import print_json, print_table
from arb_ternary.errors import ArbError, ConfigError, EnvironmentProblem
from arb_ternary.plugins.manager import manager

__all__ = ["config", "overrides"]

F = TypeVar("F", bound=Callable[..., Any])


def overrides(command: F) -> F:
    """``-o path=value``, any number of times: the command gets ``overrides: tuple[str, ...]`` for ``load_config``."""
    return click.option(
        "-o",
        "--override",
        "overrides",
        metavar="PATH=VALUE",
        multiple=True,
        help="Change a setting, e.g. -o phases.0.steps=10. Can be repeated.",
    )(command)


@click.group()
def config() -> None:
    """Write, check and explain config files."""


@config.command("new")
@click.argument("path", default="arb.yaml", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--template", default="small", show_default=True, help="What to start from; --list names them.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--list", "list_templates", is_flag=True, help="List the templates and write nothing.")
@as_json
def new(path: Path, template: str, force: bool, list_templates: bool, as_json: bool) -> None:
    """Write a starter config to PATH (arb.yaml), with every option explained."""
    from arb_ternary.config.starter import TEMPLATES, starter_config

    if list_templates:
        if as_json:
            print_json([{"name": name, "summary": each.summary} for name, each in TEMPLATES.items()])
        else:
            print_table(("template", "summary"), [(name, each.summary) for name, each in TEMPLATES.items()])
        return
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(f"{path}: a starter config is YAML", hint=f"arb config new {path.with_suffix('.yaml')}")
    text = starter_config(template, manager().registry)
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path}: the file exists", hint="Use --force to replace it.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    if as_json:
        print_json({"path": str(path), "template": template})
    else:
        click.echo(f"{path}: written; run it with: arb train {path}")


@config.command("validate")
@click.argument("path", type=click.Path(path_type=Path))
@overrides
@plugin_files
@as_json
def validate(path: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check the config in PATH; list everything that is wrong with it."""
    from arb_ternary_train.loading import load_config

    try:
        loaded = load_config(path, overrides).config
    except (ConfigError, EnvironmentProblem) as error:
        if not as_json:
            raise
        print_json({"path": str(path), "valid": False, "faults": _faults(error)})
        click.get_current_context().exit(error.exit_code)
    if as_json:
        print_json({"path": str(path), "valid": True, "faults": []})
        return
    phases = ", ".join(phase.name for phase in loaded.phases)
    click.echo(f"{path}: valid: {loaded.model.name} on {loaded.data.name}, {loaded.optimizer.name}, phases {phases}")


@config.command("show")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--origin", is_flag=True, help="Say where each value comes from.")
@overrides
@plugin_files
@as_json
def show(path: Path, origin: bool, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print the config in PATH as it takes effect, with every default."""
    from arb_ternary.config.paths import show_path
    from arb_ternary.config.plain import leaves, to_plain
    from arb_ternary.config.yaml_document import dump_inline, dump_yaml
    from arb_ternary_train.loading import load_config

    loaded = load_config(path, overrides)
    plain = to_plain(loaded.config, given=False)
    if not origin:
        if as_json:
            print_json(plain)
        else:
            click.echo(dump_yaml(plain), nl=False)
        return
    rows = [(show_path(where), value, str(loaded.origin(where))) for where, value in leaves(plain)]
    if as_json:
        print_json([{"path": where, "value": value, "origin": source} for where, value, source in rows])
    else:
        print_table(
            ("setting", "value", "origin"), [(where, dump_inline(value), source) for where, value, source in rows]
        )


@config.command("schema")
@plugin_files
@click.option("--json", "compact", is_flag=True, help="Print it on one line.")
def schema(compact: bool) -> None:
    """Print the JSON Schema (draft 2020-12) of config files, with every installed component."""
    import json

    from arb_ternary.config.schema import json_schema

    found = json_schema(manager().registry)
    if compact:
        click.echo(json.dumps(found, ensure_ascii=False, separators=(",", ":")))
    else:
        print_json(found)


def _faults(error: ArbError) -> list[dict[str, Any]]:
    from arb_ternary.config.errors import ConfigEnvironmentProblem, InvalidConfig

    if isinstance(error, InvalidConfig | ConfigEnvironmentProblem):
        return [fault.to_json() for fault in error.faults]
    return [{"where": "", "path": "", "message": error.what, "hint": error.hint}]
