"""``arb backends``: which kernel backends there are, which one is used, and why."""

from __future__ import annotations

from typing import Any

import click

from arb_ternary.backends.select import candidates, get_backend, request_backend, select
from arb_ternary.cli.options import as_json
from arb_ternary.cli.output import print_json, print_table
from arb_ternary.errors import UsageProblem
from arb_ternary.plugins.manager import manager
from arb_ternary.plugins.missing import not_installed

__all__ = ["describe_backends", "explain", "list_backends"]

_device = click.option("--device", default="cpu", show_default=True, help="Device to ask about, e.g. cpu, cuda:0, mps.")


@click.command("list")
@_device
@as_json
def list_backends(device: str, as_json: bool) -> None:
    """Every backend, whether it can be used on the device, and why (not)."""
    rows = describe_backends(device)
    if as_json:
        print_json(rows)
        return
    print_table(
        ("backend", "status", "priority", "distribution", "devices", "reason"),
        [
            (row["name"], row["status"], row["priority"], row["distribution"], " ".join(row["devices"]), row["reason"])
            for row in rows
        ],
    )


@click.command("explain")
@click.option("--backend", default=None, help="Explain this choice instead of ARB_TERNARY_BACKEND or auto.")
@_device
@click.option("--op", default=None, help="Also say whose kernel this op is, e.g. linear.")
@click.option("--shape", default=None, help="M,N,K of --op: rows of activations, rows and columns of the weight.")
@click.option("--group-size", default=128, show_default=True, help="Columns that share an exponent, for --op.")
@click.option("--operands", type=click.Choice(["int8", "bfloat16"]), default="int8", show_default=True, help="Of --op.")
@click.option("--roofline", is_flag=True, help="With --op and --shape: bytes, operations and the least time on GPUs.")
@as_json
def explain(
    backend: str | None,
    device: str,
    op: str | None,
    shape: str | None,
    group_size: int,
    operands: str,
    roofline: bool,
    as_json: bool,
) -> None:
    """Which backend is used on the device, why, what it promises, and which ops the reference does for it."""
    from arb_ternary.backends.dispatch import fallback_ops
    from arb_ternary.cli.explain_op import check_op, explain_op, parse_shape, print_op

    if (op is None) != (shape is None) or (roofline and op is None):
        raise UsageProblem(
            "--op, --shape: one needs the other, and --roofline needs both", "--op linear --shape 1,4096,4096"
        )
    if op is not None:
        check_op(op, modelled=roofline)
    size = None if shape is None else parse_shape(shape)
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
    if op is not None and size is not None:
        facts = explain_op(built, op, size, group_size, device=device, integer=operands == "int8", roofline=roofline)
        explanation["op"] = facts
    if as_json:
        print_json(explanation)
        return
    click.echo(f"{selection.name} on {device}: {selection.reason}")
    click.echo(f"  request       {request.value} ({selection.source})")
    for name, reason in selection.rejected:
        click.echo(f"  not           {name}: {reason}")
    click.echo(f"  capabilities  {', '.join(explanation['capabilities']) or 'none'}")
    click.echo(f"  reference ops {', '.join(explanation['fallback_ops']) or 'none'}")
    if "op" in explanation:
        print_op(explanation["op"])


def describe_backends(device: str) -> list[dict[str, Any]]:
    """Registered backends, best first, then the announced ones that are not installed, as JSON values."""
    registered: list[dict[str, Any]] = [
        {
            "name": candidate.name,
            "status": "usable" if candidate.usable else "unusable",
            "priority": candidate.spec.priority,
            "distribution": candidate.distribution,
            "devices": list(candidate.spec.devices),
            "reason": candidate.reason,
        }
        for candidate in candidates(device)
    ]
    absent: list[dict[str, Any]] = [
        {
            "name": name,
            "status": "not installed",
            "priority": None,
            "distribution": distribution,
            "devices": [],
            "reason": f"pip install {distribution}",
        }
        for name, distribution in not_installed("backend", manager().records).items()
    ]
    return registered + absent
