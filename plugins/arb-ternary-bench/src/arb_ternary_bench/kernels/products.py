"""Contenders of both matrix products: backends, and torch in bfloat16 and int8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import frozen
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
from arb_ternary_bench.kernels.operands import Operands, exact_grad_input, exact_linear, exact_rows
from arb_ternary_bench.kernels.timing import Variant

#: Ends the names of contenders whose time includes the quantisation of float32 rows.
WITH_QUANTISATION = " + quantize_rows"

_FLOAT = torch.bfloat16
_SUMS = "sums of trits, without exponents and scales"

#: Copies of the operands that rotate; the tensors of one copy.
Copies = Sequence[tuple[Tensor, ...]]


@frozen
class Product:
    """A matrix product that takes part in a cell.

    Attributes:
        cell: where.
        left: the operand that is not a weight.
        wanted: the right result.
        exact: whether the result has to be equal to it.
    """

    cell: Cell
    left: Tensor
    wanted: Tensor
    exact: bool

    def contender(
        self,
        name: str,
        call: Callable[[int], Any],
        weights: Copies,
        *,
        role: Role = "backend",
        function: str | None = None,
        note: str = "",
        rotates: bool = True,
    ) -> Contender:
        """Make the contender whose calls return the product of ``left`` and a weight.

        Args:
            name: of the contender.
            call: multiplies with copy ``i``.
            weights: the copies.
            role: what it is compared as.
            function: the backend or the function of torch; by default ``name``.
            note: for readers of the table.
            rotates: whether there are copies of the weight, in a cold cell.
        """
        held = sum(tensor.nbytes for tensor in weights[0])
        check = check_equal if self.exact else check_close
        wanted = self.wanted
        title = f"{self.cell.title}: {name}"

        def checked() -> None:
            with poisoned((tuple(wanted.shape), wanted.dtype), device=self.cell.device):
                got = call(len(weights) - 1)
            check(title, got, wanted)

        return Contender(
            variant=Variant(
                name=name,
                call=call,
                copies=len(weights),
                nbytes=held + self.left.nbytes + wanted.nbytes,
                operations=self.cell.product_operations,
                rotated_bytes=held if rotates else 0,
            ),
            role=role,
            name=function or name,
            check=checked,
            checked="exact" if self.exact else "within tolerance",
            note=note,
        )


def linear_contenders(
    cell: Cell, operands: Operands, backends: Sequence[str], *, integer: bool
) -> list[Contender]:
    """Make the contenders of ``x @ W.T``, with int8 or with bfloat16 rows."""
    shape = cell.shape
    made = []
    if integer:
        q = operands.q
        exact = exact_linear(q, operands.scale, operands.trits, operands.exponent, shape)
        product = Product(cell, q, exact, exact=True)
        for name in backends:
            weights = _weights(cell, operands, name)
            made.append(_linear(product, name, weights, operands.scale, torch.float32))
            made.append(_quantising_linear(cell, operands, name, weights))
    else:
        x = operands.x.to(_FLOAT)
        product = Product(cell, x, _float_product(x, operands), exact=False)
        for name in backends:
            weights = _weights(cell, operands, name)
            made.append(_linear(product, name, weights, None, _FLOAT))
    made.append(_torch_float_linear(cell, operands))
    if integer:
        made.extend(_torch_int8_linears(cell, operands))
    return made


def _linear(
    product: Product, name: str, weights: Copies, scale: Tensor | None, dtype: torch.dtype
) -> Contender:
    run = kernel(name, "linear")
    shape = product.cell.shape

    def call(i: int) -> Any:
        return run(product.left, scale, *weights[i], None, shape, dtype)

    return product.contender(name, call, weights)


def _quantising_linear(cell: Cell, operands: Operands, name: str, weights: Copies) -> Contender:
    run = kernel(name, "linear")
    quantise = kernel(name, "quantize_rows")
    x = operands.x
    shape = cell.shape
    q, scale = exact_rows(x)
    wanted = exact_linear(q, scale, operands.trits, operands.exponent, shape)

    def call(i: int) -> Any:
        rows, scales = quantise(x)
        return run(rows, scales, *weights[i], None, shape, torch.float32)

    return Product(cell, x, wanted, exact=True).contender(
        f"{name}{WITH_QUANTISATION}",
        call,
        weights,
        function=name,
        note="from float32 rows: the time to quantise them is included",
    )


def _torch_float_linear(cell: Cell, operands: Operands) -> Contender:
    x = operands.x.to(_FLOAT)
    weight = _dense(operands).to(_FLOAT)
    weights = cell.repeated(weight.clone, weight, weight.nbytes)
    linear = torch.nn.functional.linear
    return Product(cell, x, _float_product(x, operands), exact=False).contender(
        "torch bfloat16",
        lambda i: linear(x, weights[i]),
        [(copy,) for copy in weights],
        role="torch bfloat16",
        function="torch.nn.functional.linear",
    )


def _torch_int8_linears(cell: Cell, operands: Operands) -> list[Contender]:
    """Make torch's two products of int8 matrices; which one is faster depends on the shape."""
    q = operands.q
    trits = operands.trits
    sums = (q.to(torch.float64) @ trits.t().to(torch.float64)).to(torch.int32)
    codes = cell.repeated(trits.clone, trits, trits.nbytes)
    plain = Product(cell, q, sums, exact=True).contender(
        "torch._int_mm",
        lambda i: torch._int_mm(q, codes[i].t()),
        [(code,) for code in codes],
        role="torch int8",
        note=_SUMS,
    )
    prepacked = None
    if cell.device == "cpu":
        prepacked = _prepacked_linear(cell.out_features, q, trits)
    if prepacked is None:
        return [plain]
    pack, multiply = prepacked
    packed = cell.repeated(pack, pack(), trits.nbytes)
    other = Product(cell, q, sums.to(torch.float32), exact=True).contender(
        "torch onednn.qlinear",
        lambda i: multiply(packed[i]),
        [(trits,) for _ in packed],
        role="torch int8",
        function="torch.ops.onednn.qlinear_pointwise",
        note=f"{_SUMS}; the weight is prepacked",
    )
    return [plain, other]


def grad_input_contenders(
    cell: Cell, operands: Operands, backends: Sequence[str], *, integer: bool
) -> list[Contender]:
    """Make the contenders of ``grad_y @ W``, with an int8 or with a bfloat16 gradient."""
    shape = cell.shape
    dense = _dense(operands)
    scale: Tensor | None
    if integer:
        grad = operands.int8_gradient
        scale = operands.gradient_scale
        dtype = torch.float32
        wanted = exact_grad_input(grad, scale, operands.trits, operands.exponent, shape)
    else:
        grad = operands.gradient.to(_FLOAT)
        scale = None
        dtype = _FLOAT
        wanted = grad.to(torch.float32) @ dense
    product = Product(cell, grad, wanted, exact=integer)

    made = []
    for name in backends:
        run = kernel(name, "linear_grad_input")
        weights = _weights(cell, operands, name)

        def call(i: int, run: Any = run, weights: Any = weights) -> Any:
            return run(grad, scale, *weights[i], shape, dtype)

        made.append(product.contender(name, call, weights))
    made.append(_torch_float_grad_input(cell, operands, dense))
    if integer:
        made.append(_torch_int8_grad_input(cell, operands))
    return made


def _torch_float_grad_input(cell: Cell, operands: Operands, dense: Tensor) -> Contender:
    low = dense.to(_FLOAT)
    weights = cell.repeated(low.clone, low, low.nbytes)
    left = operands.gradient.to(_FLOAT)
    product = Product(cell, left, left.to(torch.float32) @ dense, exact=False)
    return product.contender(
        "torch bfloat16",
        lambda i: left @ weights[i],
        [(weight,) for weight in weights],
        role="torch bfloat16",
        function="torch.matmul",
    )


def _torch_int8_grad_input(cell: Cell, operands: Operands) -> Contender:
    grad = operands.int8_gradient
    trits = operands.trits
    sums = (grad.to(torch.float64) @ trits.to(torch.float64)).to(torch.int32)
    codes = cell.repeated(trits.clone, trits, trits.nbytes)
    return Product(cell, grad, sums, exact=True).contender(
        "torch._int_mm",
        lambda i: torch._int_mm(grad, codes[i]),
        [(code,) for code in codes],
        role="torch int8",
        note=_SUMS,
    )


def _weights(cell: Cell, operands: Operands, name: str) -> list[tuple[Tensor, Tensor]]:
    """Return copies of the packed weight and its exponents."""
    packed = kernel(name, "pack")(operands.trits)
    exponent = operands.exponent
    nbytes = packed.nbytes + exponent.nbytes
    return cell.repeated(lambda: (packed.clone(), exponent.clone()), (packed, exponent), nbytes)


def _dense(operands: Operands) -> Tensor:
    shape = operands.cell.shape
    exponent = operands.exponent.to(torch.int32).repeat_interleave(shape.group_size, dim=1)
    return torch.ldexp(operands.trits.to(torch.float32), exponent[:, : shape.in_features])


def _float_product(x: Tensor, operands: Operands) -> Tensor:
    return x.to(torch.float32) @ _dense(operands).t()


def _prepacked_linear(
    out_features: int, q: Tensor, trits: Tensor
) -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]] | None:
    """Return oneDNN's int8 linear with a weight in its own layout, as inductor calls it.

    None if torch lacks it. Activations are uint8 with an offset of 128: for signed ones it has no
    fast kernel on every processor.
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
