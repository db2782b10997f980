"""``arb plugins``: list the installed plugins and their hooks."""

from __future__ import annotations

import inspect
from typing import Any

import click

from arb_ternary.cli.options import as_json
from arb_ternary.cli.output import print_json, print_table
from arb_ternary.plugins.hooks import group_of
from arb_ternary.plugins.manager import manager
from arb_ternary.plugins.record import PluginRecord


@click.command("list")
@as_json
def list_plugins(as_json: bool) -> None:
    """List every plugin that was found, with its status and what it provides."""
    records = manager().records
    if as_json:
        print_json([record.to_json() for record in records])
        return
    rows = []
    for record in records:
        origin = record.distribution or record.module
        provided = record.reason or _provided(record)
        rows.append((record.name, record.status, origin, record.version, provided))
    print_table(("plugin", "status", "distribution", "version", "provides"), rows)


def _provided(record: PluginRecord) -> str:
    """Return the components of a plugin on one line, by kind."""
    names: dict[str, list[str]] = {}
    for found in record.components:
        names.setdefault(found.kind, []).append(found.name)
    parts = [f"{kind} {', '.join(listed)}" for kind, listed in names.items()]
    return "; ".join(parts)


@click.command("show")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@as_json
def show(names: tuple[str, ...], as_json: bool) -> None:
    """Show everything about a plugin: status and reason, facts, hooks and components."""
    records = [record for name in names for record in manager().records_called(name)]
    facts = [_facts(record) for record in records]
    if as_json:
        print_json(facts)
        return
    for record, fact in zip(records, facts, strict=True):
        reason = f": {record.reason}" if record.reason else ""
        click.echo(f"{record.name}: {record.status}{reason}")
        origin = f"{record.distribution or 'none'} {record.version or ''}"
        click.echo(f"  distribution  {origin}".rstrip())
        click.echo(f"  module        {record.module}")
        for key, value in fact["info"].items():
            click.echo(f"  {key:<13} {value}")
        click.echo(f"  hooks         {', '.join(fact['hooks']) or 'none'}")
        for component in fact["components"]:
            click.echo(
                f"  {component['kind']:<13} {component['name']}: {component['summary']} "
                f"[{component['target']}]"
            )


def _facts(record: PluginRecord) -> dict[str, Any]:
    """Return what there is to show of a plugin, as JSON values."""
    keys = ("kind", "name", "summary", "target", "config")
    facts = record.to_json()
    facts["info"] = {}
    facts["hooks"] = []
    if record.loaded:
        facts["info"] = dict(manager().plugin_info(record.name))
        facts["hooks"] = list(manager().implemented_by(record.name))
    facts["components"] = [
        {key: getattr(found.spec, key) for key in keys} for found in record.components
    ]
    return facts


@click.command("hooks")
@as_json
def hooks(as_json: bool) -> None:
    """List every hook that a plugin or a tracker can implement, with its signature.

    The types are in arb_ternary.specs, arb_ternary.protocols.runs, arb_ternary.backends.select,
    collections.abc, types and typing.
    """
    facts = []
    rows = []
    for hook in manager().hooks:
        name = hook.__name__
        group = group_of(hook)
        signature = inspect.signature(hook)
        text = inspect.getdoc(hook) or ""
        # Annotations are texts, in quotes.
        written = f"{name}{signature}".replace("'", "")
        facts.append(
            {
                "name": name,
                "group": group,
                "arguments": list(signature.parameters),
                "signature": written,
                "documentation": text,
            }
        )
        summary = text.partition("\n")[0]
        rows.append((written, group, summary))
    if as_json:
        print_json(facts)
    else:
        print_table(("hook", "group", "what it does"), rows)
