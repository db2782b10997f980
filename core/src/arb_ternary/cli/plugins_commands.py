"""``arb plugins``: what is installed, and what became of it."""

from __future__ import annotations

from typing import Any

import click
from attrs import asdict

from arb_ternary.cli.options import as_json
from arb_ternary.cli.output import print_json, print_table
from arb_ternary.plugins.discovery import PluginRecord
from arb_ternary.plugins.hooks import describe_hook
from arb_ternary.plugins.manager import manager


@click.command("list")
@as_json
def list_plugins(as_json: bool) -> None:
    """Every plugin that was found, with its status and what it provides."""
    records = manager().records
    if as_json:
        print_json([record.to_json() for record in records])
        return
    rows = [
        (one.name, one.status, one.distribution or one.module, one.version, _gist(one))
        for one in records
    ]
    print_table(("plugin", "status", "distribution", "version", "provides"), rows)


@click.command("show")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@as_json
def show(names: tuple[str, ...], as_json: bool) -> None:
    """Everything about a plugin: status and reason, facts, hooks and components."""
    shown = [record for name in names for record in manager().records_called(name)]
    facts = [_facts(record) for record in shown]
    if as_json:
        print_json(facts)
        return
    for record, fact in zip(shown, facts, strict=True):
        click.echo(
            f"{record.name}: {record.status}" + (f": {record.reason}" if record.reason else "")
        )
        click.echo(
            f"  distribution  {record.distribution or 'none'} {record.version or ''}".rstrip()
        )
        click.echo(f"  module        {record.module}")
        for key, value in fact["info"].items():
            click.echo(f"  {key:<13} {value}")
        click.echo(f"  hooks         {', '.join(fact['hooks']) or 'none'}")
        for component in fact["components"]:
            click.echo(
                f"  {component['kind']:<13} {component['name']}: {component['summary']} "
                f"[{component['target']}]"
            )


@click.command("hooks")
@as_json
def hooks(as_json: bool) -> None:
    """Every hook that a plugin can implement."""
    described = [describe_hook(hook) for hook in manager().hooks]
    if as_json:
        print_json([asdict(hook) for hook in described])
        return
    rows = [
        (f"{each.name}({', '.join(each.arguments)})", each.group, each.documentation)
        for each in described
    ]
    print_table(
        ("hook", "group", "called"),
        [(call, group, text.partition("\n")[0]) for call, group, text in rows],
    )


def _gist(record: PluginRecord) -> str:
    if record.reason:
        return record.reason
    counts: dict[str, list[str]] = {}
    for found in record.components:
        counts.setdefault(found.kind, []).append(found.name)
    return "; ".join(f"{kind} {', '.join(names)}" for kind, names in counts.items())


def _facts(record: PluginRecord) -> dict[str, Any]:
    shown = ("kind", "name", "summary", "target", "config")
    components = [{key: getattr(found.spec, key) for key in shown} for found in record.components]
    return {
        **record.to_json(),
        "info": dict(manager().plugin_info(record.name)) if record.is_loaded else {},
        "hooks": list(manager().implemented_by(record.name)) if record.is_loaded else [],
        "components": components,
    }
