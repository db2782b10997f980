"""``arb plugins``: what is installed, what became of it, and how to write one more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from arb_ternary.cli.options import as_json
from arb_ternary.cli.output import print_json, print_table
from arb_ternary.errors import UsageProblem, nearest
from arb_ternary.plugins.manager import manager
from arb_ternary.plugins.records import PluginRecord
from arb_ternary.plugins.surface import NOUNS, describe_hooks

__all__ = ["plugins"]


@click.group()
def plugins() -> None:
    """List, inspect, check and write plugins."""


@plugins.command("list")
@as_json
def list_plugins(as_json: bool) -> None:
    """Every plugin that was found, with its status and what it provides."""
    records = manager().records
    if as_json:
        print_json([record.to_json() for record in records])
        return
    print_table(
        ("plugin", "status", "distribution", "version", "provides"),
        [
            (record.name, record.status, record.distribution or record.module, record.version, _gist(record))
            for record in records
        ],
    )


@plugins.command("show")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@as_json
def show(names: tuple[str, ...], as_json: bool) -> None:
    """Everything about a plugin: status and reason, facts, hooks and components."""
    shown = [record for name in names for record in _records_called(name)]
    facts = [_facts(record) for record in shown]
    if as_json:
        print_json(facts)
        return
    for record, fact in zip(shown, facts, strict=True):
        click.echo(f"{record.name}: {record.status}" + (f": {record.reason}" if record.reason else ""))
        click.echo(f"  distribution  {record.distribution or 'none'} {record.version or ''}".rstrip())
        click.echo(f"  module        {record.module}")
        for key, value in fact["info"].items():
            click.echo(f"  {key:<13} {value}")
        click.echo(f"  hooks         {', '.join(fact['hooks']) or 'none'}")
        for component in fact["components"]:
            click.echo(f"  {component['kind']:<13} {component['name']}: {component['summary']} [{component['target']}]")


@plugins.command("hooks")
@as_json
def hooks(as_json: bool) -> None:
    """Every hook that a plugin can implement."""
    described = describe_hooks()
    if as_json:
        print_json(
            [
                {
                    "name": hook.name,
                    "group": hook.group,
                    "arguments": list(hook.arguments),
                    "documentation": hook.documentation,
                }
                for hook in described
            ]
        )
        return
    print_table(
        ("hook", "group", "called"),
        [(f"{hook.name}({', '.join(hook.arguments)})", hook.group, hook.summary) for hook in described],
    )


@plugins.command("check")
@click.argument("name")
@click.option("--kind", type=click.Choice(list(NOUNS)), help="Check only the plugin's components of this kind.")
def check(name: str, kind: str | None) -> int:
    """Run the conformance kit on an installed plugin. Exits with 0 when it passes."""
    _records_called(name)
    from arb_ternary_testing.runner import check_plugin

    return int(check_plugin(name, kind))


@plugins.command("new")
@click.argument("name")
@click.option("--kind", type=click.Choice(list(NOUNS)), required=True, help="What the plugin provides.")
@click.option(
    "--into",
    "destination",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Folder in which the plugin's folder is made; by default the current one.",
)
def new(name: str, kind: str, destination: Path) -> None:
    """Write a new plugin: a distribution with one component that works, and its tests."""
    from arb_ternary_testing.scaffold.generate import new_plugin

    click.echo(new_plugin(name, kind, destination))


def _gist(record: PluginRecord) -> str:
    if record.reason:
        return record.reason
    counts: dict[str, list[str]] = {}
    for kind, name in record.components:
        counts.setdefault(kind, []).append(name)
    return "; ".join(f"{kind} {', '.join(names)}" for kind, names in counts.items())


def _records_called(name: str) -> list[PluginRecord]:
    records = manager().records
    found = [record for record in records if record.name == name]
    if not found:
        names = sorted(record.name for record in records)
        close = nearest(name, names)
        suggestion = [f"did you mean {close!r}?"] if close else []
        raise UsageProblem(f"no plugin is called {name!r}", "\n".join([*suggestion, f"installed: {', '.join(names)}"]))
    return found


def _facts(record: PluginRecord) -> dict[str, Any]:
    loaded = bool(record.components) or not record.reason
    relay = manager().hooks
    components = [
        {
            "kind": found.kind,
            "name": found.name,
            "summary": found.spec.summary,
            "target": found.spec.target,
            "config": found.spec.config,
        }
        for found in manager().registry.of_plugin(record)
    ]
    return {
        **record.to_json(),
        "info": dict(relay.plugin_info(record.name)) if loaded else {},
        "hooks": list(relay.implemented_by(record.name)) if loaded else [],
        "components": components,
    }
