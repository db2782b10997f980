"""What ``arb backends explain`` says of one op on one shape: whose kernel it is, and the time it cannot beat."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import click
from attrs import asdict

from arb_ternary.backends.protocol import OPTIONAL_OPS, REQUIRED_OPS, KernelBackend, WeightShape
from arb_ternary.backends.select import candidates, get_backend
from arb_ternary.cli.output import print_table
from arb_ternary.errors import EnvironmentProblem, UsageProblem, nearest
from arb_ternary_bench.roofline import GPUS, OPS, Gpu, Work, occupancy, work

__all__ = ["check_op", "explain_op", "parse_shape", "print_op"]


def parse_shape(text: str) -> tuple[int, int, int]:
    """``M,N,K`` as three positive whole numbers.

    Raises:
        UsageProblem: it is something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise UsageProblem(f"--shape: {text!r} is not M,N,K", "three positive whole numbers, for instance 1,4096,4096")
    rows, outputs, columns = map(int, parts)
    return rows, outputs, columns


def check_op(op: str, *, modelled: bool) -> None:
    """Refuse what is not an op, or has no analytic model where one is asked for.

    Raises:
        UsageProblem: with the nearest name.
    """
    known = OPS if modelled else (*REQUIRED_OPS, *OPTIONAL_OPS)
    if op not in known:
        close = nearest(op, known)
        hint = f"did you mean {close!r}? " if close else ""
        what = "has no roofline" if modelled else "is not an op of a backend"
        raise UsageProblem(f"--op: {op!r} {what}", f"{hint}known: {', '.join(known)}")


def explain_op(
    backend: KernelBackend,
    op: str,
    size: tuple[int, int, int],
    group_size: int,
    *,
    device: str,
    integer: bool,
    roofline: bool,
) -> dict[str, Any]:
    """Facts as JSON values.

    The kernel is that of the backend which owns the weight: layouts differ, so that a run has one backend for all ops
    and ``auto`` goes by priorities. ``measured`` says what the tables of all usable backends hold of this machine: a
    backend that has a method ``measured(op, rows, shape, integer)`` is asked for ``seconds`` and the ``shape`` M, N, K
    that they were measured on; None where it has measured nothing.

    With ``roofline``, a backend that has a method ``compiled(op, rows, shape, integer)`` is asked for what its compiled
    kernel uses: ``kernel``, ``registers``, ``spills``, ``shared``, ``warps``, ``programs``; None where it cannot say.
    """
    rows, outputs, columns = size
    facts: dict[str, Any] = {
        "op": op,
        "shape": {"M": rows, "N": outputs, "K": columns, "G": group_size},
        "kernel_of": backend.name if op in backend.kernels else "torch",
        "operands": "int8" if integer else "bfloat16",
    }
    shape = WeightShape(outputs, columns, min(group_size, columns))
    facts["measured"] = _measured(op, rows, shape, device, integer=integer)
    if not roofline:
        return facts
    least = work(op, rows, shape, integer=integer)
    compiled = getattr(backend, "compiled", None)
    code = compiled(op, rows, shape, integer) if compiled is not None and op in backend.kernels else None
    return {
        **facts,
        "bytes": least.bytes_moved,
        "operations": least.operations,
        "compiled": code,
        "gpus": [_on(gpu, least, code) for gpu in GPUS],
    }


def _measured(op: str, rows: int, shape: WeightShape, device: str, *, integer: bool) -> dict[str, Any]:
    """What usable backends have measured, the fastest first."""
    found = {}
    for candidate in candidates(device):
        with suppress(EnvironmentProblem):  # one that cannot be built has measured nothing
            ask = getattr(get_backend(candidate.name), "measured", None) if candidate.usable else None
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


def print_op(facts: dict[str, Any]) -> None:
    """The facts as text."""
    sizes = ", ".join(f"{name} = {value}" for name, value in facts["shape"].items())
    click.echo(f"  op            {facts['op']}, {sizes}: kernel of {facts['kernel_of']}")
    for name, told in facts["measured"].items():
        measured_on = " x ".join(map(str, told["shape"]))
        click.echo(f"  measured      {name}: {told['seconds'] * 1e6:,.1f} us at M x N x K = {measured_on}")
    if "gpus" not in facts:
        return
    click.echo(f"  at least      {facts['bytes']} bytes, {facts['operations']} operations ({facts['operands']})")
    code = facts["compiled"]
    if code is None:
        click.echo("  compiled      the backend does not say")
    else:
        click.echo(
            f"  compiled      {code['kernel']} for {code['target']}: {code['registers']} registers, {code['spills']} "
            f"spilled, {code['shared']} bytes of shared memory, {code['warps']} warps, {code['programs']} programs"
        )
    print_table(
        ("gpu", "floor (us)", "bound", "programs at a time", "warps", "limit", "waves"),
        [
            (row["gpu"], row["floor_us"], row["bound"], *(_occupancy(row["occupancy"]) or ("", "", "", "")))
            for row in facts["gpus"]
        ],
    )


def _occupancy(held: dict[str, Any] | None) -> tuple[object, ...] | None:
    if held is None:
        return None
    return held["programs"], held["warps"], held["limit"], f"{held['waves']:.2f}"
