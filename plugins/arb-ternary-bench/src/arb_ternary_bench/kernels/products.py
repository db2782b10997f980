"""Contenders of both matrix products: backends, and torch in bfloat16 and int8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from arb_ternary.backends.dispatch import kernel
from arb_ternary_bench.kernels.cells import (
    Cell,
    Contender,
    Role,
    check_close,
    check_equal,
    poisoned,
)
from arb_ternary_bench.kernels.operands import Operands, exact_grad_input, exact_linear
from arb_ternary_bench.kernels.timing import Variant

#: Ends the names of contenders whose time includes making int8 rows of float32 ones.
WITH_QUANTISATION = " + quantize_rows"

_FLOAT = torch.bfloat16


def repeated(cell: Cell, make: Callable[[], Any], first: Any, nbytes: int) -> list[Any]:
    """``first`` and as many more as the cell needs of an operand that takes ``nbytes``."""
    return [first, *(make() for _ in range(cell.copies(nbytes) - 1))]


def linear_contenders(
    cell: Cell, operands: Operands, backends: Sequence[str], *, integer: bool
) -> list[Contender]:
    """``x @ W.T``: of int8 rows, or of bfloat16 ones."""
    shape = cell.shape
    x = operands.x.to(_FLOAT)
    if integer:
        wanted = exact_linear(operands.q, operands.scale, operands.trits, operands.exponent, shape)
    else:
        wanted = _float_product(x, operands)
    made = []
    for name in backends:
        run = kernel(name, "linear")
        weights = _weights(cell, operands, name)
        if integer:
            q = operands.q
            scale = operands.scale

            def call(
                i: int, run: Any = run, weights: Any = weights, q: Tensor = q, scale: Tensor = scale
            ) -> Any:
                return run(q, scale, *weights[i], None, shape, torch.float32)

            made.append(_product(cell, name, "backend", name, call, weights, q, wanted))
            made.append(_with_quantisation(cell, operands, name, weights))
        else:

            def call_float(i: int, run: Any = run, weights: Any = weights) -> Any:
                return run(x, None, *weights[i], None, shape, _FLOAT)

            made.append(
                _product(cell, name, "backend", name, call_float, weights, x, wanted, exact=False)
            )
    made.append(_torch_float_linear(cell, x, operands))
    if integer:
        made.extend(_torch_int8_linears(cell, operands))
    return made


def grad_input_contenders(
    cell: Cell, operands: Operands, backends: Sequence[str], *, integer: bool
) -> list[Contender]:
    """``grad_y @ W``: of an int8 gradient, or of a bfloat16 one."""
    shape = cell.shape
    grad = operands.int8_gradient if integer else operands.gradient.to(_FLOAT)
    scale = operands.gradient_scale if integer else None
    dense = _dense(operands)
    if integer:
        wanted = exact_grad_input(
            grad, operands.gradient_scale, operands.trits, operands.exponent, shape
        )
    else:
        wanted = grad.to(torch.float32) @ dense
    made = []
    for name in backends:
        run = kernel(name, "linear_grad_input")
        weights = _weights(cell, operands, name)

        def call(i: int, run: Any = run, weights: Any = weights) -> Any:
            return run(grad, scale, *weights[i], shape, torch.float32 if integer else _FLOAT)

        made.append(
            _product(cell, name, "backend", name, call, weights, grad, wanted, exact=integer)
        )
    low = dense.to(_FLOAT)
    floats = repeated(cell, low.clone, low, low.nbytes)
    left = operands.gradient.to(_FLOAT)
    made.append(
        _product(
            cell,
            "torch bfloat16",
            "torch bfloat16",
            "torch.matmul",
            lambda i: left @ floats[i],
            [(weight,) for weight in floats],
            left,
            left.to(torch.float32) @ dense,
            exact=False,
        )
    )
    if integer:
        trits = operands.trits
        codes = repeated(cell, trits.clone, trits, trits.nbytes)
        exact = (grad.to(torch.float64) @ trits.to(torch.float64)).to(torch.int32)
        made.append(
            _product(
                cell,
                "torch._int_mm",
                "torch int8",
                "torch._int_mm",
                lambda i: torch._int_mm(grad, codes[i]),
                [(code,) for code in codes],
                grad,
                exact,
                note="sums of trits, without exponents and scales",
            )
        )
    return made


def _weights(cell: Cell, operands: Operands, name: str) -> list[tuple[Tensor, Tensor]]:
    """Copies of the packed weight and its exponents."""
    packed = kernel(name, "pack")(operands.trits)
    exponent = operands.exponent
    return repeated(
        cell,
        lambda: (packed.clone(), exponent.clone()),
        (packed, exponent),
        packed.nbytes + exponent.nbytes,
    )


def _dense(operands: Operands) -> Tensor:
    shape = operands.cell.shape
    exponent = operands.exponent.to(torch.int32).repeat_interleave(shape.group_size, dim=1)
    return torch.ldexp(operands.trits.to(torch.float32), exponent[:, : shape.in_features])


def _float_product(x: Tensor, operands: Operands) -> Tensor:
    return x.to(torch.float32) @ _dense(operands).t()


def _product(
    cell: Cell,
    name: str,
    role: Role,
    function: str,
    call: Callable[[int], Any],
    weights: Sequence[tuple[Tensor, ...]],
    left: Tensor,
    wanted: Tensor,
    *,
    exact: bool = True,
    note: str = "",
) -> Contender:
    """A contender whose calls return a product of ``left`` and a weight."""
    held = sum(tensor.nbytes for tensor in weights[0])

    def check() -> None:
        with poisoned((tuple(wanted.shape), wanted.dtype), device=cell.device):
            got = call(len(weights) - 1)
        (check_equal if exact else check_close)(f"{cell.title}: {name}", got, wanted)

    return Contender(
        variant=Variant(
            name=name,
            call=call,
            copies=len(weights),
            nbytes=held + left.nbytes + wanted.nbytes,
            operations=cell.product_operations,
            rotated_bytes=held,
        ),
        role=role,
        name=function,
        check=check,
        checked="exact" if exact else "within tolerance",
        note=note,
    )


def _with_quantisation(
    cell: Cell, operands: Operands, name: str, weights: Sequence[tuple[Tensor, ...]]
) -> Contender:
    run = kernel(name, "linear")
    quantise = kernel(name, "quantize_rows")
    shape = cell.shape
    x = operands.x

    def call(i: int) -> Any:
        q, scale = quantise(x)
        return run(q, scale, *weights[i], None, shape, torch.float32)

    scale = x.abs().amax(dim=1) / 127.0
    q = (x / scale.unsqueeze(1)).round().to(torch.int8)
    wanted = exact_linear(q, scale, operands.trits, operands.exponent, shape)
    return _product(
        cell,
        f"{name}{WITH_QUANTISATION}",
        "backend",
        name,
        call,
        weights,
        x,
        wanted,
        note="from float32 rows: the time of making them int8 is included",
    )


def _torch_float_linear(cell: Cell, x: Tensor, operands: Operands) -> Contender:
    weight = _dense(operands).to(_FLOAT)
    weights = repeated(cell, weight.clone, weight, weight.nbytes)
    linear = torch.nn.functional.linear
    return _product(
        cell,
        "torch bfloat16",
        "torch bfloat16",
        "torch.nn.functional.linear",
        lambda i: linear(x, weights[i]),
        [(copy,) for copy in weights],
        x,
        _float_product(x, operands),
        exact=False,
    )


def _torch_int8_linears(cell: Cell, operands: Operands) -> list[Contender]:
    """torch's two ways to multiply int8 matrices; which one is faster depends on the shape."""
    q = operands.q
    trits = operands.trits
    sums = (q.to(torch.float64) @ trits.t().to(torch.float64)).to(torch.int32)
    note = "sums of trits, without exponents and scales"
    codes = repeated(cell, trits.clone, trits, trits.nbytes)
    made = [
        _product(
            cell,
            "torch._int_mm",
            "torch int8",
            "torch._int_mm",
            lambda i: torch._int_mm(q, codes[i].t()),
            [(code,) for code in codes],
            q,
            sums,
            note=note,
        )
    ]
    prepacked = _prepacked_linear(cell.out_features, q, trits) if cell.device == "cpu" else None
    if prepacked is not None:
        pack, multiply = prepacked
        first = pack()
        packed = repeated(cell, pack, first, trits.nbytes)

        def call(i: int) -> Any:
            return multiply(packed[i])

        made.append(
            _product(
                cell,
                "torch onednn.qlinear",
                "torch int8",
                "torch.ops.onednn.qlinear_pointwise",
                call,
                [(trits,) for _ in packed],
                q,
                sums.to(torch.float32),
                note=f"{note}; the weight is prepacked",
            )
        )
    return made


def _prepacked_linear(
    out_features: int, q: Tensor, trits: Tensor
) -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]] | None:
    """oneDNN's int8 linear with a weight in its own layout, as inductor calls it; None where torch
    lacks it.

    Activations are uint8 with an offset of 128: for signed ones it has no fast kernel on every
    processor.
    """
    ones = torch.ones(out_features)
    zeros = torch.zeros(out_features, dtype=torch.int64)
    codes = (q.to(torch.int16) + 128).to(torch.uint8)

    def pack() -> Tensor:
        packed: Tensor = torch.ops.onednn.qlinear_prepack(trits.clone(), list(q.shape))
        return packed

    def multiply(packed: Tensor) -> Tensor:
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, 128, packed, ones, zeros, None, 1.0, 0, torch.float32, "none", [], "none"
        )
        return product

    try:
        multiply(pack())
    except (AttributeError, RuntimeError):  # a build without oneDNN
        return None
    return pack, multiply
