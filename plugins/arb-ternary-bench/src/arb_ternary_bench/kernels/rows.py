"""Contenders of the ops on rows, backends only: quantisation, and the norm fused with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from arb_ternary.backends.dispatch import kernel
from arb_ternary.backends.select import get_backend
from arb_ternary.errors import ArbError
from arb_ternary_bench.kernels.cells import Cell, Contender, check_close, check_equal, poisoned
from arb_ternary_bench.kernels.operands import Operands, exact_rows
from arb_ternary_bench.kernels.timing import Variant

_EPS = 1e-6
_HASH = (11, 7 << 20, 24)


def row_contenders(cell: Cell, operands: Operands, backends: Sequence[str]) -> list[Contender]:
    """Make the contenders of an op on ``[M, K]`` (on ``[M, N]`` for ``quantize_gradient``)."""
    gradient = cell.op == "quantize_gradient"
    values = operands.gradient if gradient else operands.x
    further: dict[str, tuple[Any, ...]] = {
        "quantize_gradient": _HASH,
        "rms_norm_quantize": (_EPS,),
    }
    more = further.get(cell.op, ())
    return [_contender(cell, name, values, more) for name in backends]


def _contender(cell: Cell, name: str, values: Tensor, more: tuple[Any, ...]) -> Contender:
    run = kernel(name, cell.op)
    copies = cell.repeated(values.clone, values, values.nbytes)

    def check() -> None:
        with poisoned(
            (tuple(values.shape), torch.int8),
            ((values.shape[0],), torch.float32),
            device=cell.device,
        ):
            q, scale = run(values, *more)
        _check(cell, name, values, q, scale, more)

    return Contender(
        variant=Variant(
            name=name,
            call=lambda i: run(copies[i], *more),
            copies=len(copies),
            nbytes=values.nbytes + values.numel(),
            rotated_bytes=values.nbytes,
        ),
        role="backend",
        name=name,
        check=check,
        checked="within one unit" if cell.op == "rms_norm_quantize" else "exact",
        note="" if cell.op in get_backend(name).kernels else "the torch backend stands in",
    )


def _check(
    cell: Cell, name: str, values: Tensor, q: Tensor, scale: Tensor, more: tuple[Any, ...]
) -> None:
    what = f"{cell.title}: {name}"
    if cell.op == "quantize_gradient":
        wanted_q, wanted_scale = kernel("torch", "quantize_gradient")(values, *more)
    else:
        x = values
        if cell.op == "rms_norm_quantize":
            x = values * torch.rsqrt(values.square().mean(dim=1, keepdim=True) + _EPS)
        wanted_q, wanted_scale = exact_rows(x)
    if cell.op != "rms_norm_quantize":
        check_equal(f"{what}, scales", scale, wanted_scale)
        check_equal(f"{what}, rows", q, wanted_q)
        return
    # The mean may be summed in any order, so that a value may round to a neighbour.
    check_close(f"{what}, scales", scale, wanted_scale, 1e-5)
    if int((q.to(torch.int16) - wanted_q).abs().max()) > 1:
        raise ArbError(f"{what}: a row differs by more than one unit", "The kernel is wrong.")
