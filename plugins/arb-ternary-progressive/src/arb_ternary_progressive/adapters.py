"""Low-rank adapters (Hu et al., LoRA, 2021) beside the linears of a stack.

``y = base(x) + alpha / rank * up(down(x))`` with ``up = 0`` at birth. One linear can have several
adapters, by the name of their set: ``stack`` for the one that a stack is made with, ``progressive``
for the one that it gets when another stack arrives. They reach every linear of attention (queries,
keys, values, output) and of the feed-forward layer, in each of its experts; a router of experts has
none.

An adapter's first matrix sees what its base multiplies: rounded to int8 where the base rounds. So
the base with its adapters is one matrix, ``W + sum alpha / rank * up @ down``, which
:func:`merge_adapters` makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any, get_args

import torch
from attrs import asdict, frozen
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
#: Name of the adapters that a stack gets when another arrives.
PROGRESSIVE = "progressive"

_STORED = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@frozen
class AdapterSpec:
    """The adapters of one set in one stack.

    Attributes:
        rank: features between the two matrices.
        alpha: the output is scaled by ``alpha / rank``.
        dtype: what the two matrices are stored in: float32, bfloat16, float16 or ternary.

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

    def to_plain(self) -> dict[str, Any]:
        """Numbers and text, for a checkpoint."""
        return asdict(self)


class Adapter(nn.Module):
    """``alpha / rank * up(down(x))``; zero at birth.

    Args:
        linear: the linear that it is for.
        spec: rank, alpha and dtype.
        config: the model's; ternary matrices take their options from it.
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
        """What is added to the linear's output, ``x[..., K] -> [..., N]``."""
        update: Tensor = self.up(self.down(x))
        return update * self.scale

    def dense_weight(self) -> Tensor:
        """The matrix ``[N, K]`` that it adds, float32."""
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
        """``x[..., K] -> [..., N]``."""
        y: Tensor = self.base(x)
        for adapter in self.adapters.values():
            y = y + adapter(x)
        return y

    def dense_weight(self) -> Tensor:
        """The matrix ``[N, K]`` that base and adapters are together, float32."""
        weight = dense_weight(self.base)
        for adapter in self.adapters.values():
            assert isinstance(adapter, Adapter)
            weight = weight + adapter.dense_weight()
        return weight


def adapted_linears(module: nn.Module) -> Iterator[AdaptedLinear]:
    """Every linear in ``module`` that has adapters."""
    return (part for part in module.modules() if isinstance(part, AdaptedLinear))


def add_adapters(block: Block, name: str, spec: AdapterSpec, config: DecoderConfig) -> None:
    """Give every linear of ``block`` but routers an adapter of the set ``name``."""
    for parent, attribute, child in _linears(block):
        adapted = child if isinstance(child, AdaptedLinear) else AdaptedLinear(child)
        adapter = Adapter(adapted.base, spec, config)
        adapted.adapters[name] = adapter.to(
            next(chain(adapted.base.parameters(), adapted.base.buffers())).device
        )
        if adapted is not child:
            setattr(parent, attribute, adapted)


def merge_adapters(block: Block) -> None:
    """Put one float32 matrix in the place of every linear that has adapters.

    The function stays, but for float rounding; with ternary adapters and int8 activations also but
    for the rounding between an adapter's two matrices.
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
