"""``arb backends roofline``: one op on one shape: whose kernel it is, and the time that it cannot
beat.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import click
from attrs import asdict

from arb_ternary.backends.protocol import OPTIONAL_OPS, REQUIRED_OPS, KernelBackend, WeightShape
from arb_ternary.backends.select import candidates, get_backend, request_backend, select
from arb_ternary.cli.options import as_json
from arb_ternary.cli.output import print_json, print_table
from arb_ternary.errors import EnvironmentProblem, UsageProblem, nearest
from arb_ternary_bench.roofline import GPUS, OPS, Gpu, Work, occupancy, work


@click.command()
@click.argument("op")
@click.argument("shape", metavar="M,N,K")
@click.option(
    "--backend", default=None, help="Whose kernel; by default ARB_TERNARY_BACKEND or auto decides."
)
@click.option(
    "--device", default="cpu", show_default=True, help="Device to ask about, e.g. cpu, cuda:0, mps."
)
@click.option(
    "--group-size", default=128, show_default=True, help="Columns that share an exponent."
)
@click.option(
    "--operands", type=click.Choice(["int8", "bfloat16"]), default="int8", show_default=True
)
@as_json
def roofline(
    op: str,
    shape: str,
    backend: str | None,
    device: str,
    group_size: int,
    operands: str,
    as_json: bool,
) -> None:
    """Say whose kernel OP is on M,N,K, what was measured, and the least bytes, operations and time
    on GPUs.

    M is the number of rows of activations, N and K are rows and columns of the weight, for example
    linear 1,4096,4096.
    """
    known = (*REQUIRED_OPS, *OPTIONAL_OPS)
    if op not in known:
        close = nearest(op, known)
        hint = f"did you mean {close!r}? " if close else ""
        raise UsageProblem(
            f"OP: {op!r} is not an op of a backend", f"{hint}known: {', '.join(known)}"
        )
    size = _parse_shape(shape)
    chosen = get_backend(select(request_backend(command_line=backend, device=device)).name)
    facts = explain_op(chosen, op, size, group_size, device=device, integer=operands == "int8")
    if as_json:
        print_json(facts)
    else:
        _print(facts)


def _parse_shape(text: str) -> tuple[int, int, int]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise UsageProblem(
            f"{text!r} is not M,N,K", "three positive whole numbers, for instance 1,4096,4096"
        )
    rows, outputs, columns = map(int, parts)
    return rows, outputs, columns


def explain_op(
    backend: KernelBackend,
    op: str,
    size: tuple[int, int, int],
    group_size: int,
    *,
    device: str,
    integer: bool,
) -> dict[str, Any]:
    """Facts as JSON values.

    The kernel is that of the backend which owns the weight: layouts differ, so that a run has one
    backend for all ops and ``auto`` goes by priorities. ``measured`` says what the tables of all
    usable backends hold of this machine: a backend that has a method ``measured(op, rows, shape,
    integer)`` is asked for ``seconds`` and the ``shape`` M, N, K that they were measured on; None
    where it has measured nothing.

    ``roofline`` is None for an op without an analytic model. A backend that has a method
    ``compiled(op, rows, shape, integer)`` is asked for what its compiled kernel uses: ``kernel``,
    ``registers``, ``spills``, ``shared``, ``warps``, ``programs``; None where it cannot say.
    """
    rows, outputs, columns = size
    shape = WeightShape(outputs, columns, min(group_size, columns))
    return {
        "op": op,
        "shape": {"M": rows, "N": outputs, "K": columns, "G": group_size},
        "kernel_of": backend.name if op in backend.kernels else "torch",
        "operands": "int8" if integer else "bfloat16",
        "measured": _measured(op, rows, shape, device, integer=integer),
        "roofline": _roofline(backend, op, rows, shape, integer=integer) if op in OPS else None,
    }


def _roofline(
    backend: KernelBackend, op: str, rows: int, shape: WeightShape, *, integer: bool
) -> dict[str, Any]:
    least = work(op, rows, shape, integer=integer)
    compiled = getattr(backend, "compiled", None)
    code = (
        compiled(op, rows, shape, integer)
        if compiled is not None and op in backend.kernels
        else None
    )
    return {
        "bytes": least.bytes_moved,
        "operations": least.operations,
        "compiled": code,
        "gpus": [_on(gpu, least, code) for gpu in GPUS],
    }


def _measured(
    op: str, rows: int, shape: WeightShape, device: str, *, integer: bool
) -> dict[str, Any]:
    """What usable backends have measured, the fastest first."""
    found = {}
    for candidate in candidates(device):
        with suppress(EnvironmentProblem):  # one that cannot be built has measured nothing
            ask = (
                getattr(get_backend(candidate.name), "measured", None) if candidate.usable else None
            )
            told = None if ask is None else ask(op, rows, shape, integer)
            if told is not None:
                found[candidate.name] = told
    return dict(sorted(found.items(), key=lambda one: float(one[1]["seconds"])))


def _on(gpu: Gpu, least: Work, code: dict[str, Any] | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "gpu": gpu.name,
        "floor_us": round(least.floor(gpu) * 1e6, 3),
        "bound": least.bound(gpu),
        "occupancy": None,
    }
    if code is not None:
        uses = {name: code[name] for name in ("registers", "shared", "warps", "programs")}
        facts["occupancy"] = asdict(occupancy(gpu, **uses))
    return facts


def _print(facts: dict[str, Any]) -> None:
    sizes = ", ".join(f"{name} = {value}" for name, value in facts["shape"].items())
    click.echo(f"{facts['op']}, {sizes}: kernel of {facts['kernel_of']}")
    for name, told in facts["measured"].items():
        measured_on = " x ".join(map(str, told["shape"]))
        click.echo(
            f"  measured  {name}: {told['seconds'] * 1e6:,.1f} us at M x N x K = {measured_on}"
        )
    least = facts["roofline"]
    if least is None:
        click.echo(f"  at least  no model of {facts['op']}; there are models of {', '.join(OPS)}")
        return
    click.echo(
        f"  at least  {least['bytes']} bytes, {least['operations']} operations "
        f"({facts['operands']})"
    )
    code = least["compiled"]
    if code is None:
        click.echo("  compiled  the backend does not say")
    else:
        click.echo(
            f"  compiled  {code['kernel']} for {code['target']}: {code['registers']} registers, "
            f"{code['spills']} spilled, {code['shared']} bytes of shared memory, {code['warps']} "
            f"warps, {code['programs']} programs"
        )
    print_table(
        ("gpu", "floor (us)", "bound", "programs at a time", "warps", "limit", "waves"),
        [
            (
                row["gpu"],
                row["floor_us"],
                row["bound"],
                *(_occupancy(row["occupancy"]) or ("", "", "", "")),
            )
            for row in least["gpus"]
        ],
    )


def _occupancy(held: dict[str, Any] | None) -> tuple[object, ...] | None:
    if held is None:
        return None
    return held["programs"], held["warps"], held["limit"], f"{held['waves']:.2f}"
