"""Low-rank adapters (Hu et al., LoRA, 2021) on the linears of a stack.

``y = base(x) + alpha / rank * up(down(x))``, where ``up`` starts at 0. A linear can have several
adapters, by the name of their set: ``stack`` for those that a stack is made with, ``progressive``
for those that it gets when another stack is added. They are on every linear of attention (queries,
keys, values, output) and of the feed-forward layer, in each of its experts, but not on the router
of experts.

The first matrix of an adapter has the same input as its base: rounded to int8 if the base rounds.
So the base with its adapters is one matrix, ``W + sum alpha / rank * up @ down``, which
:func:`merge_adapters` makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import get_args

import torch
from attrs import frozen
from torch import Tensor, nn

from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.module import GroupSize
from arb_ternary_progressive.config import AdapterDtype
from arb_ternary_progressive.precision import (
    Linear,
    NVFP4Linear,
    StoredLinear,
    dense_linear,
    dense_weight,
)
from arb_ternary_text.models.block import Block
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.parts import FloatLinear

#: Name of the adapters that a stack is made with.
STACK = "stack"
#: Name of the adapters that a stack gets when another is added.
PROGRESSIVE = "progressive"

_STORED = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@frozen
class AdapterSpec:
    """Size and format of the adapters of one set in one stack.

    Attributes:
        rank: features between the two matrices.
        alpha: the output is scaled by ``alpha / rank``.
        dtype: number format of the two matrices: float32, bfloat16, float16 or ternary.

    Raises:
        UsageProblem: a value is out of range.
    """

    rank: int
    alpha: float
    dtype: AdapterDtype = "float32"

    def __attrs_post_init__(self) -> None:
        if self.rank < 1 or not 0 < self.alpha < math.inf:
            raise UsageProblem(
                f"adapter: rank and alpha must be greater than 0, not {self.rank} and {self.alpha}"
            )
        if self.dtype not in get_args(AdapterDtype):
            names = ", ".join(get_args(AdapterDtype))
            raise UsageProblem(f"adapter: dtype must be one of {names}, not {self.dtype!r}")


class Adapter(nn.Module):
    """``alpha / rank * up(down(x))``; it starts as zero.

    Args:
        linear: the linear that it is for.
        spec: rank, alpha and dtype.
        config: options of the model, for ternary matrices.
    """

    def __init__(self, linear: Linear, spec: AdapterSpec, config: DecoderConfig) -> None:
        super().__init__()
        self.spec = spec
        self.scale = spec.alpha / spec.rank
        inside = linear.in_features
        outside = linear.out_features
        activations = "int8" if linear.activations == "int8" else "float"
        self.down: FloatLinear | TernaryLinear
        self.up: FloatLinear | TernaryLinear
        if spec.dtype == "ternary":
            self.down = _ternary(
                inside,
                spec.rank,
                config,
                group_size=config.exponent_groups,
                activations=activations,
            )
            # A flip in `up` moves the output as far as a flip of a ternary base would: 1 / sqrt(K),
            # not 1 / sqrt(rank).
            offset = round(0.5 * math.log2(spec.rank / inside) - math.log2(self.scale))
            self.up = _ternary(
                spec.rank,
                outside,
                config,
                group_size="row",
                activations=activations,
                exponent_offset=offset,
            )
            self.up.set_trits(torch.zeros_like(self.up.trits()))
            return
        down = FloatLinear(
            inside, spec.rank, activations="int8" if activations == "int8" else "float"
        )
        up = FloatLinear(spec.rank, outside)
        nn.init.zeros_(up.weight)
        stored = _STORED.get(spec.dtype)
        self.down = down if stored is None else StoredLinear(down, stored)
        self.up = up if stored is None else StoredLinear(up, stored)

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to the linear's output, ``x[..., K] -> [..., N]``."""
        update: Tensor = self.up(self.down(x))
        return update * self.scale

    def dense_weight(self) -> Tensor:
        """Return the matrix ``[N, K]`` that the adapter adds, float32."""
        return self.scale * (dense_weight(self.up) @ dense_weight(self.down))

    def extra_repr(self) -> str:
        return f"rank={self.spec.rank}, alpha={self.spec.alpha}, dtype={self.spec.dtype}"


def _ternary(
    inside: int,
    outside: int,
    config: DecoderConfig,
    *,
    group_size: GroupSize,
    activations: str,
    exponent_offset: int = 0,
) -> TernaryLinear:
    return TernaryLinear(
        inside,
        outside,
        group_size=group_size,
        activations=activations,
        gradients=config.gradients,
        exponent_offset=exponent_offset,
        scale_rule=config.scale_rule,
        vote_bits=config.vote_bits,
    )


class AdaptedLinear(nn.Module):
    """A linear and its adapters, by the name of their set."""

    def __init__(self, base: Linear) -> None:
        super().__init__()
        self.base = base
        self.adapters = nn.ModuleDict()

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x[..., K] -> [..., N]``."""
        y: Tensor = self.base(x)
        for adapter in self.adapters.values():
            y = y + adapter(x)
        return y

    def dense_weight(self) -> Tensor:
        """Return the matrix ``[N, K]`` of base and adapters together, float32."""
        weight = dense_weight(self.base)
        for adapter in self.adapters.values():
            assert isinstance(adapter, Adapter)
            weight = weight + adapter.dense_weight()
        return weight


def adapted_linears(module: nn.Module) -> Iterator[AdaptedLinear]:
    """Return every linear in ``module`` that has adapters."""
    return (part for part in module.modules() if isinstance(part, AdaptedLinear))


def add_adapters(block: Block, name: str, spec: AdapterSpec, config: DecoderConfig) -> None:
    """Give every linear of ``block``, except routers, an adapter of the set ``name``."""
    for parent, attribute, child in _linears(block):
        adapted = child if isinstance(child, AdaptedLinear) else AdaptedLinear(child)
        adapter = Adapter(adapted.base, spec, config)
        adapted.adapters[name] = adapter.to(
            next(chain(adapted.base.parameters(), adapted.base.buffers())).device
        )
        if adapted is not child:
            setattr(parent, attribute, adapted)


def merge_adapters(block: Block) -> None:
    """Replace every linear that has adapters by one float32 matrix.

    The function is unchanged except for float rounding and, with ternary adapters and int8
    activations, the rounding between the two matrices of an adapter.
    """
    for parent, attribute, child in _linears(block):
        if isinstance(child, AdaptedLinear):
            setattr(parent, attribute, dense_linear(child.base, child.dense_weight()))


def _linears(block: Block) -> list[tuple[nn.Module, str, AdaptedLinear | Linear]]:
    found: list[tuple[nn.Module, str, AdaptedLinear | Linear]] = []

    def walk(parent: nn.Module) -> None:
        for attribute, child in parent.named_children():
            if attribute == "router":
                continue
            if isinstance(child, AdaptedLinear | FloatLinear | TernaryLinear | NVFP4Linear):
                found.append((parent, attribute, child))
            else:
                walk(child)

    walk(block)
    return found
