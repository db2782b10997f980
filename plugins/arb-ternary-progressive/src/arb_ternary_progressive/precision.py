"""The formats that a stack can be stored in, and the linears that implement them.

=========  =============================================================================
full       float32 parameters
half       float16 parameters, multiplied in the dtype of the residual stream
bfloat16   bfloat16 parameters, multiplied in the dtype of the residual stream
nvfp4      4-bit codes with block scales (:mod:`arb_ternary_progressive.nvfp4`), frozen
ternary    the core's ternary linears, which learn by votes
qlora      a frozen base, nvfp4 or ternary, with adapters that learn
=========  =============================================================================

Weights in few bits stay so when a model is moved or cast: ``model.to(torch.float32)`` changes the
dtype of the computation, not of the stored weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, Literal, TypeAlias

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_progressive.config import Base, Precision
from arb_ternary_progressive.nvfp4 import Packed, pack_nvfp4, unpack_nvfp4
from arb_ternary_text.models.block import Block
from arb_ternary_text.models.config import DecoderConfig, FloatPart
from arb_ternary_text.models.parts import FloatLinear, rounded_to_int8
from arb_ternary_text.models.rms_norm import RMSNorm

_STORED: Final[dict[str, torch.dtype]] = {"half": torch.float16, "bfloat16": torch.bfloat16}


class _KeepsDtype(nn.Module):
    """A module whose own tensors keep their dtype when the model is cast.

    They still move between devices.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def kept(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(kept, recurse)  # type: ignore[no-untyped-call]


class _DecodedLinear(torch.autograd.Function):
    """``x @ W.T`` with a weight that is decoded for the product and again in the backward pass.

    No dense weight is kept in between.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, decode: Callable[[torch.dtype], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(x if weight is not None and weight.requires_grad else x.new_empty(0))
        ctx.decode = decode
        ctx.weight_dtype = None if weight is None else weight.dtype
        return F.linear(x, decode(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        grad_x = grad_y @ ctx.decode(grad_y.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad_y.flatten(0, -2).mT @ x.flatten(0, -2)).to(ctx.weight_dtype)
        return grad_x, grad_weight, None


def _multiply(x: Tensor, weight: Tensor | None, decode: Callable[[torch.dtype], Tensor]) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    y: Tensor = _DecodedLinear.apply(x, weight, decode)  # type: ignore[no-untyped-call]
    return y


class StoredLinear(_KeepsDtype, FloatLinear):
    """A linear whose weight is stored in 16 bits and multiplied in the dtype of its input.

    Its gradient has the dtype of the weight: values below the smallest float16, 6e-8, are lost.
    """

    def __init__(self, linear: FloatLinear, dtype: torch.dtype) -> None:
        super().__init__(linear.in_features, linear.out_features, activations=linear.activations)
        self.weight = nn.Parameter(linear.weight.detach().to(dtype))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # nn.Linear's own name
        """Return ``x[..., K] -> [..., N]`` in the dtype of ``x``."""
        x = rounded_to_int8(input) if self.activations == "int8" else input
        return _multiply(x, self.weight, self.weight.to)


class StoredRMSNorm(_KeepsDtype, RMSNorm):
    """An RMSNorm whose gain is stored in 16 bits."""

    def __init__(self, norm: RMSNorm, dtype: torch.dtype) -> None:
        super().__init__(
            norm.normalized_shape[0], eps=norm.eps, gain=True, stored_eps=norm.stored_eps
        )
        self.weight = nn.Parameter(norm.weight.detach().to(dtype))


class NVFP4Linear(_KeepsDtype):
    """A linear whose weight is stored in NVFP4. It does not learn, but an adapter on it can.

    Buffers: ``codes`` uint8 ``[N, 8 J]``, ``scales`` float8_e4m3fn ``[N, J]`` and ``tensor_scale``,
    a float32, with ``J = ceil(K / 16)``. The dense weight is made for each product and not kept.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor

    def __init__(self, linear: FloatLinear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.activations: Literal["int8", "float"] = linear.activations
        packed = pack_nvfp4(linear.weight)
        self.register_buffer("codes", packed.codes)
        self.register_buffer("scales", packed.scales)
        self.register_buffer("tensor_scale", packed.tensor_scale)

    def dense_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the matrix ``[N, K]`` of the product."""
        return unpack_nvfp4(
            Packed(self.codes, self.scales, self.tensor_scale), self.in_features, dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x[..., K] -> [..., N]`` in the dtype of ``x``."""
        return _multiply(
            rounded_to_int8(x) if self.activations == "int8" else x, None, self.dense_weight
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"activations={self.activations}"
        )


Linear: TypeAlias = FloatLinear | TernaryLinear | NVFP4Linear


def dense_weight(linear: Linear) -> Tensor:
    """Return the weight of any linear of a stack as float32 ``[N, K]``."""
    if isinstance(linear, FloatLinear):
        return linear.weight.detach().to(torch.float32)
    return linear.dense_weight()


def block_config(config: DecoderConfig, precision: Precision, base: Base) -> DecoderConfig:
    """Return the options of the blocks of a stack, with float or ternary linears.

    Gains, if there are any, are float in float stacks, and in ternary stacks if the model's norms
    are float.
    """
    floats: tuple[FloatPart, ...] = ("linears",)
    if is_ternary(precision, base):
        floats = ("norms",) if "norms" in config.float_parts else ()
    elif config.learned_norms or "norms" in config.float_parts:
        floats = ("linears", "norms")
    # With float linears nothing is left for trits to be the mean of.
    trits = None if "linears" in floats else config.vector_trits
    return attrs.evolve(config, float_parts=floats, vector_trits=trits)


def native_precision(float_parts: Collection[str]) -> Precision:
    """Return the precision of the linears of a decoder with these float parts."""
    return "full" if "linears" in float_parts else "ternary"


def is_ternary(precision: Precision, base: Base) -> bool:
    """Return whether the linears of such a stack are ternary."""
    return precision == "ternary" or (precision == "qlora" and base == "ternary")


def is_frozen(precision: Precision) -> bool:
    """Return whether the stack's own weights never learn."""
    return precision in ("nvfp4", "qlora")


def make_block(config: DecoderConfig, precision: Precision, base: Base) -> Block:
    """Return a new block, stored in ``precision``; ``base`` is the base of ``qlora``."""
    block = Block(block_config(config, precision, base))
    store_block(block, precision, base)
    return block


def store_block(block: Block, precision: Precision, base: Base) -> None:
    """Store the float32 linears of a block in ``precision``; ternary linears are stored already."""
    dtype = _STORED.get(precision)
    packs = precision == "nvfp4" or (precision, base) == ("qlora", "nvfp4")
    children = [
        (parent, name, child)
        for parent in block.modules()
        for name, child in parent.named_children()
    ]
    for parent, name, child in children:
        if isinstance(child, FloatLinear) and dtype is not None:
            setattr(parent, name, StoredLinear(child, dtype))
        elif isinstance(child, FloatLinear) and packs:
            setattr(parent, name, NVFP4Linear(child))
        elif isinstance(child, RMSNorm) and child.elementwise_affine and dtype is not None:
            setattr(parent, name, StoredRMSNorm(child, dtype))


def dense_linear(linear: Linear, weight: Tensor) -> FloatLinear:
    """Return a float32 linear like ``linear``, with another weight."""
    with torch.device("meta"):
        made = FloatLinear(
            linear.in_features, linear.out_features, activations=_activations(linear)
        )
    made.weight = nn.Parameter(weight)
    return made


def _activations(linear: Linear) -> Literal["int8", "float"]:
    return "int8" if linear.activations == "int8" else "float"
