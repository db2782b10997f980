"""``arb backends``: list the kernel backends, and explain which one is used."""

from __future__ import annotations

from typing import Any

import click

from arb_ternary.backends.select import candidates, get_backend, request_backend, select
from arb_ternary.cli.options import as_json, completes
from arb_ternary.cli.options import device as device_option
from arb_ternary.cli.output import print_json, print_table
from arb_ternary.plugins.discovery import install_command
from arb_ternary.plugins.manager import manager

_COLUMNS = ("status", "priority", "distribution", "devices", "reason")


@click.command("list")
@device_option
@as_json
def list_backends(device: str, as_json: bool) -> None:
    """List every backend, whether it can be used on the device, and why (not)."""
    rows = describe_backends(device)
    if as_json:
        print_json(rows)
        return
    shown = [{**row, "devices": " ".join(row["devices"])} for row in rows]
    print_table(("backend", *_COLUMNS), [list(row.values()) for row in shown])


@click.command("explain")
@click.option(
    "--backend",
    shell_complete=completes("backend"),
    help="Explain this choice instead of ARB_TERNARY_BACKEND or auto.",
)
@device_option
@as_json
def explain(backend: str | None, device: str, as_json: bool) -> None:
    """Show the backend that is used on the device, why, its capabilities, and the ops it lacks."""
    from arb_ternary.backends.dispatch import fallback_ops

    request = request_backend(command_line=backend, device=device)
    selection = select(request)
    built = get_backend(selection.name)
    explanation: dict[str, Any] = {
        "device": device,
        "request": request.value,
        "source": selection.source,
        "backend": selection.name,
        "reason": selection.reason,
        "rejected": [{"name": name, "reason": reason} for name, reason in selection.rejected],
        "capabilities": sorted(built.capabilities),
        "fallback_ops": list(fallback_ops(built)),
    }
    if as_json:
        print_json(explanation)
        return
    click.echo(f"{selection.name} on {device}: {selection.reason}")
    click.echo(f"  request       {request.value} ({selection.source})")
    for name, reason in selection.rejected:
        click.echo(f"  not           {name}: {reason}")
    click.echo(f"  capabilities  {', '.join(explanation['capabilities']) or 'none'}")
    click.echo(f"  reference ops {', '.join(explanation['fallback_ops']) or 'none'}")


def describe_backends(device: str) -> list[dict[str, Any]]:
    """Return the registered backends, the best first, then those that are not installed.

    Each is a mapping of JSON values, in the order of the columns of the listing.
    """
    rows: list[dict[str, Any]] = [
        {
            "name": one.name,
            "status": "usable" if one.usable else "unusable",
            "priority": one.spec.priority,
            "distribution": one.distribution,
            "devices": list(one.spec.devices),
            "reason": one.reason,
        }
        for one in candidates(device)
    ]
    for name, distribution in manager().registry.not_installed("backend").items():
        rows.append(
            {
                "name": name,
                "status": "not installed",
                "priority": None,
                "distribution": distribution,
                "devices": [],
                "reason": install_command(distribution),
            }
        )
    return rows
