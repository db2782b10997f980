"""The parts of a block by the kernels of a backend, as a few nodes of the graph.

Attention is three nodes: :func:`normalized_products` gives queries, keys and values;
:func:`attention` attends over them (or :func:`turned_heads` prepares the heads for attention by
torch's operations); and a :func:`normalized_product` is the output projection. A
feed-forward layer is two: :func:`normalized_products` for gate and up, then the activation with
the down projection. The final norm and the head are one.

For backward the nodes keep what torch's operations would keep, or less: rows before a norm instead
of those after it, int8 rows once, no intermediate results of an activation, no attention scores and
neither normalised nor turned heads. The kernels are described in
:mod:`~arb_ternary_text.models.block_kernels`.

Shapes: as in :mod:`~arb_ternary_text.models.attention`; ``M`` rows ``(b, s)`` of ``D`` features,
products of ``E``, ``F`` or ``N``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from arb_ternary.ternary.module import TernaryModule
from arb_ternary_text.models.block_kernels import Kernels, eps_of, factor_of, gain_of
from arb_ternary_text.models.linear_use import LinearUse, first_anchor, weights_of

Angles = tuple[Tensor, Tensor]


class Product(NamedTuple):
    """The product of a linear, ``[M, N]``, and the factors ``[N]`` of its columns, None for none.

    Whoever reads the product applies the factors: so the graph keeps the product alone.
    """

    rows: Tensor
    factor: Tensor | None


class _NormalizedProducts(torch.autograd.Function):
    """Norm, one quantisation, one product per linear."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        _anchor: Tensor | None,
        gain: Tensor | None,
        kernels: Kernels,
        linears: Sequence[LinearUse],
        eps: float | None,
    ) -> tuple[Tensor, ...]:
        q_MD, scale_M, r_M = kernels["text.normalise_quantize"](x, eps, gain)
        x_kept = None if r_M is None else x
        ctx.save_for_backward(x_kept, q_MD, scale_M, r_M, gain, *weights_of(linears))
        ctx.kernels = kernels
        ctx.linears = linears
        ctx.size = x.shape
        return tuple(each.multiply(kernels, q_MD, scale_M, x.dtype) for each in linears)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, q_MD, scale_M, r_M, gain, *_ = ctx.saved_tensors
        needs_rows = ctx.needs_input_grad[0] or ctx.needs_input_grad[2]
        found = [
            linear.backward(grad, q_MD, scale_M, needs_input=needs_rows)
            for linear, grad in zip(ctx.linears, grads, strict=True)
        ]
        if not needs_rows:
            return (None,) * 6
        grad_gain = grad_buffer_like(gain)
        grad_x = ctx.kernels["text.normalise_quantize_backward"](
            found, x, r_M, ctx.size, gain, grad_gain
        )
        return grad_x, None, grad_gain, None, None, None


class _Attention(torch.autograd.Function):
    """Causal attention over queries, keys and values that the kernel normalises and turns."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        sizes: tuple[int, int, int],
        eps: tuple[float | None, float | None],
        cos: Tensor,
        sin: Tensor,
        query_gain: Tensor | None,
        key_gain: Tensor | None,
        *products_and_factors: Any,
    ) -> Tensor:
        products = products_and_factors[:3]
        factors = products_and_factors[3:]
        seen_ME, logs = kernels["text.attend"](
            *map(_scaled, products, factors), (cos, sin), *sizes, *eps, query_gain, key_gain
        )
        ctx.save_for_backward(cos, sin, query_gain, key_gain, seen_ME, logs, *products_and_factors)
        ctx.kernels = kernels
        ctx.settings = (*sizes, *eps)
        result: Tensor = seen_ME
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ME: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, query_gain, key_gain, seen_ME, logs, *rest = ctx.saved_tensors
        products = rest[:3]
        factors = rest[3:]
        grad_gains = grad_buffer_like(query_gain), grad_buffer_like(key_gain)
        heads = map(_scaled, products, factors)
        grads = ctx.kernels["text.attend_backward"](
            grad_ME,
            *heads,
            seen_ME,
            logs,
            (cos, sin),
            *ctx.settings,
            query_gain,
            key_gain,
            *grad_gains,
        )
        of_products = []
        of_factors = []
        for grad, product, factor in zip(grads, products, factors, strict=True):
            of_product, of_factor = factor_grad(ctx.kernels, grad, product, factor)
            of_products.append(of_product)
            of_factors.append(of_factor)
        return None, None, None, None, None, *grad_gains, *of_products, *of_factors


class _TurnedHeads(torch.autograd.Function):
    """Rows of a product as heads, normalised and turned by the angles of their positions."""

    @staticmethod
    def forward(
        ctx: Any,
        product_ME: Tensor,
        factor: Tensor | None,
        gain: Tensor | None,
        kernels: Kernels,
        sizes: tuple[int, int],
        eps: float | None,
        angles: Angles | None,
    ) -> Tensor:
        y_ME = _scaled(product_ME, factor)
        y_BHSC, r_MH = kernels["text.turn_heads"](y_ME, angles, *sizes, eps, gain)
        kept = None if r_MH is None and factor is None else product_ME
        ctx.save_for_backward(kept, r_MH, factor, gain, *(angles or ()))
        ctx.kernels = kernels
        result: Tensor = y_BHSC
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHSC: Tensor) -> tuple[Tensor | None, ...]:
        product_ME, r_MH, factor, gain, *angles = ctx.saved_tensors
        grad_gain = grad_buffer_like(gain)
        y_ME = None if r_MH is None else _scaled(product_ME, factor)
        grad_ME = ctx.kernels["text.turn_heads_backward"](
            grad_BHSC, y_ME, tuple(angles) or None, r_MH, gain, grad_gain
        )
        grad_ME, grad_factor = factor_grad(ctx.kernels, grad_ME, product_ME, factor)
        return grad_ME, grad_factor, grad_gain, None, None, None, None


class _ActivatedProduct(torch.autograd.Function):
    """Activation, norm, quantisation, product."""

    @staticmethod
    def forward(
        ctx: Any,
        gate_MF: Tensor | None,
        up_MF: Tensor,
        gate_factor: Tensor | None,
        up_factor: Tensor | None,
        gain: Tensor | None,
        _anchor: Tensor | None,
        kernels: Kernels,
        down: LinearUse,
        kind: str,
        eps: float | None,
    ) -> Tensor:
        gate = None if gate_MF is None else _scaled(gate_MF, gate_factor)
        up = _scaled(up_MF, up_factor)
        q_MF, scale_M, r_M = kernels["text.activate_quantize"](gate, up, kind, eps, gain)
        ctx.save_for_backward(
            gate_MF,
            up_MF,
            gate_factor,
            up_factor,
            gain,
            q_MF,
            scale_M,
            r_M,
            *weights_of((down,)),
        )
        ctx.kernels = kernels
        ctx.down = down
        ctx.kind = kind
        return down.multiply(kernels, q_MF, scale_M, up_MF.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, ...]:
        gate_MF, up_MF, gate_factor, up_factor, gain, q_MF, scale_M, r_M, *_ = ctx.saved_tensors
        kernels = ctx.kernels
        needs_rows = any(ctx.needs_input_grad[:5])
        grad_MF = ctx.down.backward(grad_MD, q_MF, scale_M, needs_input=needs_rows)
        if not needs_rows:
            return (None,) * 10

        gate = None if gate_MF is None else _scaled(gate_MF, gate_factor)
        up = _scaled(up_MF, up_factor)
        grad_gain = grad_buffer_like(gain)
        grad_gate, grad_up = kernels["text.activate_quantize_backward"](
            grad_MF, gate, up, ctx.kind, r_M, gain, grad_gain
        )
        grad_gate_factor = None
        if gate_MF is not None:
            grad_gate, grad_gate_factor = factor_grad(kernels, grad_gate, gate_MF, gate_factor)
        grad_up, grad_up_factor = factor_grad(kernels, grad_up, up_MF, up_factor)
        of_vectors = (grad_gate_factor, grad_up_factor, grad_gain)
        return grad_gate, grad_up, *of_vectors, None, None, None, None, None


class _Scaled(torch.autograd.Function):
    """A product times the factors of its columns."""

    @staticmethod
    def forward(ctx: Any, product_MN: Tensor, factor: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(product_MN, factor)
        ctx.kernels = kernels
        return _scaled(product_MN, factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, ...]:
        product_MN, factor = ctx.saved_tensors
        return *factor_grad(ctx.kernels, grad_MN, product_MN, factor), None


def _scaled(product_MN: Tensor, factor_N: Tensor | None) -> Tensor:
    """Return a product times its factors, if there are any, in its dtype."""
    return product_MN if factor_N is None else product_MN * factor_N.to(product_MN.dtype)


def factor_grad(
    kernels: Kernels, grad_MN: Tensor, product_MN: Tensor | None, factor_N: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of a product and of its factors from that of the scaled product."""
    if factor_N is None or product_MN is None:
        return grad_MN, None
    grad_factor = torch.zeros_like(factor_N)
    return kernels["text.scale_columns_backward"](
        grad_MN, product_MN, factor_N, grad_factor
    ), grad_factor


def grad_buffer_like(gain: Tensor | None) -> Tensor | None:
    """Return zeros that a kernel adds the gradient of ``gain`` to; None for no gain."""
    return None if gain is None else torch.zeros_like(gain)


class _NoGraph:
    """Stands in for the context of a node if there is no graph: nothing is kept for backward."""

    def save_for_backward(self, *_: object) -> None:
        """Keep nothing."""


def _run(node: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Run a node of the graph; without gradients only its forward, which is faster."""
    if torch.is_grad_enabled():
        return node.apply(*arguments)  # type: ignore[no-untyped-call]
    return node.forward(_NoGraph(), *arguments)


def normalized_products(
    kernels: Kernels, x: Tensor, norm: nn.Module, modules: Sequence[nn.Module]
) -> list[Product]:
    """Normalise rows, quantise them once and multiply them by each linear.

    Args:
        kernels: from ``kernels_for`` of all the modules.
        x: rows ``[M, D]``, or heads ``[B, H, S, C]`` whose rows are heads side by side.
        norm: the norm in front of the linears.
        modules: the ternary linears.
    """
    linears = [LinearUse.of(module) for module in modules]
    rows: tuple[Tensor, ...] = _run(
        _NormalizedProducts,
        TernaryModule.in_autocast(x),
        first_anchor(linears),
        gain_of(norm),
        kernels,
        linears,
        eps_of(norm),
    )
    for linear, product in zip(linears, rows, strict=True):
        linear.expect_votes(product)
    return [Product(product, factor_of(each)) for product, each in zip(rows, modules, strict=True)]


def scaled(kernels: Kernels, product: Product) -> Tensor:
    """Return a product with its factors applied, ``[M, N]``."""
    if product.factor is None:
        return product.rows
    y: Tensor = _run(_Scaled, product.rows, product.factor, kernels)
    return y


def normalized_product(kernels: Kernels, x: Tensor, norm: nn.Module, module: nn.Module) -> Tensor:
    """Return ``linear(norm(x))``, ``[M, N]``; arguments as for :func:`normalized_products`."""
    (product,) = normalized_products(kernels, x, norm, (module,))
    return scaled(kernels, product)


def attention(
    kernels: Kernels,
    products: Sequence[Product],
    norms: tuple[nn.Module, nn.Module],
    sizes: tuple[int, int, int],
    angles: Angles,
) -> Tensor:
    """Attend causally over queries, keys and values; return what the heads see, ``[M, E]``.

    Args:
        kernels: from ``kernels_for``.
        products: queries, keys and values.
        norms: of the heads of queries and of keys.
        sizes: query heads, key heads and positions per sequence.
        angles: cosines and sines, float32 ``[S, C / 2]``.
    """
    query_norm, key_norm = norms
    rows = [product.rows for product in products]
    factors = [product.factor for product in products]
    seen_ME: Tensor = _run(
        _Attention,
        kernels,
        sizes,
        (eps_of(query_norm), eps_of(key_norm)),
        *angles,
        gain_of(query_norm),
        gain_of(key_norm),
        *rows,
        *factors,
    )
    return seen_ME


def turned_heads(
    kernels: Kernels,
    product: Product,
    norm: nn.Module,
    sizes: tuple[int, int],
    angles: Angles | None,
) -> Tensor:
    """Return a product as heads ``[B, heads, S, C]``, normalised and turned.

    Args:
        kernels: from ``kernels_for``.
        product: queries, keys or values.
        norm: of each head.
        sizes: heads and positions per sequence.
        angles: cosines and sines, float32 ``[S, C / 2]``; None turns nothing.
    """
    y_BHSC: Tensor = _run(
        _TurnedHeads,
        product.rows,
        product.factor,
        gain_of(norm),
        kernels,
        sizes,
        eps_of(norm),
        angles,
    )
    return y_BHSC


def feed_forward(
    kernels: Kernels,
    x: Tensor,
    norm: nn.Module,
    linears: Sequence[nn.Module],
    kind: str,
    hidden_norm: nn.Module,
) -> Tensor:
    """Return ``down(norm(act(up(norm(x)))))`` of ``x [..., D]``.

    Args:
        kernels: from ``kernels_for`` of all the modules.
        x: the residual stream.
        norm: in front of gate and up.
        linears: gate (none for ``relu2``), up and down.
        kind: the activation.
        hidden_norm: in front of down.
    """
    *inner, down_module = linears
    products = normalized_products(kernels, x.flatten(0, -2), norm, inner)
    up = products[-1]
    gate = products[0] if len(products) == 2 else None
    down = LinearUse.of(down_module)
    y_MD: Tensor = _run(
        _ActivatedProduct,
        None if gate is None else gate.rows,
        up.rows,
        None if gate is None else gate.factor,
        up.factor,
        gain_of(hidden_norm),
        down.anchor,
        kernels,
        down,
        kind,
        eps_of(hidden_norm),
    )
    down.expect_votes(y_MD)
    return scaled(kernels, Product(y_MD, factor_of(down_module))).view_as(x)
