"""``arb backends roofline``: whose kernel an op is, what was measured, and the least time."""

from __future__ import annotations

from collections.abc import Mapping
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
from arb_ternary_bench.table import Column, ResultTable, number


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
    """Say whose kernel OP is on M,N,K, what was measured, and the least time on GPUs.

    M is the number of rows of activations, N and K are rows and columns of the weight, for example
    linear 1,4096,4096. The least time follows from bytes and operations.
    """
    known = (*REQUIRED_OPS, *OPTIONAL_OPS)
    if op not in known:
        close = nearest(op, known)
        hint = f"did you mean {close!r}? " if close else ""
        raise UsageProblem(
            f"OP: {op!r} is not an op of a backend", f"{hint}known: {', '.join(known)}"
        )
    size = _parse_size(shape)
    chosen = get_backend(select(request_backend(command_line=backend, device=device)).name)
    facts = explain_op(chosen, op, size, group_size, device=device, integer=operands == "int8")
    if as_json:
        print_json(facts)
        return
    for line in _lines(facts):
        click.echo(line)
    if facts["roofline"] is not None:
        print_table(_GPUS.titles, _GPUS.rows(facts["roofline"]))


def _parse_size(text: str) -> tuple[int, int, int]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 3 and all(part.isdigit() and int(part) for part in parts):
        rows, outputs, columns = map(int, parts)
        return rows, outputs, columns
    raise UsageProblem(
        f"{text!r} is not M,N,K", "three positive whole numbers, for instance 1,4096,4096"
    )


def explain_op(
    backend: KernelBackend,
    op: str,
    size: tuple[int, int, int],
    group_size: int,
    *,
    device: str,
    integer: bool,
) -> dict[str, Any]:
    """Return what is known of an op, as JSON values.

    ``measured`` says what all usable backends know of this machine: a method ``measured(op, rows,
    shape, integer)`` returns ``seconds`` and the ``shape`` M, N, K that they are of, or None.

    ``roofline`` is None for an op without an analytic model. A method ``compiled(op, rows, shape,
    integer)`` of the backend returns what its compiled kernel uses: ``kernel``, ``registers``,
    ``spills``, ``shared``, ``warps``, ``programs``; or None.
    """
    rows, outputs, columns = size
    shape = WeightShape(outputs, columns, min(group_size, columns))
    least = None
    if op in OPS:
        compiled = getattr(backend, "compiled", None)
        code = None
        if compiled is not None and op in backend.kernels:
            code = compiled(op, rows, shape, integer)
        least = _roofline(work(op, rows, shape, integer=integer), code)
    return {
        "op": op,
        "shape": {"M": rows, "N": outputs, "K": columns, "G": group_size},
        "kernel_of": backend.name if op in backend.kernels else "torch",
        "operands": "int8" if integer else "bfloat16",
        "measured": _measured(op, rows, shape, device, integer=integer),
        "roofline": least,
    }


def _roofline(least: Work, code: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "bytes": least.bytes_moved,
        "operations": least.operations,
        "compiled": code,
        "gpus": [_on(gpu, least, code) for gpu in GPUS],
    }


def _on(gpu: Gpu, least: Work, code: Mapping[str, Any] | None) -> dict[str, Any]:
    held = None
    if code is not None:
        uses = {name: code[name] for name in ("registers", "shared", "warps", "programs")}
        held = asdict(occupancy(gpu, **uses))
    return {
        "gpu": gpu.name,
        "floor_us": round(least.floor(gpu) * 1e6, 3),
        "bound": least.bound(gpu),
        "occupancy": held,
    }


def _measured(
    op: str, rows: int, shape: WeightShape, device: str, *, integer: bool
) -> dict[str, Any]:
    """Return what usable backends have measured, the fastest first."""
    found = {}
    for candidate in candidates(device):
        if not candidate.usable:
            continue
        with suppress(EnvironmentProblem):  # one that cannot be built has measured nothing
            ask = getattr(get_backend(candidate.name), "measured", None)
            known = None if ask is None else ask(op, rows, shape, integer)
            if known is not None:
                found[candidate.name] = known
    return dict(sorted(found.items(), key=lambda one: float(one[1]["seconds"])))


def _lines(facts: Mapping[str, Any]) -> list[str]:
    sizes = ", ".join(f"{name} = {value}" for name, value in facts["shape"].items())
    lines = [f"{facts['op']}, {sizes}: kernel of {facts['kernel_of']}"]
    for name, known in facts["measured"].items():
        size = " x ".join(map(str, known["shape"]))
        microseconds = number(known["seconds"], 1, 1e6)
        lines.append(f"  measured  {name}: {microseconds} us at M x N x K = {size}")
    least = facts["roofline"]
    if least is None:
        lines.append(f"  at least  no model of {facts['op']}; there are models of {', '.join(OPS)}")
        return lines
    lines.append(
        f"  at least  {least['bytes']} bytes, {least['operations']} operations "
        f"({facts['operands']})"
    )
    code = least["compiled"]
    if code is None:
        lines.append("  compiled  the backend does not say")
        return lines
    lines.append(
        f"  compiled  {code['kernel']} for {code['target']}: {code['registers']} registers, "
        f"{code['spills']} spilled, {code['shared']} bytes of shared memory, {code['warps']} "
        f"warps, {code['programs']} programs"
    )
    return lines


def _held(title: str, key: str) -> Column:
    def text(row: Mapping[str, Any]) -> str:
        held = row["occupancy"]
        if held is None:
            return ""
        return f"{held[key]:.2f}" if key == "waves" else str(held[key])

    return Column(title, text)


_GPUS = ResultTable(
    columns=(
        Column("gpu", lambda row: row["gpu"], left=True),
        Column("floor (us)", lambda row: str(row["floor_us"])),
        Column("bound", lambda row: row["bound"]),
        _held("programs at a time", "programs"),
        _held("warps", "warps"),
        _held("limit", "limit"),
        _held("waves", "waves"),
    ),
    records=lambda least: least["gpus"],
)
